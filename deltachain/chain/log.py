"""Manifests of a chain in its store: lookup, reading and verification.

In a store without conditional puts, a single writer is a matter of configuration; a second one is
detected by later lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Final, TypeVar

from deltachain.chain.checks import once_more
from deltachain.chain.identity import identity_there, replaced
from deltachain.chain.lookup import SEEN, Looks
from deltachain.chain.trust import Trust
from deltachain.errors import (
    ChainMismatchError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
)
from deltachain.format.documents import Manifest, Signature, opened, read_state, unseal
from deltachain.format.keys import CHAIN_KEY, manifest_key, object_digest
from deltachain.store import ObjectInfo, Store
from deltachain.threads import Pool
from deltachain.types import Buffer, StateDigest, Version

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed manifest.

    Attributes:
        manifest: The manifest.
        digest: blake3 of its exact bytes.
        signatures: Signatures in its envelope, true or not.
        signed_by: Ids of the trusted keys that signed it; empty without trusted keys.
    """

    manifest: Manifest
    digest: str
    signatures: tuple[Signature, ...] = ()
    signed_by: tuple[str, ...] = ()

    @property
    def version(self) -> Version:
        """Version that the manifest commits."""
        return self.manifest.version

    @property
    def state(self) -> StateDigest:
        """State digest of this version."""
        return StateDigest.parse(self.manifest.state)


def misplaced(key: str, found: Manifest) -> MalformedError:
    """Build the error for a manifest under the key of another."""
    return MalformedError(
        f"{key}: is version {found.version} of chain {found.chain}",
        key=key,
        hint="another object replaced it: restore it from a backup; or remove "
        f"{key} and every later manifest, and restart the publisher",
    )


TRUSTING: Final = Trust()
"""Trust of a reader without trusted keys."""

LISTED: Final = 1 << 14
"""Number of edge records that are remembered as listed by accepted manifests."""


class Manifests:
    """The manifests of one chain.

    Args:
        store: Store of the manifests, contiguous from version 0.
        chain: Id of the chain.
        identity: Store metadata of the identity when it was read; ``None`` if the store has
            conditional puts, so that it cannot be replaced.
        trust: Keys of the caller.

    Attributes:
        looks: Lookup of existing manifests.
    """

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
        """Read the manifest of a version; once more if it is unreadable.

        Raises:
            ObjectNotFoundError: The version is not committed.
            FormatError: The manifest is unreadable, or of another version.
            SignatureError: No trusted key signed it or a manifest that descends from it.
            ChainMismatchError: The manifest belongs to another chain: the URL has two.
            ForkedChainError: The manifest was replaced since the last look.
        """
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
        """Return whether a manifest that was read lists an edge record by its digest."""
        return digest in self._listed

    def _prove(self, found: Committed) -> None:
        """Raise unless a trusted key signed a manifest, or one that descends from it.

        Manifests from before the first signature, or by a key that is no longer trusted, are named
        by digest: each by the next one as its parent, up to one that a trusted key signed.

        Raises:
            SignatureError: There is none.
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
        """Read a manifest that may not be trusted; once more if it is unreadable."""
        key = manifest_key(version)
        found, data = once_more(partial(self._read, key, version))
        manifest = found.manifest
        if manifest.chain != self._chain:
            raise self._of_another_chain(key, manifest)
        if manifest.version != version:
            raise misplaced(key, manifest)
        read_state(manifest.state, key=key)
        self.looks.read(version, found.digest)
        return found, data

    def _of_another_chain(self, key: str, manifest: Manifest) -> ChainMismatchError:
        there = None
        with suppress(FormatError):  # a damaged one tells nothing
            there = identity_there(self._store)
        if there == manifest.chain:
            return replaced(self._store.url, there, f"{self._chain} was opened", manifest.version)
        return ChainMismatchError(
            f"{key}: belongs to chain {manifest.chain}, but {CHAIN_KEY} to {self._chain}: two "
            "chains were created here",
            version=manifest.version,
            hint=f"restore the {CHAIN_KEY} of these manifests, or remove them",
        )

    def digest(self, version: Version) -> str | None:
        """Return the current blake3 of a version's manifest; ``None`` if it is missing.

        Always asks the store; reads the manifest unless the store reports a content hash.

        Raises:
            ForkedChainError: The manifest was replaced since the last look.
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
        except ObjectNotFoundError:
            return None

    def _read(self, key: str, version: Version) -> tuple[Committed, bytes]:
        data = bytes(self._bytes(version))
        manifest = unseal(data, Manifest, key=key)
        signers = self._trust.signers(data, Manifest, self._chain)
        return Committed(manifest, object_digest(data), opened(data)[1], signers), data

    def find(self, version: Version) -> Committed | None:
        """Read the manifest of a version; ``None`` if it is not committed."""
        try:
            return self.read(version)
        except ObjectNotFoundError:
            return None

    def between(
        self, first: Version, last: Version, reads: int, read: Callable[[Version], _T]
    ) -> Iterator[tuple[Version, _T]]:
        """Yield the versions of a range in order, each with its manifest.

        Args:
            first: The first version.
            last: The last version, included.
            reads: Manifests read at a time, ahead of the one that is yielded.
            read: Method that reads one.
        """
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
            raise ObjectNotFoundError(f"{self._store.url} has no object {key!r}", key=key)
        return self._store.read(key, nbytes=seen.nbytes, pin=seen.pin)
