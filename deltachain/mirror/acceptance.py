"""Acceptance of manifests of a mirror's source: signed, or named by a signed one."""

from __future__ import annotations

from typing import Final

from deltachain.chain.chain import Chain
from deltachain.chain.log import Committed
from deltachain.format.digest import object_digest
from deltachain.format.documents import Manifest, unseal
from deltachain.format.keys import manifest_key
from deltachain.format.signed import opened
from deltachain.threads import Pool
from deltachain.types import Version

READS: Final = 32
"""Manifests read at a time."""


class Acceptance:
    """Checks manifests with the trusted keys of a chain, before anything of them is copied.

    Args:
        chain: The chain in the source.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._named: dict[Version, str] = {}

    def parse(self, version: Version, data: bytes) -> Committed:
        """Parse a manifest, and note the trusted keys that signed it.

        Raises:
            FormatError: It is damaged.
        """
        manifest = unseal(data, Manifest, key=manifest_key(version))
        trust, digest = self._chain.trust, object_digest(data)
        if trust.trusted is None:
            return Committed(manifest, digest)
        signers = trust.signers(data, Manifest, self._chain.identity.chain)
        return Committed(manifest, digest, opened(data)[1], signers)

    def check(self, found: Committed) -> None:
        """Raise unless a trusted key signed a manifest, or one that descends from it.

        Reads later manifests up to one that is signed, the first time that one is not.

        Raises:
            SignatureError: There is none, and trusted keys are given.
        """
        trust, first = self._chain.trust, found.version
        if trust.trusted is None or found.signed_by or self._named.get(first) == found.digest:
            return
        refusal = trust.refusal(found.signatures, manifest_key(first))
        head = self._chain.newest(first)
        if head == first or not self._read(head).signed_by:
            raise refusal
        named = {first: found.digest}
        with Pool(READS, "deltachain-documents") as pool:
            for later in pool.ordered(self._read, range(first + 1, head + 1), ahead=READS):
                version, manifest = first + len(named), later.manifest
                if manifest.version != version or manifest.parent != named[version - 1]:
                    raise refusal
                if later.signed_by:
                    self._named = named
                    return
                named[version] = later.digest
        raise refusal

    def _read(self, version: Version) -> Committed:
        return self.parse(version, self._chain.store.get(manifest_key(version)))
