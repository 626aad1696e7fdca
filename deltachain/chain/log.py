"""The manifests of a chain in its store: looked for, read, and created exactly once.

Where a store cannot decide which of two writers came first, one publisher is its only writer by
configuration. Breaking that is found out by looks at what is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.chain.lookup import Looks
from deltachain.errors import (
    ChainMismatchError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
)
from deltachain.format.digest import object_digest
from deltachain.format.documents import Manifest, read_state, unseal
from deltachain.format.keys import CHAIN_KEY, manifest_key
from deltachain.store import ObjectInfo, Store
from deltachain.types import Buffer, StateDigest, Version


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


def misplaced(key: str, found: Manifest) -> MalformedError:
    """The error for a manifest that lies in the place of another one."""
    return MalformedError(
        f"{key}: is version {found.version} of chain {found.chain}",
        key=key,
        hint="another object was put in its place: put it back from a backup; or remove "
        f"{key} and every later manifest, and start the publisher again",
    )


class Manifests:
    """The manifests of one chain.

    Args:
        store: Where they lie, contiguous from version 0.
        chain: Id of the chain.
        identity: What the store said of the chain's identity when it was read; ``None`` where
            nobody can replace it.

    Attributes:
        looks: Which of them are there.
    """

    def __init__(self, store: Store, chain: str, identity: ObjectInfo | None = None) -> None:
        self._store = store
        self._chain = chain
        self.looks = Looks(store, chain, identity)

    def read(self, version: Version) -> Committed:
        """Read the manifest of a version; once more if it cannot be read.

        Raises:
            ObjectNotFoundError: It is not committed.
            FormatError: It is not readable, or of another version.
            ChainMismatchError: It is of another chain: two chains were made here.
            ForkedChainError: It was replaced since it was last seen.
        """
        key = manifest_key(version)
        try:
            found = self._read(key, version)
        except FormatError:  # a bit may have flipped on the way
            found = self._read(key, version)
        manifest = found.manifest
        if manifest.chain != self._chain:
            raise ChainMismatchError(
                f"{key}: is of chain {manifest.chain}, {CHAIN_KEY} says {self._chain}: two "
                "chains were made here",
                version=version,
                hint=f"put back the {CHAIN_KEY} that belongs to these manifests, or remove them; "
                "where a new chain took the place of an old one, replicas join it from nothing",
            )
        if manifest.version != version:
            raise misplaced(key, manifest)
        read_state(manifest.state, key=key)
        self.looks.read(version, found.digest)
        return found

    def digest(self, version: Version) -> str | None:
        """The blake3 of the manifest of a version that is there now, if one is.

        Asks the store in any case, and reads it unless the store names its content.

        Raises:
            ForkedChainError: It was replaced since it was last seen.
        """
        if self.looks.remembers and not self.looks.has(version):
            return None
        return self.content(version)

    def content(self, version: Version) -> str | None:
        """The same of one that was just looked at; read only if that did not name its content."""
        known = self.looks.digest(version)
        if known is not None:
            return known
        found = self.find(version)
        return found.digest if found else None

    def _read(self, key: str, version: Version) -> Committed:
        data = bytes(self._bytes(version))
        return Committed(unseal(data, Manifest, key=key), object_digest(data))

    def find(self, version: Version) -> Committed | None:
        """Read the manifest of a version, if it is committed."""
        try:
            return self.read(version)
        except ObjectNotFoundError:
            return None

    def _bytes(self, version: Version) -> Buffer:
        """Bytes of a manifest: of the very one that was seen, where the store can tell."""
        key = manifest_key(version)
        if not self.looks.remembers:
            return self._store.get(key)
        seen = self.looks.seen(version)
        if seen is None:
            raise ObjectNotFoundError(f"{self._store.url} has no object {key!r}", key=key)
        return self._store.read(key, nbytes=seen.nbytes, xet_hash=seen.xet_hash)
