"""Every error deltachain raises, grouped by what its handler does next.

::

    DeltaChainError                          base; carries .hint
    ├── ConfigError          (ValueError)    wrong argument, URL or extra        -> fix the call
    │   ├── EngineVersionError               engine lacks names that are needed  -> change version
    │   ├── UnsupportedEngineError           engine in a mode that is refused    -> start it otherwise
    │   ├── UnsupportedModelError            model or optimizer that is refused  -> change it, or export
    │   └── OldBitsError                     a delta needs bits not held here    -> plan around it
    ├── StoreError                           .key, .url
    │   ├── ObjectNotFoundError (FileNotFoundError)                              -> replan
    │   │   └── NoChainError                 nothing was published at this URL   -> wait for it
    │   ├── AlreadyExistsError               put-if-absent lost                  -> chain decides
    │   ├── StorePermissionError (PermissionError)                               -> fix credentials
    │   └── StoreUnavailableError            transient, retries exhausted        -> retry later
    ├── ChainError                           .version
    │   ├── NoVersionError                   its first version is on its way     -> wait for it
    │   ├── ChainMismatchError               another model lives at this URL     -> use another URL
    │   ├── PublisherFencedError             another publisher committed         -> stop publishing
    │   ├── RankError                        another rank failed or was late     -> the next version covers it
    │   ├── ForkedChainError                 history differs from what was held  -> stop; a person decides
    │   ├── StoreWentBackError               what is held is gone from the store -> put it back, or roll back
    │   ├── MirrorLagsError                  what is held is not in the mirror yet -> wait
    │   ├── StaleChainError                  no recent sign of the publisher     -> see whether it runs
    │   └── BrokenChainError                 no route to the version             -> publish an anchor
    ├── FormatError                          .key
    │   ├── UnsupportedFormatError           written by a newer deltachain       -> upgrade
    │   ├── MalformedError                   violates FORMAT.md                  -> refuse; report
    │   ├── SignatureError                   not signed by a trusted key         -> refuse; a person decides
    │   └── DigestMismatchError              .expected, .actual                  -> refetch once, then refuse
    ├── ApplyError                           .version, .tensor
    │   ├── BaseMismatchError                target holds other bits; nothing written   -> replan
    │   ├── StageAbandonedError              objects had not arrived             -> stage again
    │   ├── TensorMismatchError              unknown name, shape or dtype; nothing written -> fix mapping
    │   │   └── EngineDamagedError           it computes something else now      -> restart the engine
    │   ├── PartialApplyError                failed while writing                -> restored, or poisoned
    │   │   ├── LeaderReplacedError          another leader has the ranks; nothing written -> stop this one
    │   │   └── ExpertsMovedError            experts are in other slots; nothing written -> stage again
    │   ├── UnfinishedSwapError              a rank could not load               -> undone on all
    │   └── PoisonedError                    state cannot be proven             -> heal from nothing
    └── ControlPlaneError                    never fatal to a role               -> log once, continue

Each class has an ``exit_code``, the exit status of the command line, and ``retryable``: whether the
same call may succeed later without any other change.
"""

from typing import Any, ClassVar, Final, TypeVar

from deltachain.redact import redacted_text

DOCS: Final = "https://github.com/OWNER/deltachain/tree/HEAD/docs"  # where the documents lie

_EXITS: Final = f"{DOCS}/troubleshooting.md#exit-code"
"""Begin of the places where classes are explained, by exit code and name of the family."""

_E = TypeVar("_E", bound="DeltaChainError")


class DeltaChainError(Exception):
    """Base class of every error that deltachain raises.

    Args:
        message: The object concerned, the expected value and the found value; of URLs in it, and
            in the hint, nothing is kept that may be secret.
        hint: The action that resolves the error, printed on a second line.

    Attributes:
        page: URL of the page that explains the class, or lists what it refuses; printed on a line
            of its own.

    Examples:
        >>> try:
        ...     deltachain.Subscriber(new_url, weights).update()
        ... except deltachain.DeltaChainError as error:
        ...     error.exit_code, error.retryable, error.hint
        (3, False, 'no publisher has created a chain here yet; check the URL')
    """

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""
    page: ClassVar[str] = f"{_EXITS}-1-deltachainerror"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(redacted_text(message))
        self.hint = redacted_text(hint) or self.default_hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes: the constructor of a subclass may need more than a message."""
        return _remade, (type(self), self.args), self.__dict__

    def __str__(self) -> str:
        """Return the message, followed by hint and page on lines of their own."""
        lines = [super().__str__()]
        lines += [f"  hint: {self.hint}"] if self.hint else []
        lines += [f"  page: {self.page}"] if self.page else []
        return "\n".join(lines)


class ConfigError(DeltaChainError, ValueError):
    """An argument, a URL or an installed extra is wrong."""

    exit_code = 2
    page = f"{_EXITS}-2-configerror"


class EngineVersionError(ConfigError):
    """The inference engine lacks names that deltachain needs of it."""


class UnsupportedEngineError(ConfigError):
    """The inference engine runs in a mode in which versions cannot be proven or applied."""

    page = f"{DOCS}/troubleshooting.md#engines-that-are-refused"


class UnsupportedModelError(ConfigError):
    """The model, its checkpoint or its optimizer cannot be published as it is."""

    page = f"{DOCS}/trainers.md#what-is-refused"


class OldBitsError(ConfigError):
    """A delta cannot be decoded with the old bits that are held here."""


class StoreError(DeltaChainError):
    """An operation of the object store failed."""

    exit_code = 3
    page = f"{_EXITS}-3-storeerror"

    def __init__(self, message: str, *, key: str = "", url: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key
        self.url = url


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """No object has this key."""


class NoChainError(ObjectNotFoundError):
    """The URL has no chain yet, nor traces of one."""


class AlreadyExistsError(StoreError):
    """An object already exists under the key of a put-if-absent."""


class StorePermissionError(StoreError, PermissionError):
    """The store rejected the credentials, or they do not permit the operation."""

    default_hint = "check the credentials and their permissions at this URL"


class StoreUnavailableError(StoreError):
    """The store did not answer, retries included."""

    retryable = True
    default_hint = "the store may be down or unreachable; try again later"


class ChainError(DeltaChainError):
    """The state of the chain does not allow the operation."""

    exit_code = 4
    page = f"{_EXITS}-4-chainerror"

    def __init__(self, message: str, *, version: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.version = version


class ChainMismatchError(ChainError):
    """Another chain, or the chain of another model, lives at this URL."""

    default_hint = "give every model and run a URL of its own"


class PublisherFencedError(ChainError):
    """Another publisher committed this version or took the chain over."""

    default_hint = "stop this publisher: another one owns the chain now"


class RankError(ChainError):
    """Another rank of the trainer failed, or did not answer in time."""

    default_hint = "nothing is lost: the next version covers it, once the ranks are connected again"


class ForkedChainError(ChainError):
    """The history in the store is not the history that led to the held version."""

    default_hint = (
        "two histories exist: stop the publisher of one; to follow the store's, roll replicas back to "
        "a version before they part (`rollback`, then `release`), or let them join from nothing"
    )


class StoreWentBackError(ChainError):
    """The newest committed versions are gone from the store; it is older than the held version."""

    retryable = True
    default_hint = (
        "an older copy was restored, or the newest versions were removed: put them back; if they "
        "are lost, roll replicas back to an existing version"
    )


class MirrorLagsError(ChainError):
    """The store is a mirror that does not have the held version yet."""

    retryable = True
    default_hint = "nothing is wrong: updates continue once the mirror has a later version"


class StaleChainError(ChainError):
    """The store shows older versions or records than its heartbeat names, or the limit allows."""

    retryable = True
    default_hint = (
        "the publisher does not run, or the store withholds newer versions; see which, or raise "
        "DELTACHAIN_MAX_HEARTBEAT_AGE_S"
    )


class BrokenChainError(ChainError):
    """No readable sequence of edges leads to the version."""

    default_hint = (
        "restart the publisher, which adds an anchor, restore a backup, or give the command the base "
        "checkpoint"
    )


class NoVersionError(ChainError):
    """The chain has no version yet."""


def no_version(url: str, hint: str = "wait for the publisher's first commit") -> NoVersionError:
    return NoVersionError(f"{url} has no version yet", hint=hint)


class FormatError(DeltaChainError):
    """An object does not follow FORMAT.md."""

    exit_code = 5
    page = f"{_EXITS}-5-formaterror"

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class UnsupportedFormatError(FormatError):
    """The object was written by a newer deltachain."""

    default_hint = "upgrade deltachain"


_DAMAGED: Final = (
    "the object is damaged and was not used; if it stays so, restore it from a backup, or remove "
    "it and restart the publisher"
)


class MalformedError(FormatError):
    """The object violates FORMAT.md."""

    default_hint = _DAMAGED


class SignatureError(FormatError):
    """The document is not signed by a trusted key; nothing of it was used."""

    default_hint = (
        "the writer is another, has no signing key, or its public key is missing from "
        "DELTACHAIN_TRUSTED_KEYS"
    )


class DigestMismatchError(FormatError):
    """The bytes of an object do not have the recorded digest."""

    default_hint = _DAMAGED

    def __init__(
        self, message: str, *, expected: str, actual: str, key: str = "", hint: str = ""
    ) -> None:
        super().__init__(f"{message}: expected {expected}, found {actual}", key=key, hint=hint)
        self.expected = expected
        self.actual = actual


class ApplyError(DeltaChainError):
    """A delta could not be applied to a target."""

    exit_code = 6
    page = f"{_EXITS}-6-applyerror"

    def __init__(
        self, message: str, *, version: int | None = None, tensor: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.version = version
        self.tensor = tensor


class StageAbandonedError(ApplyError):
    """A rank stopped staging, since objects of the plan had not arrived; nothing was written."""

    default_hint = "stage again once all objects are there"


class BaseMismatchError(ApplyError):
    """The target does not hold the base bits of the delta; nothing was written."""

    default_hint = (
        "plan again from nothing: the target was modified externally, or an object is damaged, which "
        "`deltachain verify` names"
    )


class TensorMismatchError(ApplyError):
    """A tensor is unknown to the target, or has another shape or dtype; nothing was written."""

    default_hint = "the target is not the model of this chain"


class EngineDamagedError(TensorMismatchError):
    """The engine's outputs changed while its weight layout was probed; it must not serve."""

    default_hint = "restart the engine before it serves again"


class PartialApplyError(ApplyError):
    """A swap failed while writing."""

    default_hint = "the old bits were restored; stage again"


class LeaderReplacedError(PartialApplyError):
    """Another leader has attached to the ranks of this replica; nothing was written."""

    default_hint = "stop this leader, or restart the engine to attach again"


class ExpertsMovedError(PartialApplyError):
    """The engine has moved experts since they were found, or is moving them; nothing was written."""

    default_hint = "stage again: the ranks then find them anew"


class UnfinishedSwapError(ApplyError):
    """A rank could not load a version; it loads the old bits again when all ranks do."""

    default_hint = "the leader undoes the swap on every rank, or heals the replica"


class PoisonedError(ApplyError):
    """The target cannot prove its state and serves nothing until it is healed."""

    default_hint = "heal it by an update from nothing (an anchor or the base checkpoint)"


class ControlPlaneError(DeltaChainError):
    """The control plane failed; no role depends on it."""

    exit_code = 7
    page = f"{_EXITS}-7-controlplaneerror"
    retryable = True

    def __init__(self, message: str, *, refusal: str = "", hint: str = "") -> None:
        """Create the error.

        Args:
            message: As of :class:`DeltaChainError`.
            refusal: Name of the error class in the peer's answer; empty if there was none.
            hint: As of :class:`DeltaChainError`.
        """
        super().__init__(message, hint=hint)
        self.refusal = refusal


def _remade(kind: type[_E], args: tuple[Any, ...]) -> _E:
    """Create an unpickled error, before its attributes are set."""
    error = kind.__new__(kind)
    error.args = args
    return error
