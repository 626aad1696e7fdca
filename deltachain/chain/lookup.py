"""Looks at the manifests of a chain: which are there, and what the store says of them.

What was seen is remembered where the store names content, or cannot decide races: a manifest that
is another by the next look is a fork.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final, NamedTuple

from deltachain.errors import BrokenChainError, ForkedChainError
from deltachain.format.digest import object_digest
from deltachain.format.documents import Identity, parse
from deltachain.format.keys import CHAIN_KEY, manifest_key, version_of
from deltachain.store import ObjectInfo, Store
from deltachain.types import Version

NEXT: Final = 16
"""Versions in a row that one wide look asks for, before it leaps."""

LEAPS: Final = 24
"""Leaps of doubling width in one wide look: to 16 million versions ahead."""

SEEN: Final = 512
"""Manifests whose looks are remembered."""


class Standing(NamedTuple):
    """What is in a store where a version was committed.

    Attributes:
        manifest: Digest of the version's manifest; ``None`` if that is gone.
        chain: Id of the chain that is there; ``None`` if its identity is gone.
        newest: The newest version that is there, as far as was looked: a later one only if it lies
            behind a gap; ``None`` for none.
    """

    manifest: str | None
    chain: str | None
    newest: Version | None


class Looks:
    """What a store says of the manifests of one chain, and what it said before.

    Args:
        store: Where they lie, contiguous from version 0.
        chain: Id of the chain.
        identity: What the store said of the chain's identity when it was read; ``None`` where
            nobody can replace it.

    Attributes:
        is_wide: Whether one look is at many manifests.
        remembers: Whether what was seen is remembered.
        is_lost: Whether the last look found no identity, where looks include that.
        missed: The version that the last search began from, if it was not there.
    """

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
        """What the store says of some manifests; those that exist.

        Raises:
            ForkedChainError: One is not what the store said of it before.
        """
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
        """What the store says of one manifest, from memory where it was seen."""
        return self._seen.get(version) or self.at([version]).get(version)

    def forget(self, version: Version) -> None:
        """Forget what the store said of a manifest: it was written since."""
        with self._lock:
            self._seen.pop(version, None)
            self._digests.pop(version, None)

    def forget_after(self, version: Version) -> None:
        """Forget what was seen of later manifests: somebody went back, and they may be others."""
        for later in [seen for seen in list(self._seen) if seen > version]:
            self.forget(later)

    def read(self, version: Version, digest: str) -> None:
        """Remember the content of a manifest that was read."""
        if self.remembers:
            with self._lock:
                self._digests[version] = digest
                self._digests.move_to_end(version)
                while len(self._digests) > SEEN:
                    self._digests.popitem(last=False)

    def digest(self, version: Version) -> str | None:
        """The content of a manifest that was read and is still what was seen, if that is known."""
        return self._digests.get(version) if version in self._seen else None

    @property
    def sees_identity(self) -> bool:
        """Whether looks include the chain's identity."""
        return self._identity is not None

    def ahead(self, versions: Sequence[Version]) -> None:
        """Look at many versions in one request, where the store can do that.

        Raises:
            ForkedChainError: One was replaced since it was last seen.
        """
        if self.is_wide and len(versions) > 1:
            self.at(versions[:SEEN])

    def has(self, version: Version) -> bool:
        """Whether a version is committed."""
        return version in self.at([version])

    def newest(self, known: Version) -> Version:
        """The newest version before any gap, searched from one that is committed.

        Raises:
            ForkedChainError: The manifest of ``known`` was replaced since it was last seen.
            BrokenChainError: The manifest of ``known``, or of the next version, is missing, and
                there are later ones.
        """
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
        """A version behind a gap: one that is there although the one after ``known`` is not.

        Few looks are spent on it: a gap of several versions may be seen only once a hint names one
        behind it.

        Args:
            known: The newest version before the gap.
            hinted: A version that is said to be there.
        """
        near = [known + 2, hinted] if hinted > known + 2 else [known + 2]
        last = max(self.at(_ahead(known) if self.is_wide else near), default=known)
        return None if last <= known + 1 or self.has(known + 1) else last

    def last(self, known: Version, hinted: Version = 0) -> Version:
        """The newest version whatever is missing before it, as far as few looks tell."""
        while True:
            with suppress(BrokenChainError):
                known = self.newest(known)
            if self.is_wide and not self._has_gap:
                return known
            further = self.beyond(known, hinted)
            if further is None:
                return known
            known = further

    def around(self, version: Version) -> dict[Version, ObjectInfo]:
        """A version and later ones, in one look where the store can do that."""
        return self.at([version, *_ahead(version)])

    def listed(self) -> Version | None:
        """The newest version that a listing shows: where neither a hint nor version 0 is there."""
        versions = [version_of(info.key) for info in self._store.list("manifests/")]
        return max((version for version in versions if version is not None), default=None)

    def _leap(self, known: Version) -> tuple[Version, Version]:
        """One look at the next versions and far beyond: a committed one, and an absent one."""
        ahead = _ahead(known)
        found = self.at([known, *ahead])
        self._note(known, found)
        newest = max(found, default=known)
        absent = next((version for version in (known, *ahead) if version not in found), newest + 1)
        self._has_gap = newest > absent
        if self._has_gap and absent <= known + 1:
            raise BrokenChainError(
                f"manifest of version {absent} is missing, there is one of {newest}",
                version=absent,
                hint="manifests are never deleted: somebody removed it, or the store lags",
            )
        return (absent - 1, absent) if self._has_gap else (newest, absent)

    def _double(self, known: Version) -> tuple[Version, Version]:
        """Looks of doubling width: a committed version, and an absent one beyond it.

        One and two ahead come first: where there is one new version, as nearly always, two looks
        tell, one after the other.
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
            if seen is not None and not _same(seen, info):
                self._check_content(version, seen, info)
            with self._lock:
                self._seen[version] = info
                self._seen.move_to_end(version)
                while len(self._seen) > SEEN:
                    self._seen.popitem(last=False)

    def _check_content(self, version: Version, seen: ObjectInfo, info: ObjectInfo) -> None:
        """Tell a manifest that was put back from one that was replaced."""
        known = self._digests.get(version)
        if known and not (seen.xet_hash and info.xet_hash):
            data = self._store.read(info.key, nbytes=info.nbytes, xet_hash=info.xet_hash)
            if object_digest(data) == known:
                return
        raise ForkedChainError(
            f"the manifest of version {version} was replaced by another publisher",
            version=version,
        )

    def _check_identity(self, info: ObjectInfo | None) -> None:
        """Tell an identity that was put back from another chain's."""
        self.is_lost = info is None
        if info is None or self._identity is None or _same(self._identity, info):
            return
        data = self._store.read(CHAIN_KEY, nbytes=info.nbytes, xet_hash=info.xet_hash)
        found = parse(bytes(data), Identity, key=CHAIN_KEY).chain
        if found != self._chain:
            raise ForkedChainError(
                f"the chain at this URL was replaced by another publisher's: {CHAIN_KEY} says "
                f"{found}, {self._chain} was followed"
            )
        self._identity = info


def _ahead(known: Version) -> list[Version]:
    """What one wide look asks for: the next versions, and leaps of doubling width."""
    near = [known + step for step in range(1, NEXT + 1)]
    return [*near, *(known + NEXT + (1 << leap) for leap in range(LEAPS))]


def _same(seen: ObjectInfo, info: ObjectInfo) -> bool:
    """Whether two looks were at the same content, as far as the store tells."""
    if seen.xet_hash and info.xet_hash:
        return (seen.xet_hash, seen.nbytes) == (info.xet_hash, info.nbytes)
    return (seen.nbytes, seen.modified) == (info.nbytes, info.modified)
