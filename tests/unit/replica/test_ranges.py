"""What a host fetches of an object: the ranges that its ranks hold, where that is less."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deltachain.codec import Change, encode_part
from deltachain.delta import TensorDelta
from deltachain.errors import ApplyError, DigestMismatchError, ObjectNotFoundError
from deltachain.format.documents import ObjectRef
from deltachain.replica import fetcher
from deltachain.replica.layout.classes import Classified, TensorClass
from deltachain.replica.spool import Spool, SpooledObject, SpoolIndex
from deltachain.replica.spool_reader import SpoolReader
from deltachain.store import MemoryStore
from deltachain.types import Buffer, StateDigest, TensorSpec


class CountedStore(MemoryStore):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.damages = 0

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        self.nbytes += nbytes
        return super().read(key, nbytes=nbytes, pin=pin)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.nbytes += length
        data = bytearray(super().get_range(key, start, length))
        if self.damages and start:
            self.damages -= 1
            data[-1] ^= 1
        return bytes(data)


def large_part(store: MemoryStore) -> tuple[ObjectRef, Sequence[TensorDelta]]:
    """An object of four large tensors in a store."""
    rng = np.random.default_rng(0)
    deltas = []
    for number in range(4):
        indices = np.flatnonzero(rng.random(1 << 22) < 0.3)
        values = rng.integers(1, 60_000, indices.size).astype(np.uint16)
        spec = TensorSpec(f"w{number}", "BF16", (1 << 22,))
        deltas.append(TensorDelta(spec=spec, indices=indices, values=values))
    part = encode_part(Change(delta, StateDigest()) for delta in deltas)
    store.put("deltas/x", part.data)
    ref = ObjectRef(
        key="deltas/x", nbytes=len(part.data), blake3=part.digest, directory=part.directory
    )
    return ref, deltas


@pytest.mark.parametrize("damages", [0, 1])
def test_a_host_fetches_the_ranges_that_its_ranks_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damages: int
) -> None:
    store = CountedStore()
    ref, deltas = large_part(store)
    store.damages = damages
    monkeypatch.setattr(fetcher, "open_store", lambda _: store)
    index = SpoolIndex(objects=(SpooledObject(ref=ref, edge=0),))
    spool = Spool.create(tmp_path, index)
    wanted = {"w1": (0, 1 << 22), "w2": (1 << 20, 2 << 20), "another": (0, 5)}
    fetcher.fill(spool, index, store.url, wanted)
    plans = {one.spec.name: one for one in SpoolReader(spool.folder).tensor_plans()}
    for name, (low, high) in list(wanted.items())[:2]:
        given = deltas[int(name[1])]
        assert given.indices is not None
        found = plans[name].read(low, high)
        assert found.indices is not None
        near = (given.indices >= low) & (given.indices < high)
        np.testing.assert_array_equal(found.indices, given.indices[near])
        np.testing.assert_array_equal(found.values, given.values[near])
    if damages:  # a range that was corrupt once: the whole object, proven by its digest
        assert store.nbytes > ref.nbytes
    else:
        assert store.nbytes < 0.6 * ref.nbytes
        with pytest.raises(DigestMismatchError):
            plans["w3"].read(0, 1 << 22)


def test_what_a_host_reads_is_the_hull_of_its_ranks_windows() -> None:
    specs = {n: TensorSpec(n, "BF16", (100, 10)) for n in ("a", "b", "c", "d")}
    ranks = [
        {
            "a": Classified(kind="in_place", windows=((100, (20, 5), (10, 1)),)),
            "b": Classified(kind="loaded"),
            "c": Classified(kind="absent"),
            "d": Classified(kind="unused"),
        },
        {
            "a": Classified(kind="in_place", windows=((400, (50,), (1,)),)),
            "b": Classified(kind="absent"),
            "c": Classified(kind="absent"),
            "d": Classified(kind="unused"),
        },
    ]
    classes: dict[str, TensorClass] = {"a": "in_place", "b": "loaded", "c": "in_place"}
    assert fetcher.wanted_by(ranks, classes, specs) == {"a": (100, 450), "b": (0, 1000)}
    assert fetcher.wanted_by(ranks, classes, {n: specs[n] for n in ("a", "b")}) == {
        "a": (100, 450),
        "b": (0, 1000),
    }
    only_b = [{"b": rank["b"]} for rank in ranks]
    assert fetcher.wanted_by(only_b, classes, {"b": specs["b"]}) == {}


def test_a_fetch_ends_with_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountedStore()
    ref, _ = large_part(store)
    refs = [msgspec.structs.replace(ref, key="deltas/missing"), *[ref] * 60]
    index = SpoolIndex(objects=tuple(SpooledObject(ref=one, edge=0) for one in refs))
    monkeypatch.setattr(fetcher, "open_store", lambda _: store)
    spool = Spool.create(tmp_path, index)
    with pytest.raises(ObjectNotFoundError):
        fetcher.fill(spool, index, store.url)
    assert store.nbytes < 30 * ref.nbytes
    with pytest.raises(ApplyError, match="was not fetched"):
        list(SpoolReader(spool.folder).tensor_plans())
