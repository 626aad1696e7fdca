"""Commits: exactly-once creation of manifests, after verification of their parent.

Three checks surround each put. Before it: the parent exists and has the digest that the new version
names. After it: parent and new manifest exist, otherwise the commit counts as failed. Before the
first commit and every ``IDENTITY_EVERY`` versions: the identity exists and is this chain's; if
missing, it is restored.

Therefore a publisher never continues a store that was restored to an older state. The exception is
a restore between a check and the put that follows; the publisher then reports it and names the
manifest behind the gap.
"""

import logging
import time
from collections.abc import Mapping
from typing import Final

from deltachain import errors
from deltachain.chain.checks import check_digest, once_more
from deltachain.chain.identity import is_same, lost_chain, put_back, replace
from deltachain.chain.manifests import TRUSTING, Committed, Manifests, misplaced, same_content
from deltachain.chain.trust import Trust
from deltachain.format.documents import Identity, Manifest, opened, reverted_to, seal, unseal
from deltachain.format.keys import CHAIN_KEY, TABLE_KEY, manifest_key, object_digest
from deltachain.store import ObjectInfo, Store
from deltachain.types import Version


def check_own(manifest: Manifest, found: Manifest, *, key: str) -> None:
    """Check that the manifest under a version's key is this publisher's."""
    version = manifest.version
    if found.commit_id == manifest.commit_id:
        return
    if found.chain != manifest.chain:
        raise errors.ChainMismatchError(
            f"{key}: belongs to chain {found.chain}, expected {manifest.chain}: "
            "there are two chains here",
            version=version,
        )
    if found.epoch < manifest.epoch and found.parent != manifest.parent:
        raise errors.BrokenChainError(
            f"{key}: is of epoch {found.epoch} and does not follow version {version - 1} of "
            f"epoch {manifest.epoch}: it was left by a history that the store has lost",
            version=version,
            hint=f"stop every other publisher, then remove {key} and all later manifests; "
            "publishing then continues",
        )
    goal = reverted_to(found)
    who, hint = "another publisher", ""
    if goal is not None:
        who = f"a revert to version {goal}"
        hint = f"stop this publisher, load the weights of version {goal}, and start it again"
    raise errors.PublisherFencedError(
        f"version {version} was committed by {who} "
        f"(commit {found.commit_id}, epoch {found.epoch}; this publisher's was "
        f"{manifest.commit_id}, epoch {manifest.epoch})",
        version=version,
        hint=hint,
    )


logger = logging.getLogger(__name__)

IDENTITY_EVERY: Final = 8
"""Versions between two checks of the identity, in stores where each key costs a request."""

AGAIN_S: Final = 0.5  # seconds before a missing object is looked up again, since a store may lag


class Commits:
    def __init__(
        self,
        store: Store,
        manifests: Manifests,
        identity: Identity,
        documents: Mapping[str, bytes],
        trust: Trust = TRUSTING,
    ) -> None:
        self.restored: list[str] = []
        self.anchor, self.anchor_is_gone = "", False
        self._store = store
        self._manifests = manifests
        self._identity = identity
        self._documents = documents
        self._trust = trust
        self._signature = trust.sign_identity(identity.chain, documents[CHAIN_KEY])
        self._newest: Committed | None = None
        self._newest_seen: ObjectInfo | None = None
        self._identity_seen: ObjectInfo | None = None
        can = store.capabilities
        self._decides = can.conditional_put
        self._always = can.probes > 1 or not can.conditional_put

    def watch(self, anchor: str) -> None:
        """Check an anchor's part for existence during later commits."""
        self.anchor, self.anchor_is_gone = anchor, False

    def take_restored(self) -> tuple[str, ...]:
        restored, self.restored = tuple(self.restored), []
        return restored

    def commit(self, manifest: Manifest) -> Committed:
        """Commit a version exactly once.

        After a lost reply the manifest is read back; finding exactly its bytes means success. In a
        store without conditional puts it is always read back.
        """
        version, data = manifest.version, self._sealed(manifest)
        is_taken = version in self._before(manifest)
        certain = not is_taken and self._put(manifest_key(version), data)
        found = self._behind(manifest)
        if version not in found:
            raise errors.StoreUnavailableError(
                f"{self._store.url} acknowledged the manifest of version {version}, "
                "but does not return it",
                key=manifest_key(version),
                hint="the put was lost; the next version covers this one",
            )
        if not is_taken and version + 1 in found:
            raise errors.PublisherFencedError(
                f"version {version + 1} already exists: another publisher wrote version "
                f"{version} between this publisher's check and its put, and continued",
                version=version,
                hint="two publishers wrote here at once; run `deltachain verify`",
            )
        if certain and self._decides and found[version].nbytes == len(data):
            return self._remember(self._own(manifest, data), found[version])
        return self._remember(self._read_back(manifest, found[version]), found[version])

    def settle(self, manifest: Manifest) -> Committed | None:
        """Resolve a commit with an unknown outcome; ``None`` if it did not happen."""
        found = self._behind(manifest, again=False)
        seen = found.get(manifest.version)
        return self._remember(self._read_back(manifest, seen), seen) if seen else None

    def _before(self, manifest: Manifest) -> dict[Version, ObjectInfo]:
        version = manifest.version
        due = self._newest is None or version % IDENTITY_EVERY == 0
        keys = [CHAIN_KEY] if due or self._always else []
        keys += [key for key in (TABLE_KEY, self.anchor, *self._signature) if key and due]
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
        if due:
            self._sign_identity(infos)
        self.anchor_is_gone = due and bool(self.anchor) and self.anchor not in infos
        return _versions(infos, [version])

    def _behind(self, manifest: Manifest, *, again: bool = True) -> dict[Version, ObjectInfo]:
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
        return bytes(self._store.read(info.key, nbytes=info.nbytes, pin=info.pin))

    def _put(self, key: str, data: bytes) -> bool:
        """Put a manifest; return whether this put is known to have created it."""
        try:
            if self._decides:
                self._store.put_if_absent(key, data)
            else:
                self._store.put(key, data)
        except errors.AlreadyExistsError:
            return False
        except errors.StoreUnavailableError:
            if self._store.find(key) is None:
                raise
            return False
        return True

    def _remember(self, committed: Committed, seen: ObjectInfo) -> Committed:
        self._newest, self._newest_seen = committed, seen
        self._manifests.looks.forget(committed.version)
        return committed

    def _check_parent(self, manifest: Manifest, info: ObjectInfo) -> None:
        newest, seen, key = self._newest, self._newest_seen, info.key
        if newest and seen and newest.digest == manifest.parent and same_content(seen, info):
            return
        try:
            once_more(lambda: check_digest(self._read(info), manifest.parent, key))
        except errors.DigestMismatchError:
            other = unseal(self._read(info), Manifest, key=key)
        else:
            if newest and newest.digest == manifest.parent:
                self._newest_seen = info  # an equal copy replaced it, for example by a restore
            return
        if other.version != manifest.version - 1:
            raise misplaced(key, other)
        raise errors.PublisherFencedError(
            f"version {manifest.version} cannot follow: the manifest of version "
            f"{manifest.version - 1} was replaced by another publisher (commit "
            f"{other.commit_id}, epoch {other.epoch}; this one is at epoch {manifest.epoch})",
            version=manifest.version,
        )

    def _check_identity(
        self, manifest: Manifest, infos: Mapping[str, ObjectInfo], *, due: bool
    ) -> None:
        info = infos.get(CHAIN_KEY)
        if info is None:
            self._put_identity_back(manifest, CHAIN_KEY)
            info = self._store.find(CHAIN_KEY)
        seen = self._identity_seen
        is_known = same_content(seen, info) if seen and info else False
        if not is_known and not is_same(self._store, self._identity, self._documents):
            raise errors.PublisherFencedError(
                f"version {manifest.version} cannot follow: the chain at this URL was replaced "
                f"by another publisher's; {CHAIN_KEY} no longer belongs to chain "
                f"{manifest.chain}: there are two chains here",
                version=manifest.version,
                hint="give each run a URL of its own; to continue here, this chain needs its own "
                f"{CHAIN_KEY} and this publisher a restart",
            )
        self._identity_seen = info
        if due and TABLE_KEY not in infos:
            self._put_identity_back(manifest, TABLE_KEY)
        elif due and infos[TABLE_KEY].nbytes != len(self._documents[TABLE_KEY]):
            replace(self._store, self._documents, TABLE_KEY)

    def _sign_identity(self, infos: Mapping[str, ObjectInfo]) -> None:
        for key, data in self._signature.items():
            is_there = key in infos and infos[key].nbytes == len(data)
            if is_there and (self._newest or self._store.get(key) == data):
                continue
            self._store.put(key, data)
            if self._newest is not None:
                logger.warning("%s was missing from %s and was restored", key, self._store.url)
                self.restored.append(key)

    def _put_identity_back(self, manifest: Manifest, key: str) -> None:
        if manifest.version == 0:
            raise lost_chain(self._store.url)
        if put_back(self._store, self._documents, key):
            self.restored.append(key)

    def _put_parent_back(self, manifest: Manifest) -> None:
        """Restore the newest manifest if nothing else is missing."""
        time.sleep(AGAIN_S)
        newest, key = self._newest, manifest_key(manifest.version - 1)
        if self._store.find(key) is not None:
            return
        if newest is None or newest.digest != manifest.parent or not self._is_whole(newest):
            raise self._went_back(manifest, put=False)
        put_back(self._store, {key: seal(newest.manifest, newest.signatures)}, key)
        self.restored.append(key)

    def _is_whole(self, newest: Committed) -> bool:
        """Return whether the parent, the identity and all parts of a manifest are unchanged."""
        manifest = newest.manifest
        data = seal(manifest, newest.signatures)
        if object_digest(data) != newest.digest or self._store.find(CHAIN_KEY) is None:
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
        except errors.ObjectNotFoundError:
            return False
        return object_digest(before) == manifest.parent

    def _read_back(self, manifest: Manifest, info: ObjectInfo) -> Committed:
        data = self._read(info)
        found = unseal(data, Manifest, key=info.key)
        check_own(manifest, found, key=info.key)
        own = self._sealed(manifest)
        if data != own:  # the next version would vouch for whatever is there
            check_digest(data, object_digest(own), info.key)
        return self._own(manifest, own)

    def _sealed(self, manifest: Manifest) -> bytes:
        """Return the bytes of a manifest of this publisher: always the same ones."""
        return self._trust.seal(manifest, self._identity.chain)

    def _own(self, manifest: Manifest, data: bytes) -> Committed:
        signers = self._trust.signers(data, Manifest, self._identity.chain)
        return Committed(manifest, object_digest(data), opened(data)[1], signers)

    def _went_back(self, manifest: Manifest, *, put: bool) -> errors.StoreWentBackError:
        url, version = self._store.url, manifest.version
        newest = self._newest_below(version - 1)
        if newest is None and self._store.find(CHAIN_KEY) is None:
            raise lost_chain(self._store.url)
        start = "starts at version 0" if newest is None else f"continues after version {newest}"
        what = f"{url} went back: version {version - 1} was committed there, and its manifest is "
        what += f"gone; the newest version left is {'none' if newest is None else newest}"
        hint = "restore the store, and publishing continues; or "
        if put:
            key = manifest_key(version)
            what += f"; {key} was put meanwhile and lies behind a gap"
            hint += f"remove {key}, and "
        hint += (
            f"restart this publisher: it {start} with its current weights, "
            "and followers that were ahead start again from nothing"
        )
        return errors.StoreWentBackError(what, version=version - 1, hint=hint)

    def _newest_below(self, version: Version) -> Version | None:
        """Find the newest committed version up to ``version``, if there are no gaps."""
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
