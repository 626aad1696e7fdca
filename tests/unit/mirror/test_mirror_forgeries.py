"""Sources that are forged or damaged: nothing past the forgery is copied."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from deltachain.errors import (
    BrokenChainError,
    ChainMismatchError,
    DeltaChainError,
    DigestMismatchError,
    ForkedChainError,
    FormatError,
    MalformedError,
    StoreWentBackError,
)
from deltachain.format.documents import EdgeRecord, Head, Manifest, dump, seal, unseal
from deltachain.format.keys import (
    CHAIN_KEY,
    HEAD_KEY,
    MIRROR_KEY,
    TABLE_KEY,
    edge_key,
    manifest_key,
    version_of,
)
from deltachain.mirror import Mirror
from deltachain.store import MemoryStore
from tests.support.faults import Fault, FaultyStore
from tests.support.models import recompute
from tests.unit.mirror.conftest import Pair, copy_of

AT = 5
"""The version that is forged, of nine; version 4 has an anchor, which it lists."""


def forge(store: MemoryStore, key: str, **changes: Any) -> None:
    """Replace fields of a manifest, and seal it again."""
    manifest = unseal(store.get(key), Manifest, key=key)
    store.put(key, seal(replace(manifest, **changes)))


def edge_with(store: MemoryStore, at: str, **changes: Any) -> dict[str, Any]:
    """Return the edge of a manifest with other fields of its first part."""
    edge = unseal(store.get(at), Manifest, key=at).edge
    part = replace(edge.parts[0], **changes)
    return {"edge": replace(edge, parts=(part, *edge.parts[1:]))}


def forge_record(store: MemoryStore) -> None:
    key = edge_key(4, "anchor", None)
    record = unseal(store.get(key), EdgeRecord, key=key)
    part = replace(record.edge.parts[0], blake3="0" * 64)
    store.put(key, seal(replace(record, edge=replace(record.edge, parts=(part,)))))


def flip(store: MemoryStore, prefix: str) -> None:
    """Flip a bit in the middle of an object."""
    key = next(info.key for info in store.list(prefix))
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


KEY = manifest_key(AT)
FORGERIES: dict[str, tuple[Callable[[MemoryStore], object], type[DeltaChainError], int]] = {
    "payload": (
        lambda store: flip(store, f"deltas/{AT:020d}"),
        DigestMismatchError,
        AT,
    ),
    "payload of another length": (
        lambda store: store.put(next(i.key for i in store.list(f"deltas/{AT:020d}")), b"short"),
        MalformedError,
        AT,
    ),
    "manifest, a flipped bit": (lambda store: flip(store, KEY), FormatError, AT),
    "manifest that is another's": (
        lambda store: store.put(KEY, store.get(manifest_key(3))),
        MalformedError,
        AT,
    ),
    "manifest, sealed again": (lambda store: forge(store, KEY, step=99), ForkedChainError, AT + 1),
    "parent": (lambda store: forge(store, KEY, parent="0" * 64), ForkedChainError, AT),
    "chain": (lambda store: forge(store, KEY, chain="another"), ChainMismatchError, AT),
    "base state": (lambda store: forge(store, KEY, base_state="0" * 32), MalformedError, AT),
    "key of the hint as a part": (
        lambda store: forge(store, KEY, **edge_with(store, KEY, key=HEAD_KEY)),
        MalformedError,
        AT,
    ),
    "part of another version": (
        lambda store: forge(
            store,
            KEY,
            **edge_with(store, KEY, key=f"deltas/{3:020d}-00000000-{'a' * 32}/00000.safetensors"),
        ),
        MalformedError,
        AT,
    ),
    "digest of a part": (
        lambda store: forge(store, KEY, **edge_with(store, KEY, blake3="0" * 64)),
        DigestMismatchError,
        AT,
    ),
    "anchor": (lambda store: flip(store, f"anchors/{4:020d}"), DigestMismatchError, AT),
    "edge record": (forge_record, DigestMismatchError, AT),
    "edge record, a flipped bit": (
        lambda store: flip(store, f"edges/{4:020d}"),
        FormatError,
        AT,
    ),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_nothing_past_a_forgery_is_copied(pair: Pair, what: str) -> None:
    pair.grow(9)
    true = copy_of(pair.source)
    act, error, at = FORGERIES[what]
    act(pair.source)
    mirror = pair.mirror()
    for _ in range(3):
        with pytest.raises(error):
            list(mirror.catch_up())
    with pytest.raises(error):
        pair.copy()
    found = copy_of(pair.there)
    assert manifest_key(AT - 1) in found
    assert manifest_key(at) not in found
    assert not any((version_of(key) or 0) > at for key in found)
    assert HEAD_KEY not in found
    if at == AT:
        assert all(true[key] == data for key, data in found.items() if key != MIRROR_KEY)
        recompute(pair.there)
        for key, data in true.items():  # put back: the mirror goes on
            pair.source.put(key, data)
        pair.copy()
        found = copy_of(pair.there)
        found.pop(MIRROR_KEY)
        assert found == true


@pytest.mark.parametrize("key", [CHAIN_KEY, TABLE_KEY])
def test_a_forged_identity_is_not_copied(pair: Pair, key: str) -> None:
    pair.grow(2)
    document = json.loads(pair.source.get(key))
    document["unknown" if key == CHAIN_KEY else "ext"] = {"forged": 1}
    pair.source.put(key, json.dumps(document).encode())
    with pytest.raises(FormatError):
        pair.copy()
    assert copy_of(pair.there) == {}


def test_a_forged_asset_ends_the_copy(pair: Pair) -> None:
    pair.grow(2)
    flip(pair.source, "assets/")
    with pytest.raises(DigestMismatchError):
        pair.copy()
    assert copy_of(pair.there).keys() == {MIRROR_KEY, TABLE_KEY}


def test_a_bit_that_flips_in_transit_is_read_again(pair: Pair) -> None:
    pair.grow(6)
    faulty = FaultyStore(
        pair.source,
        Fault("corrupt", f"deltas/{3:020d}"),
        Fault("corrupt", manifest_key(2)),
        Fault("corrupt", "edges/"),
    )
    list(Mirror(faulty, pair.there).catch_up())
    assert len(faulty.struck) == 3
    pair.check()


def test_a_forged_hint_misleads_nobody(pair: Pair) -> None:
    pair.grow(6)
    pair.source.put(HEAD_KEY, b"nonsense")
    pair.copy()
    found = copy_of(pair.there)
    assert HEAD_KEY not in found
    assert found.keys() - {MIRROR_KEY} == copy_of(pair.source).keys() - {HEAD_KEY}


def test_a_forged_head_far_ahead_takes_no_memory(pair: Pair) -> None:
    """All before the gap is copied, and what is committed once the forgery is gone."""
    pair.grow(3)
    far = 3_000_000
    forged = unseal(pair.source.get(manifest_key(0)), Manifest, key=manifest_key(0))
    pair.source.put(manifest_key(far), seal(replace(forged, version=far)))
    pair.source.put(HEAD_KEY, dump(Head(version=far)))
    mirror = pair.mirror()
    tracemalloc.start()
    with pytest.raises(BrokenChainError, match="manifest of version 4 is missing"):
        list(mirror.catch_up())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mirror.version == 3
    assert most < 20 << 20
    pair.source.delete(manifest_key(far))
    pair.source.delete(HEAD_KEY)
    pair.grow(2)
    list(mirror.catch_up())
    assert mirror.version == 6


def test_a_lost_manifest_is_named(pair: Pair) -> None:
    pair.grow(6)
    pair.source.delete(KEY)
    with pytest.raises(BrokenChainError, match="manifest of version 5 is missing"):
        pair.copy()
    assert manifest_key(4) in copy_of(pair.there)


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
    with pytest.raises(StoreWentBackError, match="the source went back"):
        pair.copy()
    assert copy_of(pair.there) == before


@pytest.mark.parametrize("more", [0, 3])
def test_a_source_with_another_history_is_named(pair: Pair, more: int) -> None:
    pair.grow(3)
    pair.copy()
    before = copy_of(pair.there)
    forge(pair.source, manifest_key(3), step=1000)
    for _ in range(more):
        pair.grow(1)
    with pytest.raises(ForkedChainError, match="version 3"):
        pair.copy()
    assert copy_of(pair.there) == before


def test_a_mirror_with_another_document_is_left_as_it_is(pair: Pair) -> None:
    pair.grow(3)
    mirror = pair.mirror()
    list(mirror.catch_up())
    pair.grow(3)
    pair.there.put(manifest_key(5), b"{}")
    with pytest.raises(ForkedChainError, match="has another manifests/"):
        list(mirror.catch_up())
    assert pair.there.get(manifest_key(5)) == b"{}"
    assert mirror.version == 4
