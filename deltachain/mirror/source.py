"""Source of a mirror: its documents, proven and in the order of dependence."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from deltachain import errors
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.checks import check_record, read_document
from deltachain.chain.heartbeat import MAX_HEARTBEAT
from deltachain.chain.manifests import NONE, newest_number
from deltachain.chain.trust import MAX_SIGNATURE
from deltachain.format import documents, keys
from deltachain.mirror.copies import ObjectCopy
from deltachain.store import ObjectInfo
from deltachain.store.base import MAX_DOCUMENT
from deltachain.types import Version

READS: Final = 32  # manifests read at a time
REMEMBERED: Final = 1024  # manifests that are remembered
logger = logging.getLogger(__name__)

_D = TypeVar("_D", bound=documents.Document)


class SourceDocuments:
    """Documents of a source, each after all that it names.

    Records that readers with the trusted keys ignore are left out, each named once.
    """

    def __init__(
        self,
        chain: Chain,
        first: Version,
        *,
        known: Callable[[Version], Committed | None],
        has: Callable[[str], bool],
    ) -> None:
        self._chain, self._store, self._id = chain, chain.store, chain.identity.chain
        self._first, self._known, self._has = first, known, has
        self._proven: dict[Version, Committed] = {}
        self._left_out: set[ObjectInfo | str] = set()

    def identity(self) -> Iterator[ObjectCopy]:
        exact, identity = self._chain.documents, self._chain.identity
        yield _document(keys.TABLE_KEY, exact[keys.TABLE_KEY])
        for ref in identity.assets:
            yield ObjectCopy(key=ref.key, nbytes=ref.nbytes, digest=ref.blake3, pin=ref.pin)
        yield _document(keys.CHAIN_KEY, exact[keys.CHAIN_KEY])

    def versions(self, first: Version, last: Version) -> Iterator[ObjectCopy]:
        """Yield the objects of versions: payloads, edge records that they list, the manifest."""
        for committed, data in self._chain.manifests(first, last, reads=READS):
            version, key = committed.version, keys.manifest_key(committed.version)
            _check_link(committed, self.committed(version - 1) if version else None)
            self._proven[version] = committed
            self._proven.pop(version - REMEMBERED, None)
            for edge in committed.manifest.recent:
                if edge.record not in self._left_out and not self._has(edge.record):
                    yield from self._record(edge.record, edge.digest)
            yield from self._parts(committed.manifest.edge, version, key)
            yield _document(key, data, version)

    def records(self, infos: Iterable[ObjectInfo]) -> Iterator[ObjectCopy]:
        """Yield edge records that no manifest may list, each after its payloads."""
        for info in infos:
            if info in self._left_out:
                continue
            try:
                yield from self._record(info.key)
            except errors.SignatureError as exc:
                self.leave_out(info, str(exc))

    def leave_out(self, which: ObjectInfo | str, why: str) -> None:
        """Leave out an object, as long as the source has it as it is now."""
        logger.warning("%s, and is left out", why)
        self._left_out.add(which)

    def committed(self, version: Version) -> Committed | None:
        return self._proven.get(version) or self._known(version)

    def prunes(self, known: int, wanted: Iterable[int | None]) -> Iterator[ObjectCopy]:
        """Yield prune records: those wanted, and those after a known number."""
        numbers = {number for number in wanted if number is not None and number >= 0}
        known = max(known, *numbers, NONE)
        newest = newest_number(self._store, keys.prune_key, known=known)
        for number in sorted({*numbers, *range(known + 1, newest + 1)}):
            key = keys.prune_key(number)
            found = self._accepted(key, documents.PruneRecord)
            if found is None:
                continue
            if found[0].number != number:
                raise errors.MalformedError(f"{key}: is prune record {found[0].number}", key=key)
            yield _document(key, found[1])

    def tags(self, there: Iterable[str], *, compare: bool) -> Iterator[ObjectCopy]:
        """Yield tag records that the mirror lacks; those of versions that it lacks follow later."""
        had, waiting = frozenset(there), set[str]()
        common, lacking = dict[str, str](), list[str]()
        for info in self._store.list(keys.TAG_PREFIX):  # in the order of names and numbers
            place = keys.tag_of(info.key)
            if place and info.key not in had:
                lacking.append(info.key)
            elif place and compare:
                common[place[0]] = info.key
        for key in (*common.values(), *lacking):
            found = self._accepted(key, documents.Tag)
            if found is None or found[0].name in waiting:
                continue
            if keys.tag_key(found[0].name, found[0].number) != key:
                raise errors.MalformedError(f"{key}: is another tag record", key=key)
            if self._is_copied(found[0], key):
                yield _document(key, found[1])
            else:
                waiting.add(found[0].name)

    def _is_copied(self, tag: documents.Tag, key: str) -> bool:
        """Return whether the version of a tag was copied; leave out one of another history."""
        if tag.version is None:
            return True
        target = self.committed(tag.version)
        if target is None:
            return False
        if (target.digest, target.manifest.state) != (tag.manifest, tag.state):
            self.leave_out(key, f"{key}: names another version {tag.version}")
            return False
        return True

    def heartbeat(self) -> tuple[Version, bytes] | None:
        """Read the heartbeat, and which version it names; ``None`` if there is none to copy."""
        try:
            found, data = self._read(keys.HEARTBEAT_KEY, documents.Heartbeat, limit=MAX_HEARTBEAT)
        except (errors.ObjectNotFoundError, errors.FormatError):
            return None
        return found.version, data

    def signatures(self) -> Iterator[tuple[str, bytes]]:
        """Yield keys and signatures of ``chain.json``; those of trusted keys must be true."""
        if documents.CHAIN_ID.fullmatch(self._id) is None:
            return
        for info in self._store.list(keys.signature_prefix(self._id)):
            try:
                data = self._store.get(info.key, limit=MAX_SIGNATURE)
                self._check_signature(info.key, data)
            except (errors.FormatError, errors.ObjectNotFoundError) as exc:
                if info.key not in self._left_out:
                    self.leave_out(info.key, str(exc))
                continue
            yield info.key, data

    def _record(self, key: str, digest: str = "") -> Iterator[ObjectCopy]:
        """Yield an edge record after its payloads, unless the source or its version is gone."""
        version = keys.version_of(key)
        committed = None if version is None else self.committed(version)
        if version is None or committed is None:
            return
        try:
            record, data = self._read(key, documents.EdgeRecord, digest=digest)
        except errors.ObjectNotFoundError:
            self.leave_out(key, f"{key} is gone from {self._store.url}")
            return
        check_record(record, committed.digest, committed.manifest.state, key)
        yield from self._parts(record.edge, version, key)
        yield _document(key, data, version)

    def _parts(self, edge: documents.Edge, version: Version, key: str) -> Iterator[ObjectCopy]:
        """Yield the parts of an edge, whose keys will be written: of its own version only."""
        for ref in edge.parts:
            if not ref.key.startswith(keys.PAYLOADS) or keys.version_of(ref.key) != version:
                raise errors.MalformedError(f"{key}: names {ref.key!r} as a part", key=key)
            if version >= self._first:
                yield ObjectCopy(
                    key=ref.key,
                    nbytes=ref.nbytes,
                    digest=ref.blake3,
                    pin=ref.pin,
                    version=version,
                    edge=edge,
                )

    def _accepted(self, key: str, kind: type[_D]) -> tuple[_D, bytes] | None:
        """Read a record; ``None`` for one that no trusted key signed, or that is gone."""
        if key in self._left_out:
            return None
        try:
            return self._read(key, kind)
        except (errors.SignatureError, errors.ObjectNotFoundError) as exc:
            self.leave_out(key, str(exc))
            return None

    def _read(
        self, key: str, kind: type[_D], digest: str = "", limit: int = MAX_DOCUMENT
    ) -> tuple[_D, bytes]:
        return read_document(
            self._store,
            key,
            kind,
            chain=self._id,
            trust=self._chain.trust,
            digest=digest,
            limit=limit,
        )

    def _check_signature(self, key: str, data: bytes) -> None:
        found = documents.parse(data, documents.IdentitySignature, key=key)
        signature, trusted = found.signature, self._chain.trust.trusted
        if found.chain != self._id or keys.signature_key(self._id, signature.key_id) != key:
            raise errors.MalformedError(f"{key}: is the signature of another key or chain", key=key)
        if trusted is None or signature.key_id not in {one.key_id for one in trusted.keys}:
            return
        identity = self._chain.documents[keys.CHAIN_KEY]
        if not trusted.signers([signature], documents.Identity, self._id, identity):
            raise errors.SignatureError(f"{key}: {trusted.why_not([signature])}", key=key)


def newest_prune(chain: Chain) -> documents.PruneRecord | None:
    try:
        return chain.prunes.newest()
    except (errors.FormatError, errors.ObjectNotFoundError):
        return None


def _check_link(found: Committed, before: Committed | None) -> None:
    """Check that a manifest continues the history that was copied."""
    manifest, key = found.manifest, keys.manifest_key(found.version)
    parent, state, epoch = ("", "", 0)
    if before is not None:
        parent, state, epoch = before.digest, before.manifest.state, before.manifest.epoch
    if manifest.parent != parent:
        raise errors.ForkedChainError(
            f"{key}: names {manifest.parent or 'none'} as its parent, expected {parent or 'none'}",
            version=found.version,
        )
    if manifest.base_state != state:
        raise errors.MalformedError(f"{key}: starts from another state than its parent's", key=key)
    if manifest.epoch < epoch:
        raise errors.ForkedChainError(
            f"{key}: epoch {manifest.epoch} after epoch {epoch}", version=found.version
        )


def _document(key: str, data: bytes, version: Version | None = None) -> ObjectCopy:
    return ObjectCopy(key=key, nbytes=len(data), content=data, version=version)
