"""Commits: a manifest is created exactly once, behind a parent that is there.

Three looks stand around each put. Before it, the parent is there and is the one that the new
version names. After it, the parent and the new manifest are there, else the commit is not believed.
Every so often, and before the first commit, the identity is there and is this chain's; where it is
gone it is put back.

So a store that went back is never written to again by a publisher that was ahead of it, unless it
goes back between a look and the put behind it; and then that publisher says so, and names the
manifest that lies behind a gap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from deltachain.chain.identity import is_same, lost_chain, put_back, replace
from deltachain.chain.log import Committed, Manifests, misplaced
from deltachain.errors import (
    AlreadyExistsError,
    BrokenChainError,
    ChainMismatchError,
    ObjectNotFoundError,
    PublisherFencedError,
    StoreUnavailableError,
    StoreWentBackError,
)
from deltachain.format.digest import object_digest
from deltachain.format.documents import Identity, Manifest, seal, unseal
from deltachain.format.keys import CHAIN_KEY, TABLE_KEY, manifest_key
from deltachain.store import ObjectInfo, Store
from deltachain.types import Version

logger = logging.getLogger(__name__)

IDENTITY_EVERY: Final = 8
"""Versions between two looks at the identity, where a look at more costs more requests."""

AGAIN_S: Final = 0.5
"""Seconds before a second look at what a first one missed: a store may lag for a moment."""


class Commits:
    """Puts manifests one behind the other.

    Args:
        store: Where.
        manifests: Those of the chain.
        identity: The chain's.
        documents: The exact bytes of the identity and the table, by key.

    Attributes:
        restored: Keys that were gone and were put back.
        anchor: Key of a part that newcomers need; empty for none.
        anchor_is_gone: Whether it was when the identity was looked at.
    """

    def __init__(
        self,
        store: Store,
        manifests: Manifests,
        identity: Identity,
        documents: Mapping[str, bytes],
    ) -> None:
        self.restored: list[str] = []
        self.anchor, self.anchor_is_gone = "", False
        self._store = store
        self._manifests = manifests
        self._identity = identity
        self._documents = documents
        self._newest: Committed | None = None
        self._newest_seen: ObjectInfo | None = None
        self._identity_seen: ObjectInfo | None = None
        can = store.capabilities
        self._decides = can.conditional_put
        self._always = can.probes > 1 or not can.conditional_put

    def commit(self, manifest: Manifest) -> Committed:
        """Make a version visible, exactly once.

        When the reply to our own put is lost, reading the manifest back and finding our commit id
        in it is success. On a store without conditional puts that read-back is always made.

        Raises:
            PublisherFencedError: Another publisher has committed this version, or replaced its
                parent or the chain.
            MalformedError: The manifest of another version lies in the place of the parent's.
            StoreWentBackError: The parent is gone.
            BrokenChainError: A manifest of a history that the store has lost lies in the way.
            StoreUnavailableError: The store did not take it; the version is not committed, or it
                cannot be told whether it is.
        """
        version, data = manifest.version, seal(manifest)
        is_taken = version in self._before(manifest)
        certain = not is_taken and self._put(manifest_key(version), data)
        found = self._behind(manifest)
        if version not in found:
            raise StoreUnavailableError(
                f"{self._store.url} took the manifest of version {version} and does not show it",
                key=manifest_key(version),
                hint="the put was lost; the next version covers this one",
            )
        if not is_taken:
            self._check_alone(version, found)
        if certain and self._decides and found[version].nbytes == len(data):
            return self._remember(Committed(manifest, object_digest(data)), found[version])
        return self._remember(self._read_back(manifest, found[version]), found[version])

    def settle(self, manifest: Manifest) -> Committed | None:
        """The commit of a manifest whose outcome was unknown; ``None`` if it did not happen.

        Raises:
            PublisherFencedError: Another publisher has committed that version.
            StoreWentBackError: Its parent is gone.
            StoreError: It still cannot be told.
        """
        found = self._behind(manifest, again=False)
        seen = found.get(manifest.version)
        return self._remember(self._read_back(manifest, seen), seen) if seen else None

    def _before(self, manifest: Manifest) -> dict[Version, ObjectInfo]:
        """Look at the place of a version before it is put."""
        version = manifest.version
        due = self._newest is None or version % IDENTITY_EVERY == 0
        keys = [CHAIN_KEY] if due or self._always else []
        keys += [key for key in (TABLE_KEY, self.anchor) if key and due]
        wanted = [] if version == 0 else [version - 1]
        infos = self._look(keys, wanted if self._decides else [*wanted, version])
        if version > 0 and manifest_key(version - 1) not in infos:
            self._put_parent_back(manifest)
            infos = self._look(keys, wanted if self._decides else [*wanted, version])
        parent = infos.get(manifest_key(version - 1)) if version else None
        if parent is not None:
            self._check_parent(manifest, parent)
        if keys:
            self._check_identity(manifest, infos, due=due)
        self.anchor_is_gone = due and bool(self.anchor) and self.anchor not in infos
        return _versions(infos, [version])

    def _behind(self, manifest: Manifest, *, again: bool = True) -> dict[Version, ObjectInfo]:
        """Look at a version after its put: at its parent, and at whoever went on behind it."""
        version = manifest.version
        wanted = [version] if version == 0 else [version - 1, version]
        keys = [CHAIN_KEY] if self._always else []
        others = [] if self._decides else [version + 1]
        infos = self._look(keys, wanted + others)
        found = _versions(infos, wanted + others)
        if any(one not in found for one in (wanted if again else wanted[:-1])):
            time.sleep(AGAIN_S)
            infos = self._look(keys, wanted + others)
            found = _versions(infos, wanted + others)
        if version and version - 1 not in found:
            raise self._went_back(manifest, put=version in found)
        if keys:
            self._check_identity(manifest, infos, due=False)
        return found

    def _look(self, keys: list[str], versions: list[Version]) -> Mapping[str, ObjectInfo]:
        wanted = [*keys, *map(manifest_key, versions)]
        return self._store.find_all(wanted) if wanted else {}

    def _read(self, info: ObjectInfo) -> bytes:
        return bytes(self._store.read(info.key, nbytes=info.nbytes, xet_hash=info.xet_hash))

    def _put(self, key: str, data: bytes) -> bool:
        """Put a manifest; whether it is known to be there by this put."""
        try:
            if self._decides:
                self._store.put_if_absent(key, data)
            else:
                self._store.put(key, data)
        except AlreadyExistsError:
            return False
        except StoreUnavailableError:
            if self._store.find(key) is None:
                raise
            return False
        return True

    def _remember(self, committed: Committed, seen: ObjectInfo) -> Committed:
        self._newest, self._newest_seen = committed, seen
        self._manifests.looks.forget(committed.version)
        return committed

    def _check_parent(self, manifest: Manifest, info: ObjectInfo) -> None:
        """The parent that is there is the one that a version names."""
        newest, seen, key = self._newest, self._newest_seen, info.key
        if newest and seen and newest.digest == manifest.parent and _is_same(seen, info):
            return
        data = self._read(info)
        if object_digest(data) != manifest.parent:
            data = self._read(info)  # a bit may have flipped on the way
        if object_digest(data) == manifest.parent:
            if newest and newest.digest == manifest.parent:
                self._newest_seen = info  # a copy of the store that was put in its place
            return
        other = unseal(data, Manifest, key=key)
        if other.version != manifest.version - 1:
            raise misplaced(key, other)
        raise PublisherFencedError(
            f"version {manifest.version} cannot follow: the manifest of version "
            f"{manifest.version - 1} was replaced by another publisher (commit "
            f"{other.commit_id}, epoch {other.epoch}; this one is at epoch {manifest.epoch})",
            version=manifest.version,
        )

    def _check_identity(
        self, manifest: Manifest, infos: Mapping[str, ObjectInfo], *, due: bool
    ) -> None:
        """The identity is there and is this chain's; what is gone of it is put back."""
        info = infos.get(CHAIN_KEY)
        if info is None:
            self._put_identity_back(manifest, CHAIN_KEY)
            info = self._store.find(CHAIN_KEY)
        seen = self._identity_seen
        is_known = _is_same(seen, info) if seen and info else False
        if not is_known and not is_same(self._store, self._identity, self._documents):
            raise PublisherFencedError(
                f"version {manifest.version} cannot follow: the chain at this URL was replaced "
                f"by another publisher's; {CHAIN_KEY} is no longer of chain "
                f"{self._identity.chain}: there are two chains here",
                version=manifest.version,
                hint="give each run a URL of its own; what is of this chain needs its "
                f"{CHAIN_KEY} back, and this publisher a restart",
            )
        self._identity_seen = info
        if due and TABLE_KEY not in infos:
            self._put_identity_back(manifest, TABLE_KEY)
        elif due and infos[TABLE_KEY].nbytes != len(self._documents[TABLE_KEY]):
            replace(self._store, self._documents, TABLE_KEY)

    def _put_identity_back(self, manifest: Manifest, key: str) -> None:
        if manifest.version == 0:
            raise lost_chain(self._store.url)
        if put_back(self._store, self._documents, key):
            self.restored.append(key)

    def _put_parent_back(self, manifest: Manifest) -> None:
        """Put the newest manifest back where it alone is gone.

        Raises:
            StoreWentBackError: More is gone than that.
        """
        time.sleep(AGAIN_S)
        newest, key = self._newest, manifest_key(manifest.version - 1)
        if self._store.find(key) is not None:
            return
        if newest is None or newest.digest != manifest.parent or not self._is_whole(newest):
            raise self._went_back(manifest, put=False)
        put_back(self._store, {key: seal(newest.manifest)}, key)
        self.restored.append(key)

    def _is_whole(self, newest: Committed) -> bool:
        """Whether all that a manifest follows from and names is there as it was."""
        manifest = newest.manifest
        if object_digest(seal(manifest)) != newest.digest or self._store.find(CHAIN_KEY) is None:
            return False
        if not is_same(self._store, self._identity, self._documents):
            return False
        parts = {part.key: part.nbytes for part in manifest.edge.parts}
        infos = self._store.find_all(parts)
        if any(key not in infos or infos[key].nbytes != nbytes for key, nbytes in parts.items()):
            return False
        if manifest.version == 0:
            return True
        try:
            before = self._store.get(manifest_key(manifest.version - 1))
        except ObjectNotFoundError:
            return False
        return object_digest(before) == manifest.parent

    def _check_alone(self, version: Version, found: Mapping[Version, ObjectInfo]) -> None:
        if version + 1 in found:
            raise PublisherFencedError(
                f"version {version + 1} is there already: another publisher wrote version "
                f"{version} between our look and our put, and went on",
                version=version,
                hint="two publishers wrote here at once; see what `deltachain verify` says",
            )

    def _read_back(self, manifest: Manifest, info: ObjectInfo) -> Committed:
        """The manifest that lies in the place of ours, if it is ours.

        Raises:
            PublisherFencedError: It is another publisher's.
            BrokenChainError: It is one of a history that is lost.
            ChainMismatchError: It is of another chain.
        """
        key, version = info.key, manifest.version
        data = self._read(info)
        found = unseal(data, Manifest, key=key)
        if found.commit_id == manifest.commit_id:
            return Committed(found, object_digest(data))
        if found.chain != manifest.chain:
            raise ChainMismatchError(
                f"{key}: is of chain {found.chain}, this is chain {manifest.chain}: there are two "
                "chains here",
                version=version,
            )
        if found.epoch < manifest.epoch and found.parent != manifest.parent:
            raise BrokenChainError(
                f"{key}: is of epoch {found.epoch}, and does not follow version {version - 1} of "
                f"epoch {manifest.epoch}: it was left by a history that the store has lost",
                version=version,
                hint=f"remove {key} and those behind it, if no other publisher is at work; "
                "publishing then goes on",
            )
        raise PublisherFencedError(
            f"version {version} was committed by another publisher "
            f"(commit {found.commit_id}, epoch {found.epoch}; "
            f"ours was {manifest.commit_id}, epoch {manifest.epoch})",
            version=version,
        )

    def _went_back(self, manifest: Manifest, *, put: bool) -> StoreWentBackError:
        """Say what is gone of the chain that a version continues.

        Args:
            manifest: Of the version.
            put: Whether it is there, behind the gap.
        """
        url, version = self._store.url, manifest.version
        newest = self._newest_below(version - 1)
        if newest is None and self._store.find(CHAIN_KEY) is None:
            raise lost_chain(self._store.url)
        there = "no version" if newest is None else f"version {newest}"
        what = f"{url} went back: version {version - 1} was committed there, and its manifest is "
        what += f"gone; {there} is the newest that is there"
        hint = "put the store back as it was, and publishing goes on; or "
        if put:
            key = manifest_key(version)
            what += f"; {key} was put while it went back, and lies behind a gap"
            hint += f"remove {key}, and "
        hint += (
            f"start this publisher again: it goes on after {there} with its weights as they are, "
            "and followers that were ahead join again from nothing"
        )
        return StoreWentBackError(what, version=version - 1, hint=hint)

    def _newest_below(self, version: Version) -> Version | None:
        """A version below another that is committed: the newest, where none is missing below it."""
        step, absent = 1, version
        while absent - step >= 0 and self._store.find(manifest_key(absent - step)) is None:
            absent, step = absent - step, 2 * step
        low = max(absent - step, 0)
        if self._store.find(manifest_key(low)) is None:
            return None
        while absent - low > 1:
            middle = (low + absent) // 2
            there = self._store.find(manifest_key(middle)) is not None
            low, absent = (middle, absent) if there else (low, middle)
        return low


def _versions(
    infos: Mapping[str, ObjectInfo], versions: list[Version]
) -> dict[Version, ObjectInfo]:
    found = {version: infos.get(manifest_key(version)) for version in versions}
    return {version: info for version, info in found.items() if info is not None}


def _is_same(seen: ObjectInfo, info: ObjectInfo) -> bool:
    """Whether two looks were at the same content, as far as the store tells."""
    if seen.xet_hash and info.xet_hash:
        return (seen.xet_hash, seen.nbytes) == (info.xet_hash, info.nbytes)
    return (seen.nbytes, seen.modified) == (info.nbytes, info.modified)
