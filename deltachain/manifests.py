"""The manifests of a chain in its store: looked for, read, and created exactly once.

Where a store can not decide which of two writers came first, one publisher is its only writer by
configuration. Breaking that is found out here: a manifest that was seen is remembered by what the
store says of it, and one that is another later on is a fork.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Final

from deltachain.digest import object_digest
from deltachain.errors import (
    AlreadyExistsError,
    BrokenChainError,
    ChainMismatchError,
    DigestMismatchError,
    ForkedChainError,
    MalformedError,
    ObjectNotFoundError,
    PublisherFencedError,
    StoreUnavailableError,
)
from deltachain.keys import CHAIN_KEY, manifest_key
from deltachain.manifest import Manifest, read_state, seal, unseal
from deltachain.store import Buffer, ObjectInfo, Store
from deltachain.types import StateDigest, Version

NEXT: Final = 16
"""Versions in a row that one wide look asks for, before it leaps."""

LEAPS: Final = 24
"""Leaps of doubling width in one wide look: to 16 million versions ahead."""

SEEN: Final = 512
"""Manifests whose looks are remembered."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A manifest that is in the store, and the blake3 of its exact bytes."""

    manifest: Manifest
    digest: str

    @property
    def version(self) -> Version:
        """Its number."""
        return self.manifest.version

    @property
    def state(self) -> StateDigest:
        """Its state digest."""
        return StateDigest.parse(self.manifest.state)


class Manifests:
    """The manifests of one chain.

    Args:
        store: Where they lie, contiguous from version 0.
        chain: Id of the chain.
        identity: What the store said of the chain's identity when it was read; ``None`` where
            nobody can replace it.
    """

    def __init__(self, store: Store, chain: str, identity: ObjectInfo | None = None) -> None:
        self._store = store
        self._chain = chain
        self._identity = identity
        can = store.capabilities
        self._remembers = can.probes > 1 or not can.conditional_put
        self._seen: OrderedDict[Version, ObjectInfo] = OrderedDict()
        self._lock = Lock()

    def has(self, version: Version) -> bool:
        """Whether a version is committed."""
        return version in self._look([version])

    def newest(self, known: Version) -> Version:
        """The newest committed version, searched from one that is committed.

        Raises:
            ForkedChainError: The manifest of ``known`` was replaced since it was last seen.
            BrokenChainError: There are later ones behind a gap.
        """
        wide = self._store.capabilities.probes > 1
        if not wide and not self._store.capabilities.conditional_put:
            self._look([known])
        low, high = self._leap(known) if wide else self._double(known)
        while high - low > 1:
            if wide:
                step = max(1, (high - low) // (NEXT + LEAPS))
                found = self._look(range(low + step, high, step))
                low = max(found, default=low)
                high = min(high, low + step)
            else:
                middle = (low + high) // 2
                low, high = (middle, high) if self.has(middle) else (low, middle)
        return low

    def look_ahead(self, first: Version, last: Version) -> None:
        """Look at many versions in one request, where the store can do that.

        Reading those that are remembered then asks for none of them again.

        Raises:
            ForkedChainError: One was replaced since it was last seen.
        """
        if self._store.capabilities.probes > 1:
            self._look(range(first, min(last + 1, first + SEEN)))

    def read(self, version: Version) -> Committed:
        """Read the manifest of a version; once more if it is corrupt.

        Raises:
            ObjectNotFoundError: It is not committed.
            FormatError: It is not readable, or of another chain or version.
            ChainMismatchError: Two publishers made a chain here, where nobody decides races.
            ForkedChainError: It was replaced since it was last seen.
        """
        key = manifest_key(version)
        data = bytes(self._bytes(version))
        try:
            manifest = unseal(data, Manifest, key=key)
        except DigestMismatchError:
            data = bytes(self._bytes(version))
            manifest = unseal(data, Manifest, key=key)
        if manifest.chain != self._chain and not self._store.capabilities.conditional_put:
            raise ChainMismatchError(
                f"{key}: is of chain {manifest.chain}, {CHAIN_KEY} says {self._chain}: two "
                "publishers made a chain here at once",
                version=version,
            )
        if manifest.chain != self._chain or manifest.version != version:
            raise MalformedError(
                f"{key}: is version {manifest.version} of chain {manifest.chain}", key=key
            )
        read_state(manifest.state, key=key)
        return Committed(manifest, object_digest(data))

    def find(self, version: Version) -> Committed | None:
        """Read the manifest of a version, if it is committed."""
        try:
            return self.read(version)
        except ObjectNotFoundError:
            return None

    def commit(self, manifest: Manifest) -> Committed:
        """Make a version visible, exactly once.

        When the reply to our own put is lost, reading the manifest back and finding our commit id
        in it is success. On a store without conditional puts that read-back is always made, and
        the parent must still be the one that this version names.

        Raises:
            PublisherFencedError: Another publisher has committed this version, or replaced its
                parent.
            StoreUnavailableError: The store did not take it; the version is not committed, or it
                can not be told whether it is.
        """
        key, data = manifest_key(manifest.version), seal(manifest)
        conditional = self._store.capabilities.conditional_put
        try:
            if conditional:
                self._store.put_if_absent(key, data)
                return Committed(manifest, object_digest(data))
            if not self._taken(manifest.version):
                self._store.put(key, data)
                self._confirm(manifest.version)
        except AlreadyExistsError:
            pass
        except StoreUnavailableError:
            if self._store.find(key) is None:
                raise
        found = self.read(manifest.version)
        if found.manifest.commit_id != manifest.commit_id:
            raise PublisherFencedError(
                f"version {manifest.version} was committed by another publisher "
                f"(commit {found.manifest.commit_id}, epoch {found.manifest.epoch}; "
                f"ours was {manifest.commit_id}, epoch {manifest.epoch})",
                version=manifest.version,
            )
        return found

    def _taken(self, version: Version) -> bool:
        """Whether a version is there already, in one look that also proves what it follows."""
        try:
            return version in self._look([version - 1, version] if version else [version])
        except ForkedChainError as exc:
            raise PublisherFencedError(
                f"version {version} can not follow: {exc.args[0]}", version=version
            ) from exc

    def _confirm(self, version: Version) -> None:
        """Look at the manifest that was just put, and that nobody has gone on behind it."""
        with self._lock:
            self._seen.pop(version, None)
        if version + 1 in self._look([version, version + 1]):
            raise PublisherFencedError(
                f"version {version + 1} is there already: another publisher wrote version "
                f"{version} between our look and our put, and went on",
                version=version,
                hint="two publishers wrote here at once; see what `deltachain verify` says",
            )

    def _leap(self, known: Version) -> tuple[Version, Version]:
        """One look at the next versions and far beyond: a committed one, and an absent one."""
        near = [known + step for step in range(1, NEXT + 1)]
        far = [known + NEXT + (1 << leap) for leap in range(LEAPS)]
        found = self._look([known, *near, *far])
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

    def _bytes(self, version: Version) -> Buffer:
        """Bytes of a manifest: of the very one that was seen, where the store can tell."""
        key = manifest_key(version)
        if not self._remembers:
            return self._store.get(key)
        seen = self._seen.get(version) or self._look([version]).get(version)
        if seen is None:
            raise ObjectNotFoundError(f"{self._store.url} has no object {key!r}", key=key)
        return self._store.read(key, nbytes=seen.nbytes, xet_hash=seen.xet_hash)

    def _look(self, versions: Iterable[Version]) -> dict[Version, ObjectInfo]:
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
        if self._remembers:
            self._remember(found)
        return found

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
