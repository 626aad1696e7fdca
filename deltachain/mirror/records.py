"""Signatures, prune records, tags and heartbeat of a mirror's source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.heartbeat import MAX_HEARTBEAT
from deltachain.chain.lookup import NONE, newest_number
from deltachain.chain.trust import MAX_SIGNATURE
from deltachain.errors import (
    ChainMismatchError,
    ForkedChainError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
    SignatureError,
)
from deltachain.format.documents import (
    CHAIN_ID,
    Heartbeat,
    Identity,
    IdentitySignature,
    PruneRecord,
    Tag,
    parse,
    unseal,
)
from deltachain.format.keys import (
    CHAIN_KEY,
    HEARTBEAT_KEY,
    TAG_PREFIX,
    prune_key,
    signature_key,
    signature_prefix,
    tag_of,
)
from deltachain.mirror.plan import ObjectCopy
from deltachain.store import Store
from deltachain.threads import Pool
from deltachain.types import Version

logger = logging.getLogger(__name__)

READS: Final = 32
"""Records read at a time."""


class SourceRecords:
    """Records of the source that no manifest names.

    A prune or tag record that no trusted key signed is left out, as readers with these keys ignore
    it; signing may have begun after it.

    Args:
        chain: The chain in the source.
        has: Returns whether the mirror has an object, or it is on its way there.
    """

    def __init__(self, chain: Chain, *, has: Callable[[str], bool]) -> None:
        self._chain, self._store, self._has = chain, chain.store, has
        self._id = chain.identity.chain
        self._number = NONE
        self._left_out: set[str] = set()
        self._signed: dict[str, bytes] = {}
        self._heartbeat: tuple[Version, bytes] | None = None
        self._beaten = b""

    def newest_prune(self) -> PruneRecord | None:
        """Read the newest prune record; ``None`` if there is none that counts."""
        try:
            return self._chain.prunes.newest()
        except (FormatError, ObjectNotFoundError, ChainMismatchError):
            return None

    def read_heartbeat(self) -> None:
        """Read the heartbeat of the source; one that does not count is not copied."""
        try:
            data = self._store.get(HEARTBEAT_KEY, limit=MAX_HEARTBEAT)
            found = unseal(data, Heartbeat, key=HEARTBEAT_KEY)
            self._chain.trust.check(data, Heartbeat, chain=self._id, key=HEARTBEAT_KEY)
        except (ObjectNotFoundError, FormatError):
            return
        self._heartbeat = (found.version, data)

    def put_heartbeat(self, there: Store, version: Version) -> None:
        """Copy the heartbeat that was read, once all that it names is in the mirror.

        Args:
            there: Store of the mirror, with the tag and prune records of the source.
            version: Its newest version.
        """
        if self._heartbeat is None or self._heartbeat[0] > version:
            return
        _, data = self._heartbeat
        if data != self._beaten:
            there.put(HEARTBEAT_KEY, data)
        self._heartbeat, self._beaten = None, data

    def signatures(self) -> dict[str, bytes]:
        """Read the signatures of ``chain.json``, by key; those of trusted keys must be true."""
        if CHAIN_ID.fullmatch(self._id) is None:
            return {}
        found = {}
        for info in self._store.list(signature_prefix(self._id)):
            try:
                data = self._store.get(info.key, limit=MAX_SIGNATURE)
                self._check_signature(info.key, data)
            except (FormatError, ObjectNotFoundError) as exc:
                if info.key not in self._left_out:
                    logger.warning("%s, and is left out", exc)
                    self._left_out.add(info.key)
                continue
            found[info.key] = data
        return found

    def put_signatures(self, there: Store) -> None:
        """Put signatures into the mirror; like a publisher's, they come before ``chain.json``."""
        for key, data in self.signatures().items():
            if self._signed.get(key) != data:
                if there.find(key) is None or there.get(key) != data:
                    there.put(key, data)
                self._signed[key] = data

    def prunes(self) -> Iterator[ObjectCopy]:
        """Yield the copies of prune records that the mirror lacks, by number.

        Raises:
            FormatError: A record is damaged, or under the key of another.
        """
        while self._is_done(prune_key(self._number + 1)):
            self._number += 1
        last = newest_number(self._store, prune_key, known=self._number)
        numbers = [n for n in range(self._number + 1, last + 1) if not self._is_done(prune_key(n))]
        with Pool(READS, "deltachain-records") as pool:
            for number, data in pool.ordered(self._prune, numbers, ahead=READS):
                key = prune_key(number)
                if data is not None:
                    yield ObjectCopy(key=key, nbytes=len(data), content=data)

    def tags(self, committed: Callable[[Version], Committed | None]) -> Iterator[ObjectCopy]:
        """Yield the copies of tag records that the mirror lacks, by name and number.

        Args:
            committed: Returns a manifest that was copied; ``None`` for a version that was not, so
                that its tags follow later.

        Raises:
            FormatError: A record is damaged, or under the key of another.
        """
        places = ((tag_of(info.key), info.key) for info in self._store.list(TAG_PREFIX))
        lacking = [(place, key) for place, key in places if place and not self._is_done(key)]
        waiting: set[str] = set()
        for (name, number), key in sorted(lacking):
            if name in waiting:
                continue
            found = self._tag(name, number, key)
            if found is None:
                continue
            data, tag = found
            if tag.version is not None:
                target = committed(tag.version)
                if target is None:
                    waiting.add(name)
                    continue
                if (target.digest, target.manifest.state) != (tag.manifest, tag.state):
                    self._leave_out(key, f"{key}: names another version {tag.version}")
                    continue
            yield ObjectCopy(key=key, nbytes=len(data), content=data)

    def check_same(self, there: Store) -> None:
        """Check that the mirror's newest records are those of the source, as far as both have them.

        A source that was restored from a backup writes other records under numbers that the mirror
        has. Later ones follow those, so the newest is enough. What no trusted key signed, and what
        is damaged, is not compared.

        Args:
            there: Store of the mirror.

        Raises:
            ForkedChainError: Source and mirror have different records of one number.
        """
        newest: dict[str, tuple[int, str]] = {}
        for info in self._store.list(TAG_PREFIX):
            place = tag_of(info.key)
            if place is not None and self._has(info.key):
                name, number = place
                newest[name] = max(newest.get(name, (number, info.key)), (number, info.key))
        number = NONE
        while self._is_done(prune_key(number + 1)):
            number += 1
        with Pool(READS, "deltachain-records") as pool:
            keys = [key for _, key in newest.values()]
            for _ in pool.ordered(partial(self._compare, Tag, there), keys, ahead=READS):
                pass
        while number > NONE and not self._compare(PruneRecord, there, prune_key(number)):
            number -= 1

    def _compare(self, kind: type[Tag] | type[PruneRecord], there: Store, key: str) -> bool:
        """Compare a record of both stores; return whether both have it.

        Raises:
            ForkedChainError: They differ.
        """
        here, other = (self._readable(kind, store, key) for store in (self._store, there))
        if here is None or other is None:
            return False
        if here != other:
            raise ForkedChainError(
                f"{key} of {self._store.url} differs from that of its mirror {there.url}",
                hint="the source was restored from a backup, and other records were written since: "
                "remove this record and later ones of its kind from the mirror, which then copies "
                "those of the source, or mirror to another URL",
            )
        return True

    def _readable(
        self, kind: type[Tag] | type[PruneRecord], store: Store, key: str
    ) -> Tag | PruneRecord | None:
        try:
            data = store.get(key)
            self._chain.trust.check(data, kind, chain=self._id, key=key)
            return unseal(data, kind, key=key)
        except (FormatError, ObjectNotFoundError):
            return None

    def look_again(self) -> None:
        """Look at all prune records again, since the mirror may have lost old ones."""
        self._number = NONE

    def _is_done(self, key: str) -> bool:
        return key in self._left_out or self._has(key)

    def _leave_out(self, key: str, why: str) -> None:
        logger.warning("%s, and is left out", why)
        self._left_out.add(key)

    def _check_signature(self, key: str, data: bytes) -> None:
        """Raise unless an object is a signature of ``chain.json`` under its own key."""
        found = parse(data, IdentitySignature, key=key)
        signature, trusted = found.signature, self._chain.trust.trusted
        if found.chain != self._id or signature_key(self._id, signature.key_id) != key:
            raise MalformedError(f"{key}: is the signature of another key or chain", key=key)
        if trusted is None or signature.key_id not in {one.key_id for one in trusted.keys}:
            return
        if not trusted.signers([signature], Identity, self._id, self._chain.documents[CHAIN_KEY]):
            raise SignatureError(f"{key}: {trusted.why_not([signature])}", key=key)

    def _prune(self, number: int) -> tuple[int, bytes | None]:
        """Read and prove a prune record, once more if it is damaged; ``None`` to leave it out."""
        key = prune_key(number)
        try:
            try:
                return number, self._proven_prune(number, key)
            except FormatError:  # a bit may have flipped in transit
                return number, self._proven_prune(number, key)
        except (SignatureError, ObjectNotFoundError) as exc:
            self._leave_out(key, str(exc))
            return number, None

    def _proven_prune(self, number: int, key: str) -> bytes:
        data = self._store.get(key)
        record = unseal(data, PruneRecord, key=key)
        self._chain.trust.check(data, PruneRecord, chain=self._id, key=key)
        if (record.chain, record.number) != (self._id, number):
            raise MalformedError(
                f"{key}: is prune record {record.number} of chain {record.chain[:80]}", key=key
            )
        return data

    def _tag(self, name: str, number: int, key: str) -> tuple[bytes, Tag] | None:
        """Read and prove a tag record, once more if it is damaged; ``None`` to leave it out."""
        try:
            try:
                return self._proven_tag(name, number, key)
            except FormatError:  # a bit may have flipped in transit
                return self._proven_tag(name, number, key)
        except (SignatureError, ObjectNotFoundError) as exc:
            self._leave_out(key, str(exc))
            return None

    def _proven_tag(self, name: str, number: int, key: str) -> tuple[bytes, Tag]:
        data = self._store.get(key)
        tag = unseal(data, Tag, key=key)
        self._chain.trust.check(data, Tag, chain=self._id, key=key)
        if (tag.chain, tag.name, tag.number) != (self._id, name, number):
            raise MalformedError(
                f"{key}: is number {tag.number} of tag {tag.name!r} of chain {tag.chain[:80]}",
                key=key,
            )
        return data, tag
