"""Documents of a mirror's source: read ahead, and proven in order."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Final, Literal

from deltachain.chain.chain import Chain
from deltachain.chain.checks import check_record
from deltachain.chain.choose import VersionChoice, choose
from deltachain.chain.identity import read_mirror
from deltachain.chain.log import Committed
from deltachain.chain.reachable import plan_present
from deltachain.errors import (
    BrokenChainError,
    DigestMismatchError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
    SignatureError,
)
from deltachain.format.documents import (
    EdgeRecord,
    EdgeSummary,
    Manifest,
    opened,
    read_state,
    unseal,
)
from deltachain.format.keys import edge_key, manifest_key, object_digest, version_of
from deltachain.mirror.plan import (
    ObjectCopy,
    ProvenDocument,
    VersionDocuments,
    check_link,
    check_record_place,
    identity_copies,
)
from deltachain.store import ObjectInfo
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


logger = logging.getLogger(__name__)

READ_AHEAD: Final = 32
"""Manifests that are read before those before them are proven."""

REMEMBERED: Final = 1024
"""Manifests that are remembered, and edge records that they list."""


def oldest_copied(chain: Chain, start: Version | Literal["head"] | None) -> Version:
    """Return the oldest version whose payloads are copied.

    Args:
        chain: The chain in the source.
        start: A version, or the head, from the anchor that leads to it on; ``None`` for all
            payloads, or all that the source copies if it is a mirror.

    Raises:
        ChainError: The version is not committed.
        BrokenChainError: It cannot be rebuilt from the source.
    """
    if start is None:
        record = read_mirror(chain.store)
        return record.first if record else 0
    committed = chain.head() if start == "head" else choose(chain, VersionChoice(version=start))
    return plan_present(chain, None, committed).edges[0].version if committed else 0


class SourceDocuments:
    """Documents of the chain in the source.

    Args:
        chain: The chain in the source.
        known: Reads a manifest that the mirror has; ``None`` if it has none of the version.
        has: Returns whether the mirror has an object.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        known: Callable[[Version], Committed | None],
        has: Callable[[str], bool],
    ) -> None:
        self._store, self._chain, self._trust = chain.store, chain.identity.chain, chain.trust
        self._known, self._has, self._acceptance = known, has, Acceptance(chain)
        self._proven: OrderedDict[Version, Committed] = OrderedDict()
        self._identity, self._documents = chain.identity, chain.documents
        self._digests: OrderedDict[str, str] = OrderedDict()
        self._due: dict[str, ObjectInfo | None] = {}
        self._gone = set[str]()
        self._left_out: dict[str, ObjectInfo | None] = {}

    def note_due(self, found: Mapping[str, ObjectInfo]) -> None:
        """Note the edge records that a comparison of both stores found due, in place of others.

        A record that was gone is due again, and so is one that was left out, if another one is in
        its place since.
        """
        self._due = {key: info for key, info in found.items() if version_of(key) is not None}
        self._gone.difference_update(found)
        left_out = self._left_out.items()
        self._left_out = {key: info for key, info in left_out if found.get(key, info) == info}

    def note_edges(self, edges: Iterable[EdgeSummary]) -> None:
        """Note edge records that the head hint lists, which proves nothing."""
        for edge in edges:
            if edge.record == edge_key(edge.version, edge.kind, edge.base):
                self._due.setdefault(edge.record)

    def leave_out(self, key: str, why: str) -> None:
        """Leave out an edge record while the source has it as it is now."""
        logger.warning("%s, and is left out", why)
        self._left_out[key] = self._due.get(key)

    @property
    def identity(self) -> tuple[ObjectCopy, ...]:
        """Copies of table, assets and identity."""
        return identity_copies(self._identity, self._documents)

    @property
    def due(self) -> Set[str]:
        """Keys of edge records that the mirror may lack, and that the source has."""
        return self._due.keys() - self._gone - self._left_out.keys()

    def read(self, versions: Iterable[Version]) -> Iterator[VersionDocuments]:
        """Yield the documents of versions: edge records that it is the first to list, the manifest.

        Args:
            versions: The versions, ascending.

        Raises:
            BrokenChainError: A manifest is missing.
            FormatError: A document is damaged, or of another version or chain.
            SignatureError: No trusted key signed a manifest or one that descends from it.
            ForkedChainError: A manifest continues another history.
        """
        with Pool(READ_AHEAD, "deltachain-documents") as pool:
            for version, data in pool.ordered(self._manifest, versions, ahead=READ_AHEAD):
                try:
                    found = self._prove(version, data)
                except FormatError:  # a bit may have flipped in transit
                    found = self._prove(*self._manifest(version))
                committed = found[0]
                self._proven[version] = committed
                while len(self._proven) > REMEMBERED:
                    self._proven.popitem(last=False)
                listed = [edge for edge in committed.manifest.recent if edge.record]
                records = [one for edge in listed for one in self._listed(edge)]
                yield VersionDocuments(committed=committed, documents=(*records, found[1]))

    def read_records(self, keys: Iterable[str]) -> Iterator[VersionDocuments]:
        """Yield edge records, by key, that need not be listed anywhere.

        Leaves out those that readers with the trusted keys ignore.

        Raises:
            FormatError: A record is damaged, or of another version or chain.
        """
        for key in keys:
            version = version_of(key)
            committed = None if version is None else self.committed(version)
            try:
                record = committed and self._record(committed, key, self._digests.get(key, ""))
            except SignatureError as exc:
                self.leave_out(key, str(exc))
                continue
            if committed and record:
                yield VersionDocuments(committed=committed, documents=(record,))

    def _manifest(self, version: Version) -> tuple[Version, bytes]:
        key = manifest_key(version)
        try:
            return version, self._store.get(key)
        except ObjectNotFoundError as exc:
            raise BrokenChainError(
                f"manifest of version {version} is missing in {self._store.url}",
                version=version,
                hint=f"manifests must never be deleted: restore {key} from a backup",
            ) from exc

    def _prove(self, version: Version, data: bytes) -> tuple[Committed, ProvenDocument]:
        """Parse a manifest, and check that it continues the one before it."""
        key = manifest_key(version)
        committed = self._acceptance.parse(version, data)
        manifest = committed.manifest
        if manifest.version != version:
            raise MalformedError(f"{key}: is version {manifest.version}", key=key)
        read_state(manifest.state, key=key)
        check_link(committed, self.committed(version - 1) if version else None, self._chain)
        self._acceptance.check(committed)
        return committed, ProvenDocument(key=key, content=data, version=version, edge=manifest.edge)

    def committed(self, version: Version) -> Committed | None:
        """Return a manifest that was proven, or that the mirror has."""
        return self._proven.get(version) or self._known(version)

    def _listed(self, edge: EdgeSummary) -> Iterator[ProvenDocument]:
        """Yield the edge record that a manifest lists, unless it was proven and copied before."""
        key = edge.record
        if (self._digests.get(key) == edge.digest and self._has(key)) or key in self._gone:
            return
        if key != edge_key(edge.version, edge.kind, edge.base):
            raise MalformedError(f"{key}: listed as {edge.kind} to {edge.version}", key=key)
        self._digests[key] = edge.digest
        while len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)
        committed = self.committed(edge.version)
        record = committed and self._record(committed, key, edge.digest)
        if record:
            yield record

    def _record(self, committed: Committed, key: str, digest: str) -> ProvenDocument | None:
        """Read and prove an edge record, once more if it is damaged; ``None`` if it is gone."""
        try:
            try:
                return self._prove_record(committed, key, digest)
            except FormatError:
                return self._prove_record(committed, key, digest)
        except ObjectNotFoundError:
            logger.warning("%s is gone from %s, and is left out", key, self._store.url)
            self._gone.add(key)
            return None

    def _prove_record(self, committed: Committed, key: str, digest: str) -> ProvenDocument:
        data = self._store.get(key)
        actual = object_digest(data)
        if digest and actual != digest:
            raise DigestMismatchError(key, expected=digest, actual=actual, key=key)
        record = unseal(data, EdgeRecord, key=key)
        if not digest:  # an accepted manifest lists all others
            self._trust.check(data, EdgeRecord, chain=self._chain, key=key)
        check_record(record, committed.digest, committed.manifest.state, key)
        check_record_place(record, self._chain, key)
        return ProvenDocument(key=key, content=data, version=committed.version, edge=record.edge)
