"""Lookup of manifests: which versions exist, and their metadata in the store.

Metadata is remembered if the store reports content hashes, or has no conditional puts: a manifest
that changed between two looks is a fork.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from deltachain import errors
from deltachain.chain.checks import once_more
from deltachain.chain.identity import identity_there, replaced
from deltachain.chain.trust import Trust
from deltachain.format import documents
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, manifest_key, object_digest, version_of
from deltachain.store import ObjectInfo, Store
from deltachain.threads import Pool
from deltachain.types import Buffer, StateDigest, Version

MAX_HINT: Final = 1 << 16
"""Size limit of a hint, in bytes. It is not authenticated, so reading it must be cheap."""

MAX_ANCHORS: Final = 16  # number of anchors used from a hint, the newest
MAX_VERSION: Final = 1 << 53  # largest plausible version; a hint with a larger one is ignored


def read_hint(store: Store) -> documents.Head:
    try:
        hint = documents.parse(store.get(HEAD_KEY, limit=MAX_HINT), documents.Head, key=HEAD_KEY)
    except (errors.ObjectNotFoundError, errors.FormatError):
        return documents.Head(version=0)
    if hint.version > MAX_VERSION:
        return documents.Head(version=0)
    return replace(hint, anchors=hint.anchors[-MAX_ANCHORS:])


WIDE: Final = 16  # keys looked up by one request, in stores that look up many
LIMIT: Final = 10**8  # number of keys, since numbers have eight digits
NONE: Final = -1  # number of the newest record if no record exists


def newest_number(store: Store, key: Callable[[int], str], *, known: int = NONE) -> int:
    """Find the largest number of a record, in O(log n) lookups.

    Searches by doubling and bisection. Records that were lost below the newest one hide it only if
    every number that was looked up above them is lost as well.
    """
    width = min(store.capabilities.probes, WIDE)
    low, high, leap = known, LIMIT, 0
    while high - low > 1:
        if high == LIMIT:  # no record is known to be absent
            asked = [known + (1 << (leap + n)) for n in range(width)]
            asked, leap = [number for number in asked if number < LIMIT], leap + width
            if not asked:
                return low
        else:
            step = max(1, (high - low) // (width + 1))
            asked = list(range(low + step, high, step))[:width]
        found = store.find_all(map(key, asked))
        low = max((number for number in asked if key(number) in found), default=low)
        absent = (number for number in asked if key(number) not in found)
        high = min((number for number in absent if number > low), default=high)
    return low


NEXT: Final = 16  # consecutive versions in one wide look, before the leaps
LEAPS: Final = 24  # leaps of doubling width in one wide look, up to 16 million versions ahead
SEEN: Final = 512  # number of manifests whose metadata is remembered


class Standing(NamedTuple):
    """State of a committed version in the store."""

    manifest: str | None  # digest of the version's manifest; `None` if it is gone
    chain: str | None  # id of the chain in the store; `None` if its identity is gone
    # The newest version found: a later one only behind a gap; `None` for no version.
    newest: Version | None
    lags: bool = False  # whether the version is later than all found, in a mirror


class Looks:
    """Lookup of one chain's manifests, with a memory of earlier answers."""

    def __init__(self, store: Store, chain: str, identity: ObjectInfo | None = None) -> None:
        self._store = store
        self._chain = chain
        self._identity = identity
        can = store.capabilities
        self.is_wide = can.probes > 1
        self.remembers = self.is_wide or not can.conditional_put
        self.is_lost = False
        self.missed: Version | None = None
        self._has_gap = False
        self._seen: OrderedDict[Version, ObjectInfo] = OrderedDict()
        self._digests: OrderedDict[Version, str] = OrderedDict()
        self._lock = Lock()

    def at(self, versions: Iterable[Version]) -> dict[Version, ObjectInfo]:
        wanted = list(versions)
        known = [CHAIN_KEY] if self._identity else []
        infos = self._store.find_all([*known, *map(manifest_key, wanted)])
        if self._identity:
            self._check_identity(infos.get(CHAIN_KEY))
        found = {
            version: infos[manifest_key(version)]
            for version in wanted
            if manifest_key(version) in infos
        }
        if self.remembers:
            self._remember(found)
        return found

    def seen(self, version: Version) -> ObjectInfo | None:
        return self._seen.get(version) or self.at([version]).get(version)

    def forget(self, version: Version) -> None:
        with self._lock:
            self._seen.pop(version, None)
            self._digests.pop(version, None)

    def forget_after(self, version: Version) -> None:
        """Forget the metadata of later manifests, which may be replaced after a rollback."""
        for later in [seen for seen in list(self._seen) if seen > version]:
            self.forget(later)

    def read(self, version: Version, digest: str) -> None:
        if self.remembers:
            with self._lock:
                self._digests[version] = digest
                self._digests.move_to_end(version)
                while len(self._digests) > SEEN:
                    self._digests.popitem(last=False)

    def digest(self, version: Version) -> str | None:
        return self._digests.get(version) if version in self._seen else None

    @property
    def sees_identity(self) -> bool:
        return self._identity is not None

    def ahead(self, versions: Sequence[Version]) -> None:
        """Prefetch the metadata of many versions in one request, if the store supports it."""
        if self.is_wide and len(versions) > 1:
            self.at(versions[:SEEN])

    def has(self, version: Version) -> bool:
        return version in self.at([version])

    def newest(self, known: Version) -> Version:
        """Find the newest version before any gap, starting from a committed one."""
        if self.remembers and not self.is_wide:
            self._note(known, self.at([known]))
        low, high = self._leap(known) if self.is_wide else self._double(known)
        while high - low > 1:
            if self.is_wide:
                step = max(1, (high - low) // (NEXT + LEAPS))
                found = self.at(range(low + step, high, step))
                low = max(found, default=low)
                high = min(high, low + step)
            else:
                middle = (low + high) // 2
                low, high = (middle, high) if self.has(middle) else (low, middle)
        return low

    def beyond(self, known: Version, hinted: Version = 0) -> Version | None:
        """Find a version behind a gap: one that exists although the one after ``known`` does not.

        Takes few requests: a gap of several versions may stay undetected until a hint names a
        version behind it.
        """
        near = [known + 2, hinted] if hinted > known + 2 else [known + 2]
        last = max(self.at(_ahead(known) if self.is_wide else near), default=known)
        return None if last <= known + 1 or self.has(known + 1) else last

    def last(self, known: Version, hinted: Version = 0) -> Version:
        """Find the newest version, gaps or not, with few requests."""
        while True:
            with suppress(errors.BrokenChainError):
                known = self.newest(known)
            if self.is_wide and not self._has_gap:
                return known
            further = self.beyond(known, hinted)
            if further is None:
                return known
            known = further

    def around(self, version: Version) -> dict[Version, ObjectInfo]:
        """Look up a version and later ones, in one request if the store supports it."""
        return self.at([version, *_ahead(version)])

    def listed(self) -> Version | None:
        """List the newest version, for a store without a hint and version 0."""
        versions = [version_of(info.key) for info in self._store.list("manifests/")]
        return max((version for version in versions if version is not None), default=None)

    def _leap(self, known: Version) -> tuple[Version, Version]:
        """Look up the next versions and leaps; return a committed and an absent version."""
        ahead = _ahead(known)
        found = self.at([known, *ahead])
        self._note(known, found)
        newest = max(found, default=known)
        absent = next((version for version in (known, *ahead) if version not in found), newest + 1)
        self._has_gap = newest > absent
        if self._has_gap and absent <= known + 1:
            raise errors.BrokenChainError(
                f"manifest of version {absent} is missing, although version {newest} exists",
                version=absent,
                hint="manifests must never be deleted: it was removed, or the store lags",
            )
        return (absent - 1, absent) if self._has_gap else (newest, absent)

    def _double(self, known: Version) -> tuple[Version, Version]:
        """Search with doubling steps; return a committed version and an absent one after it.

        Steps of one and two come first: with one new version, the usual case, two requests suffice.
        """
        low, ahead = known, 1
        while self.has(known + ahead):
            low, ahead = known + ahead, ahead * 2
        return low, known + ahead

    def _note(self, known: Version, found: Mapping[Version, ObjectInfo]) -> None:
        self.missed = None if known in found else known

    def _remember(self, found: Mapping[Version, ObjectInfo]) -> None:
        for version, info in found.items():
            with self._lock:
                seen = self._seen.get(version)
            if seen is not None and not same_content(seen, info):
                self._check_content(version, seen, info)
            with self._lock:
                self._seen[version] = info
                self._seen.move_to_end(version)
                while len(self._seen) > SEEN:
                    self._seen.popitem(last=False)

    def _check_content(self, version: Version, seen: ObjectInfo, info: ObjectInfo) -> None:
        known = self._digests.get(version)
        if known and not (seen.pin and info.pin):
            data = self._store.read(info.key, nbytes=info.nbytes, pin=info.pin)
            if object_digest(data) == known:
                return
        raise errors.ForkedChainError(
            f"the manifest of version {version} was replaced by another publisher",
            version=version,
        )

    def _check_identity(self, info: ObjectInfo | None) -> None:
        self.is_lost = info is None
        if info is None or self._identity is None or same_content(self._identity, info):
            return
        data = self._store.read(CHAIN_KEY, nbytes=info.nbytes, pin=info.pin)
        found = documents.parse(bytes(data), documents.Identity, key=CHAIN_KEY).chain
        if found != self._chain:
            raise errors.ForkedChainError(
                f"the chain at this URL was replaced by another publisher's: {CHAIN_KEY} names "
                f"chain {found}, expected {self._chain}"
            )
        self._identity = info


def _ahead(known: Version) -> list[Version]:
    """Return the versions of one wide look: the next ones, and leaps of doubling width."""
    near = [known + step for step in range(1, NEXT + 1)]
    return [*near, *(known + NEXT + (1 << leap) for leap in range(LEAPS))]


def same_content(seen: ObjectInfo, info: ObjectInfo) -> bool:
    """Return whether two looks show the same content, as far as the store reports it."""
    if seen.pin and info.pin:
        return (seen.pin, seen.nbytes) == (info.pin, info.nbytes)
    return (seen.nbytes, seen.modified) == (info.nbytes, info.modified)


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed manifest."""

    manifest: documents.Manifest
    digest: str  # blake3 of its exact bytes
    signatures: tuple[documents.Signature, ...] = ()  # signatures in its envelope, true or not
    # Ids of the trusted keys that signed it; empty without trusted keys.
    signed_by: tuple[str, ...] = ()

    @property
    def version(self) -> Version:
        return self.manifest.version

    @property
    def state(self) -> StateDigest:
        return StateDigest.parse(self.manifest.state)


def misplaced(key: str, found: documents.Manifest) -> errors.MalformedError:
    return errors.MalformedError(
        f"{key}: is version {found.version} of chain {found.chain}",
        key=key,
        hint="another object replaced it: restore it from a backup; or remove "
        f"{key} and every later manifest, and restart the publisher",
    )


TRUSTING: Final = Trust()  # trust of a reader without trusted keys
LISTED: Final = 1 << 14
"""Number of edge records that are remembered as listed by accepted manifests."""


class Manifests:
    def __init__(
        self,
        store: Store,
        chain: str,
        identity: ObjectInfo | None = None,
        trust: Trust = TRUSTING,
    ) -> None:
        self._store = store
        self._chain = chain
        self._trust = trust
        self._oldest_signed: Version | None = None
        self._proving = Lock()
        self._named: dict[Version, str] = {}
        self._listed: dict[str, None] = {}
        self.looks = Looks(store, chain, identity)

    def read(self, version: Version) -> Committed:
        """Read the manifest of a version; once more if it is unreadable."""
        return self.document(version)[0]

    def document(self, version: Version) -> tuple[Committed, bytes]:
        """Read the manifest of a version, and return its exact bytes too; see :meth:`read`."""
        found, data = self._checked(version)
        if self._trust.trusted is None:
            return found, data
        with self._proving:
            self._prove(found)
            listed = (edge.digest for edge in found.manifest.recent if edge.record)
            self._listed.update(dict.fromkeys(listed))
            for digest in list(self._listed)[:-LISTED]:
                del self._listed[digest]
        return found, data

    def lists(self, digest: str) -> bool:
        return digest in self._listed

    def _prove(self, found: Committed) -> None:
        """Raise unless a trusted key signed a manifest, or one that descends from it.

        Manifests from before the first signature, or by a key that is no longer trusted, are named
        by digest: each by the next one as its parent, up to one that a trusted key signed.
        """
        oldest = self._oldest_signed
        if found.signed_by:
            self._oldest_signed = found.version if oldest is None else min(oldest, found.version)
        if found.signed_by or self._named.get(found.version) == found.digest:
            return
        refusal = self._trust.refusal(found.signatures, manifest_key(found.version))
        if oldest is None or oldest < found.version:
            oldest = self.looks.newest(found.version)
            if oldest == found.version or not self._checked(oldest)[0].signed_by:
                raise refusal
        named = {found.version: found.digest}
        for version in range(found.version + 1, oldest + 1):
            later, _ = self._checked(version)
            if later.manifest.parent != named[version - 1]:
                raise refusal
            if later.signed_by or self._named.get(version) == later.digest:
                self._named |= named
                return
            named[version] = later.digest

    def _checked(self, version: Version) -> tuple[Committed, bytes]:
        key = manifest_key(version)
        found, data = once_more(partial(self._read, key, version))
        manifest = found.manifest
        if manifest.chain != self._chain:
            raise self._of_another_chain(key, manifest)
        if manifest.version != version:
            raise misplaced(key, manifest)
        documents.check_state(manifest.state, key=key)
        self.looks.read(version, found.digest)
        return found, data

    def _of_another_chain(
        self, key: str, manifest: documents.Manifest
    ) -> errors.ChainMismatchError:
        there = None
        with suppress(errors.FormatError):  # a damaged one tells nothing
            there = identity_there(self._store)
        if there == manifest.chain:
            return replaced(self._store.url, there, f"{self._chain} was opened", manifest.version)
        return errors.ChainMismatchError(
            f"{key}: belongs to chain {manifest.chain}, but {CHAIN_KEY} to {self._chain}: two "
            "chains were created here",
            version=manifest.version,
            hint=f"restore the {CHAIN_KEY} of these manifests, or remove them",
        )

    def digest(self, version: Version) -> str | None:
        """Return the current blake3 of a version's manifest; ``None`` if it is missing.

        Always asks the store; reads the manifest unless the store reports a content hash.
        """
        if self.looks.remembers and not self.looks.has(version):
            return None
        return self.content(version)

    def content(self, version: Version) -> str | None:
        """Return the blake3 of a manifest after a look; read it only if it is unknown."""
        known = self.looks.digest(version)
        if known is not None:
            return known
        try:  # the caller compares digests, trusted or not
            return self._checked(version)[0].digest
        except errors.ObjectNotFoundError:
            return None

    def _read(self, key: str, version: Version) -> tuple[Committed, bytes]:
        data = bytes(self._bytes(version))
        manifest = documents.unseal(data, documents.Manifest, key=key)
        signers = self._trust.signers(data, documents.Manifest, self._chain)
        return Committed(manifest, object_digest(data), documents.opened(data)[1], signers), data

    def find(self, version: Version) -> Committed | None:
        try:
            return self.read(version)
        except errors.ObjectNotFoundError:
            return None

    def between(
        self, first: Version, last: Version, reads: int, read: Callable[[Version], _T]
    ) -> Iterator[tuple[Version, _T]]:
        """Yield the versions of a range in order, each with its manifest."""
        with nullcontext() if reads == 1 else Pool(reads) as pool:
            for start in range(first, last + 1, SEEN):
                versions = range(start, min(start + SEEN, last + 1))
                self.looks.ahead(versions)
                ahead = pool.ordered(read, versions, ahead=reads) if pool else None
                yield from zip(versions, ahead or map(read, versions), strict=True)

    def _bytes(self, version: Version) -> Buffer:
        """Read a manifest, pinned to the content of the last look if the store supports it."""
        key = manifest_key(version)
        if not self.looks.remembers:
            return self._store.get(key)
        seen = self.looks.seen(version)
        if seen is None:
            raise errors.ObjectNotFoundError(f"{self._store.url} has no object {key!r}", key=key)
        return self._store.read(key, nbytes=seen.nbytes, pin=seen.pin)
