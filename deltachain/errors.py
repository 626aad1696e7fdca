"""Every error deltachain raises, grouped by what its handler does next.

::

    DeltaChainError                          base; carries .hint
    ├── ConfigError          (ValueError)    wrong argument, URL or extra        -> fix the call
    │   └── EngineVersionError               engine outside the tested range     -> change version
    ├── StoreError                           .key, .url
    │   ├── ObjectNotFoundError (FileNotFoundError)                              -> replan
    │   ├── AlreadyExistsError               put-if-absent lost                  -> chain decides
    │   ├── StorePermissionError (PermissionError)                               -> fix credentials
    │   └── StoreUnavailableError            transient, retries exhausted        -> retry later
    ├── ChainError                           .version
    │   ├── ChainMismatchError               another model lives at this URL     -> use another URL
    │   ├── PublisherFencedError             another publisher committed         -> stop publishing
    │   ├── RankError                        another rank failed or was late     -> the next version covers it
    │   ├── ForkedChainError                 history differs from what was held  -> stop; a person decides
    │   ├── StoreWentBackError               what is held is gone from the store -> put it back, or roll back
    │   └── BrokenChainError                 no route to the version             -> publish an anchor
    ├── FormatError                          .key
    │   ├── UnsupportedFormatError           written by a newer deltachain       -> upgrade
    │   ├── MalformedError                   violates FORMAT.md                  -> refuse; report
    │   └── DigestMismatchError              .expected, .actual                  -> refetch once, then refuse
    ├── ApplyError                           .version, .tensor
    │   ├── BaseMismatchError                target holds other bits; nothing written   -> replan
    │   ├── TensorMismatchError              unknown name, shape or dtype; nothing written -> fix mapping
    │   │   └── EngineDamagedError           it computes something else now      -> restart the engine
    │   ├── PartialApplyError                failed while writing                -> restored, or poisoned
    │   │   └── LeaderReplacedError          another leader has the ranks; nothing written -> stop this one
    │   └── PoisonedError                    state cannot be proven             -> heal from nothing
    └── ControlPlaneError                    never fatal to a role               -> log once, continue

Every class has an ``exit_code``, which the command line exits with, and ``retryable``, which says
whether the same call may succeed later without anybody changing anything.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, TypeVar

_E = TypeVar("_E", bound="DeltaChainError")


class DeltaChainError(Exception):
    """Base of every error raised by deltachain.

    Args:
        message: The object, what was expected, what was found.
        hint: What the person who reads this should do now.
    """

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint or self.default_hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what the error holds: a subclass may need more than its message to be made."""
        return _remade, (type(self), self.args), self.__dict__

    def __str__(self) -> str:
        """The message, and the hint on a line of its own."""
        message = super().__str__()
        return f"{message}\n  hint: {self.hint}" if self.hint else message


class ConfigError(DeltaChainError, ValueError):
    """An argument, a URL or an installed extra is wrong."""

    exit_code = 2


class EngineVersionError(ConfigError):
    """The inference engine is outside the tested range."""


class StoreError(DeltaChainError):
    """The object store did not do what was asked."""

    exit_code = 3

    def __init__(self, message: str, *, key: str = "", url: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key
        self.url = url


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """No object has this key."""


class AlreadyExistsError(StoreError):
    """A put-if-absent found an object under its key."""


class StorePermissionError(StoreError, PermissionError):
    """The store refused the credentials, or they do not allow this."""

    default_hint = "check the credentials and what they may do at this URL"


class StoreUnavailableError(StoreError):
    """The store did not answer, and retrying did not help."""

    retryable = True
    default_hint = "the store may be down or unreachable; try again later"


class ChainError(DeltaChainError):
    """The chain does not allow what was asked."""

    exit_code = 4

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
    """Another rank of the trainer failed, or sent nothing in time."""

    default_hint = "nothing is lost: the next version covers it, once the ranks are connected again"


class ForkedChainError(ChainError):
    """The history in the store is not the history that led to the held version."""

    default_hint = (
        "two histories exist: find out which publishers wrote them, and stop all but one; to follow "
        "the one in the store, roll replicas back to a version before it parts from the other "
        "(`rollback`, then `release`), or let them join again from nothing"
    )


class StoreWentBackError(ChainError):
    """The store is older than what is held: versions that were committed are gone from its end."""

    retryable = True
    default_hint = (
        "an older copy of the store was restored, or its newest versions were removed: put them "
        "back; if they are lost for good, roll replicas back to a version that is there"
    )


class BrokenChainError(ChainError):
    """No readable sequence of edges leads to the version."""

    default_hint = "publish an anchor, or give the base checkpoint"


class FormatError(DeltaChainError):
    """Bytes that were read are not what FORMAT.md says they are."""

    exit_code = 5

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class UnsupportedFormatError(FormatError):
    """The object was written by a newer deltachain."""

    default_hint = "upgrade deltachain"


_DAMAGED: Final = (
    "the object is damaged and was not used; if it stays so, put it back from a backup, "
    "or remove it and start the publisher again"
)


class MalformedError(FormatError):
    """The object violates FORMAT.md."""

    default_hint = _DAMAGED


class DigestMismatchError(FormatError):
    """The bytes do not have the digest that names them."""

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

    def __init__(
        self, message: str, *, version: int | None = None, tensor: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.version = version
        self.tensor = tensor


class BaseMismatchError(ApplyError):
    """The target does not hold the bits the delta applies to; nothing was written."""

    default_hint = "plan again from nothing: the target was changed by somebody else"


class TensorMismatchError(ApplyError):
    """A tensor is unknown to the target, or has another shape or dtype; nothing was written."""

    default_hint = "the target is not the model of this chain"


class EngineDamagedError(TensorMismatchError):
    """An engine computes something else since ways into its weights were tried; it must not serve."""

    default_hint = "restart the engine; it must not serve as it is"


class PartialApplyError(ApplyError):
    """A swap failed while writing."""

    default_hint = "the old bits were restored; stage again"


class LeaderReplacedError(PartialApplyError):
    """The ranks of this replica obey another leader since; nothing was written."""

    default_hint = "a replica has one leader: stop this one, or restart the engine to lead it again"


class PoisonedError(ApplyError):
    """The target cannot prove its state and serves nothing until it is healed."""

    default_hint = "heal it by an update from nothing (an anchor or the base checkpoint)"


class ControlPlaneError(DeltaChainError):
    """The control plane failed; no role depends on it."""

    exit_code = 7
    retryable = True

    def __init__(self, message: str, *, refusal: str = "", hint: str = "") -> None:
        """Say what failed.

        Args:
            message: As of every error here.
            refusal: Name of the class of the error that the other side answered with.
            hint: As of every error here.
        """
        super().__init__(message, hint=hint)
        self.refusal = refusal


def _remade(kind: type[_E], args: tuple[Any, ...]) -> _E:
    """An unpickled error, before its attributes are set."""
    error = kind.__new__(kind)
    error.args = args
    return error
