"""Looks at the manifests of a chain: which are there, and what the store says of them.

What was seen is remembered where the store names content, or can not decide races: a manifest that
is another by the next look is a fork.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Final

from deltachain.errors import BrokenChainError, ForkedChainError
from deltachain.keys import CHAIN_KEY, manifest_key
from deltachain.store import ObjectInfo, Store
from deltachain.types import Version

NEXT: Final = 16
"""Versions in a row that one wide look asks for, before it leaps."""

LEAPS: Final = 24
"""Leaps of doubling width in one wide look: to 16 million versions ahead."""

SEEN: Final = 512
"""Manifests whose looks are remembered."""


class Looks:
    """What a store says of the manifests of one chain, and what it said before.

    Args:
        store: Where they lie, contiguous from version 0.
        identity: What the store said of the chain's identity when it was read; ``None`` where
            nobody can replace it.

    Attributes:
        remembers: Whether what was seen is remembered.
    """

    def __init__(self, store: Store, identity: ObjectInfo | None = None) -> None:
        self._store = store
        self._identity = identity
        can = store.capabilities
        self._is_wide = can.probes > 1
        self.remembers = self._is_wide or not can.conditional_put
        self._seen: OrderedDict[Version, ObjectInfo] = OrderedDict()
        self._lock = Lock()

    def at(self, versions: Iterable[Version]) -> dict[Version, ObjectInfo]:
        """What the store says of some manifests; those that exist.

        Raises:
            ForkedChainError: One is not what the store said of it before.
        """
        wanted = list(versions)
        known = [CHAIN_KEY] if self._identity else []
        infos = self._store.find_all([*known, *map(manifest_key, wanted)])
        identity = infos.get(CHAIN_KEY)
        if self._identity and not (identity and _same(self._identity, identity)):
            raise ForkedChainError("the chain at this URL was replaced by another publisher's")
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

    def ahead(self, first: Version, last: Version) -> None:
        """Look at many versions in one request, where the store can do that.

        Raises:
            ForkedChainError: One was replaced since it was last seen.
        """
        if self._is_wide:
            self.at(range(first, min(last + 1, first + SEEN)))

    def has(self, version: Version) -> bool:
        """Whether a version is committed."""
        return version in self.at([version])

    def newest(self, known: Version) -> Version:
        """The newest committed version, searched from one that is committed.

        Raises:
            ForkedChainError: The manifest of ``known`` was replaced since it was last seen.
            BrokenChainError: There are later ones behind a gap.
        """
        if self.remembers and not self._is_wide:
            self.at([known])
        low, high = self._leap(known) if self._is_wide else self._double(known)
        while high - low > 1:
            if self._is_wide:
                step = max(1, (high - low) // (NEXT + LEAPS))
                found = self.at(range(low + step, high, step))
                low = max(found, default=low)
                high = min(high, low + step)
            else:
                middle = (low + high) // 2
                low, high = (middle, high) if self.has(middle) else (low, middle)
        return low

    def _leap(self, known: Version) -> tuple[Version, Version]:
        """One look at the next versions and far beyond: a committed one, and an absent one."""
        near = [known + step for step in range(1, NEXT + 1)]
        far = [known + NEXT + (1 << leap) for leap in range(LEAPS)]
        found = self.at([known, *near, *far])
        ahead = [known, *near, *far]
        newest = max(found, default=known)
        absent = next((version for version in ahead if version not in found), newest + 1)
        if newest > absent:
            raise BrokenChainError(
                f"manifest of version {absent} is missing, there is one of {newest}",
                version=absent,
                hint="manifests are never deleted: somebody removed it, or the store lags",
            )
        return newest, absent

    def _double(self, known: Version) -> tuple[Version, Version]:
        """Looks of doubling width: a committed version, and an absent one beyond it.

        One and two ahead come first: where there is one new version, as nearly always, two looks
        tell, one after the other.
        """
        low, ahead = known, 1
        while self.has(known + ahead):
            low, ahead = known + ahead, ahead * 2
        return low, known + ahead

    def _remember(self, found: dict[Version, ObjectInfo]) -> None:
        with self._lock:
            for version, info in found.items():
                seen = self._seen.setdefault(version, info)
                if not _same(seen, info):
                    raise ForkedChainError(
                        f"the manifest of version {version} was replaced by another publisher",
                        version=version,
                    )
                self._seen.move_to_end(version)
            while len(self._seen) > SEEN:
                self._seen.popitem(last=False)


def _same(seen: ObjectInfo, info: ObjectInfo) -> bool:
    """Whether two looks were at the same content, as far as the store tells."""
    if seen.xet_hash and info.xet_hash:
        return (seen.xet_hash, seen.nbytes) == (info.xet_hash, info.nbytes)
    return (seen.nbytes, seen.modified) == (info.nbytes, info.modified)
