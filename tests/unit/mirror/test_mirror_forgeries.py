import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from deltachain import errors
from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.trust import Trust
from deltachain.format import documents, keys
from deltachain.mirror import Mirror
from deltachain.store import MemoryStore
from tests.hostile.signed import (
    MALLORY,
    NOBODY,
    OWNER,
    Author,
    Follower,
    edit,
    signature_place,
    trust_of,
)
from tests.support.backup import objects_of
from tests.support.faults import Fault, FaultyStore
from tests.support.models import recompute
from tests.unit.mirror.conftest import Pair, copy_of

SIGNED_AT = 3
READER = trust_of(1)


def mirrored(source: MemoryStore, there: MemoryStore) -> dict[str, bytes]:
    list(Mirror(source, there, trust=READER).catch_up())
    return copied(there)


def copied(there: MemoryStore) -> dict[str, bytes]:
    """Every object of a mirror but its own record."""
    return {key: data for key, data in objects_of(there).items() if key != keys.MIRROR_KEY}


def relink(store: MemoryStore) -> None:
    """Publish another history from a version on, as somebody who controls the store."""
    evil = Author(MALLORY, evil=1).grow(6)
    for key, data in objects_of(evil.store).items():
        if (keys.version_of(key) or 0) >= SIGNED_AT:
            store.put(key, data)


def link_again(store: MemoryStore) -> None:
    """Change versions, hash them again and link them, under the signatures of others."""
    parent = ""
    for version in range(6):
        key = keys.manifest_key(version)
        if version >= SIGNED_AT:
            edit(store, key, partial(dict.update, step=99, parent=parent), keeps=True)
        parent = Chain.open(store, NOBODY).read(version).digest


def edit_one(store: MemoryStore, *, keeps: bool) -> None:
    edit(store, keys.manifest_key(SIGNED_AT), lambda p: p.update(step=9), keeps=keeps)


@pytest.mark.parametrize(
    ("act", "error", "named"),
    [
        pytest.param(partial(edit_one, keeps=False), errors.SignatureError, "3", id="no signature"),
        pytest.param(
            partial(edit_one, keeps=True), errors.SignatureError, "3", id="that of another"
        ),
        pytest.param(link_again, errors.SignatureError, "5", id="hashed and linked again"),
        pytest.param(relink, errors.DeltaChainError, "5", id="another history by another key"),
    ],
)
def test_nothing_past_a_forgery_is_copied_with_keys(
    act: Callable[[MemoryStore], object], error: type[errors.DeltaChainError], named: str
) -> None:
    """A forged head ends it at once."""
    source, there = Author(OWNER).grow(6).store, MemoryStore()
    true = objects_of(source)
    act(source)
    for _ in range(2):
        with pytest.raises(error, match=f"manifests/0*{named}"):
            mirrored(source, there)
    found = copied(there)
    assert (keys.manifest_key(SIGNED_AT - 1) in found) is (named != "5")
    assert all(true[key] == data for key, data in found.items())
    assert not any((keys.version_of(key) or 0) >= SIGNED_AT for key in found)
    for key, data in true.items():
        source.put(key, data)
    assert mirrored(source, there) == true


def test_a_running_mirror_copies_nothing_of_another_history() -> None:
    author, there = Author(OWNER).grow(SIGNED_AT), MemoryStore()
    mirror = Mirror(author.store, there, trust=READER)
    list(mirror.catch_up())
    author.grow(1)
    relink(author.store)
    for _ in range(10):
        with pytest.raises((errors.SignatureError, errors.ForkedChainError)):
            list(mirror.catch_up())
    assert not any((keys.version_of(key) or 0) >= SIGNED_AT for key in objects_of(there))


def test_an_unsigned_identity_is_not_copied() -> None:
    source, there = Author(NOBODY).grow(2).store, MemoryStore()
    with pytest.raises(errors.SignatureError):
        mirrored(source, there)
    assert objects_of(there) == {}


def test_signing_that_begins_later_is_copied_and_counts_for_versions_before() -> None:
    author, there = Author(NOBODY).grow(3), MemoryStore()
    source = author.store
    early = Mirror(source, there, trust=NOBODY)
    list(early.catch_up())
    source.put_if_absent(*next(iter(Chain.open(source, OWNER.unchecked()).sign_identity().items())))
    author.chain = Chain.open(source, OWNER)
    author.grow(2)
    list(early.catch_up())
    assert signature_place(1) in objects_of(there)
    again = MemoryStore()
    assert mirrored(source, again) == objects_of(source)
    follower = Follower(again, 1)
    follower.subscriber.update()
    assert follower.subscriber.version == 4


@pytest.mark.parametrize(("trust", "crosses"), [(OWNER, True), (MALLORY, False), (NOBODY, False)])
def test_tags_and_prune_records_cross_if_a_trusted_key_signed_them(
    trust: Trust, crosses: bool
) -> None:
    source, there = Author(OWNER).grow(4).store, MemoryStore()
    record = documents.PruneRecord(chain=f"{7:032x}", number=0, head=3, maintainer="m", time=1.0)
    tagged = Chain.open(source, NOBODY).read(2)
    tag = documents.Tag(
        chain=f"{7:032x}",
        name="best",
        number=0,
        version=2,
        state=tagged.manifest.state,
        manifest=tagged.digest,
        time=1.0,
    )
    source.put(keys.prune_key(0), trust.seal(record, f"{7:032x}"))
    source.put(keys.tag_key("best", 0), trust.seal(tag, f"{7:032x}"))
    found = mirrored(source, there)
    assert (keys.prune_key(0) in found) is (keys.tag_key("best", 0) in found) is crosses
    assert keys.manifest_key(3) in found


def test_tags_follow_their_versions() -> None:
    author, there = Author(OWNER).grow(3), MemoryStore()
    source, chain = author.store, author.chain
    mirror = Mirror(source, there, trust=READER)
    list(mirror.catch_up())
    author.grow(1)
    tags.set_(chain, "best", chain.read(1), time=1.0)
    tags.set_(chain, "best", chain.read(3), time=2.0)
    list(mirror.catch_up())
    assert copied(there) == objects_of(source)
    tags.remove(chain, "best", time=3.0)
    for _ in range(8):
        list(mirror.catch_up())
    assert keys.tag_key("best", 2) in objects_of(there)


AT = 5
"""The version that is forged, of nine; version 4 has an anchor, which it lists."""


def forge(store: MemoryStore, key: str, **changes: Any) -> None:
    """Replace fields of a manifest, and seal it again."""
    manifest = documents.unseal(store.get(key), documents.Manifest, key=key)
    store.put(key, documents.seal(replace(manifest, **changes)))


def forge_record(store: MemoryStore) -> None:
    key = keys.edge_key(4, "anchor", None)
    record = documents.unseal(store.get(key), documents.EdgeRecord, key=key)
    part = replace(record.edge.parts[0], blake3="0" * 64)
    store.put(key, documents.seal(replace(record, edge=replace(record.edge, parts=(part,)))))


def flip(store: MemoryStore, prefix: str) -> None:
    """Flip a bit in the middle of an object."""
    key = next(info.key for info in store.list(prefix))
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


KEY = keys.manifest_key(AT)
DELTA = f"deltas/{AT:020d}"
OTHER = f"deltas/{3:020d}-00000000-{'a' * 32}/00000.safetensors"


def forge_part(store: MemoryStore, **changes: Any) -> None:
    """Replace fields of the first part that a manifest names."""
    edge = documents.unseal(store.get(KEY), documents.Manifest, key=KEY).edge
    part = replace(edge.parts[0], **changes)
    forge(store, KEY, edge=replace(edge, parts=(part, *edge.parts[1:])))


def shorten(store: MemoryStore) -> None:
    store.put(next(info.key for info in store.list(DELTA)), b"short")


FORGERIES: dict[str, tuple[Callable[[MemoryStore], object], type[errors.DeltaChainError]]] = {
    "payload": (lambda s: flip(s, DELTA), errors.DigestMismatchError),
    "payload of another length": (shorten, errors.MalformedError),
    "manifest, a flipped bit": (lambda s: flip(s, KEY), errors.FormatError),
    "manifest that is another's": (
        lambda s: s.put(KEY, s.get(keys.manifest_key(3))),
        errors.MalformedError,
    ),
    "manifest, sealed again": (lambda s: forge(s, KEY, step=99), errors.ForkedChainError),
    "manifest, lost": (lambda s: s.delete(KEY), errors.BrokenChainError),
    "parent": (lambda s: forge(s, KEY, parent="0" * 64), errors.ForkedChainError),
    "chain": (lambda s: forge(s, KEY, chain="another"), errors.ChainMismatchError),
    "base state": (lambda s: forge(s, KEY, base_state="0" * 32), errors.MalformedError),
    "key of the hint as a part": (
        lambda s: forge_part(s, key=keys.HEAD_KEY),
        errors.MalformedError,
    ),
    "part of another version": (lambda s: forge_part(s, key=OTHER), errors.MalformedError),
    "digest of a part": (lambda s: forge_part(s, blake3="0" * 64), errors.DigestMismatchError),
    "anchor": (lambda s: flip(s, f"anchors/{4:020d}"), errors.DigestMismatchError),
    "edge record": (forge_record, errors.DigestMismatchError),
    "edge record, a flipped bit": (lambda s: flip(s, f"edges/{4:020d}"), errors.FormatError),
}
FOUND_LATER = ("manifest, sealed again",)
"""By the next version, whose parent it is not."""


@pytest.mark.parametrize("what", FORGERIES)
def test_nothing_past_a_forgery_is_copied(pair: Pair, what: str) -> None:
    pair.grow(9)
    true = copy_of(pair.source)
    (act, error), at = FORGERIES[what], AT + (what in FOUND_LATER)
    act(pair.source)
    mirror = pair.mirror()
    for _ in range(3):
        with pytest.raises(error):
            list(mirror.catch_up())
    with pytest.raises(error):
        pair.copy()
    found = copy_of(pair.there)
    assert keys.manifest_key(AT - 1) in found
    assert keys.manifest_key(at) not in found
    assert not any((keys.version_of(key) or 0) > at for key in found)
    assert keys.HEAD_KEY not in found
    if at == AT:
        assert all(true[key] == data for key, data in pair.copied().items())
        recompute(pair.there)
        for key, data in true.items():  # put back: the mirror goes on
            pair.source.put(key, data)
        pair.copy()
        assert pair.copied() == true


@pytest.mark.parametrize("key", [keys.CHAIN_KEY, keys.TABLE_KEY])
def test_a_forged_identity_is_not_copied(pair: Pair, key: str) -> None:
    pair.grow(2)
    document = json.loads(pair.source.get(key))
    document["unknown" if key == keys.CHAIN_KEY else "ext"] = {"forged": 1}
    pair.source.put(key, json.dumps(document).encode())
    with pytest.raises(errors.FormatError):
        pair.copy()
    assert copy_of(pair.there) == {}


def test_a_forged_asset_ends_the_copy(pair: Pair) -> None:
    pair.grow(2)
    flip(pair.source, "assets/")
    with pytest.raises(errors.DigestMismatchError):
        pair.copy()
    assert copy_of(pair.there).keys() == {keys.MIRROR_KEY, keys.TABLE_KEY}


def test_a_bit_that_flips_in_transit_is_read_again(pair: Pair) -> None:
    pair.grow(6)
    faulty = FaultyStore(
        pair.source,
        Fault("corrupt", f"deltas/{3:020d}"),
        Fault("corrupt", keys.manifest_key(2)),
        Fault("corrupt", "edges/"),
    )
    list(Mirror(faulty, pair.there).catch_up())
    assert len(faulty.struck) == 3
    pair.check()


def test_a_forged_hint_misleads_nobody(pair: Pair) -> None:
    pair.grow(6)
    pair.source.put(keys.HEAD_KEY, b"nonsense")
    pair.copy()
    found = copy_of(pair.there)
    assert keys.HEAD_KEY not in found
    assert found.keys() - {keys.MIRROR_KEY} == copy_of(pair.source).keys() - {keys.HEAD_KEY}


def test_a_forged_head_far_ahead_takes_no_memory(pair: Pair) -> None:
    """All before the gap is copied, and what is committed once the forgery is gone."""
    pair.grow(3)
    far = 3_000_000
    forged = documents.unseal(
        pair.source.get(keys.manifest_key(0)), documents.Manifest, key=keys.manifest_key(0)
    )
    pair.source.put(keys.manifest_key(far), documents.seal(replace(forged, version=far)))
    pair.source.put(keys.HEAD_KEY, documents.dump(documents.Head(version=far)))
    mirror = pair.mirror()
    tracemalloc.start()
    with pytest.raises(errors.BrokenChainError, match="manifest of version 4 is missing"):
        list(mirror.catch_up())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mirror.version == 3
    assert most < 20 << 20
    pair.source.delete(keys.manifest_key(far))
    pair.source.delete(keys.HEAD_KEY)
    pair.grow(2)
    list(mirror.catch_up())
    assert mirror.version == 6


def test_a_source_that_went_back_is_named(pair: Pair) -> None:
    pair.grow(3)
    earlier = copy_of(pair.source)
    pair.grow(3)
    pair.copy()
    for info in list(pair.source.list()):
        pair.source.delete(info.key)
    for key, data in earlier.items():
        pair.source.put(key, data)
    before = copy_of(pair.there)
    with pytest.raises(errors.StoreWentBackError, match="the source went back"):
        pair.copy()
    assert copy_of(pair.there) == before


@pytest.mark.parametrize("more", [0, 3])
def test_a_source_with_another_history_is_named(pair: Pair, more: int) -> None:
    pair.grow(3)
    pair.copy()
    before = copy_of(pair.there)
    forge(pair.source, keys.manifest_key(3), step=1000)
    for _ in range(more):
        pair.grow(1)
    with pytest.raises(errors.ForkedChainError, match="version 3"):
        pair.copy()
    assert copy_of(pair.there) == before


def test_a_mirror_with_another_document_is_left_as_it_is(pair: Pair) -> None:
    pair.grow(3)
    mirror = pair.mirror()
    list(mirror.catch_up())
    pair.grow(3)
    pair.there.put(keys.manifest_key(5), b"{}")
    with pytest.raises(errors.ForkedChainError, match="has another manifests/"):
        list(mirror.catch_up())
    assert pair.there.get(keys.manifest_key(5)) == b"{}"
    assert mirror.version == 4
