"""Parts are encoded while others are uploaded: in order, bounded, and all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from typing_extensions import override

from deltachain.chain.upload import (
    PARTS_ON_THE_WAY,
    SMALL_PART_NBYTES,
    UPLOADS,
    EdgeKeys,
    EdgeUpload,
    anchor_part_nbytes,
)
from deltachain.codec import Part
from deltachain.errors import StoreUnavailableError
from deltachain.publish.wire_form import dense_change
from deltachain.store import MemoryStore
from deltachain.types import Bits, Buffer, TensorSpec

KEYS = EdgeKeys(kind="anchor", version=0, epoch=0, commit_id="0" * 32)
NUMEL = 300_000


class WatchedStore(MemoryStore):
    """Counts puts at a time; calls back before each."""

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._before, self._counting = before, threading.Lock()
        self.now = self.most = 0

    @override
    def put(self, key: str, data: Buffer) -> str:
        with self._counting:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self._before(key)
            return super().put(key, data)
        finally:
            with self._counting:
                self.now -= 1


def tensors(count: int) -> list[tuple[TensorSpec, Bits]]:
    rng = np.random.default_rng(0)
    return [
        (TensorSpec(f"w{n:02}", "BF16", (NUMEL,)), rng.integers(0, 1 << 16, NUMEL, np.uint16))
        for n in range(count)
    ]


def upload_to(store: MemoryStore) -> EdgeUpload:
    return EdgeUpload(store, KEYS, raw=False, part_nbytes=4 * NUMEL)


def test_parts_are_in_the_order_of_their_tensors_whatever_arrives_first() -> None:
    late = threading.Event()

    def before(key: str) -> None:
        if key.endswith("00000.safetensors"):
            assert late.wait(60)
        elif key.endswith("00003.safetensors"):
            late.set()

    store, made = WatchedStore(before), tensors(9)
    with upload_to(store) as upload:
        for spec, bits in made:
            upload.add(dense_change(spec, bits))
        edge = upload.finish()
    assert [ref.key[-17:-12] for ref in edge.parts] == [f"{n:05}" for n in range(5)]
    assert edge.encodings == ("dense",)
    found: dict[str, Bits] = {}
    for ref in edge.parts:
        part = Part.from_bytes(bytes(store.get(ref.key)))
        found |= {name: part.read(name).values for name in part.rows}
    assert list(found) == [spec.name for spec, _ in made]
    for spec, bits in made:
        np.testing.assert_array_equal(found[spec.name], bits)


def test_memory_is_bounded_while_the_store_stands_still() -> None:
    go, store = threading.Event(), WatchedStore(lambda _: _wait(go))
    added: list[str] = []

    def add_all() -> None:
        with upload_to(store) as upload:
            for spec, bits in tensors(20):
                upload.add(dense_change(spec, bits))
                added.append(spec.name)
            upload.finish()

    thread = threading.Thread(target=add_all)
    thread.start()
    thread.join(2.0)
    assert thread.is_alive()
    assert len(added) <= 2 * (PARTS_ON_THE_WAY + 1)
    go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(added) == 20
    assert store.most == UPLOADS


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


@pytest.mark.parametrize("number", [0, 2, 4])
def test_the_first_failure_is_raised_and_later_parts_are_not_put(number: int) -> None:
    def before(key: str) -> None:
        if key.endswith(f"{number:05}.safetensors"):
            raise StoreUnavailableError("the store is down")

    store = WatchedStore(before)

    def add_all() -> None:
        with upload_to(store) as upload:
            for spec, bits in tensors(40):
                upload.add(dense_change(spec, bits))
            upload.finish()

    with pytest.raises(StoreUnavailableError, match="down"):
        add_all()
    assert len(list(store.list("anchors/"))) <= number + PARTS_ON_THE_WAY
    assert store.now == 0


def test_an_interrupted_caller_abandons_parts() -> None:
    store = WatchedStore()

    def add_some() -> None:
        with upload_to(store) as upload:
            for number, (spec, bits) in enumerate(tensors(20)):
                upload.add(dense_change(spec, bits))
                if number == 10:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_some()
    assert len(list(store.list("anchors/"))) <= 5
    assert not [t for t in threading.enumerate() if t.name.startswith("deltachain-upload")]


def test_parts_of_anchors_follow_the_size_of_the_model() -> None:
    assert anchor_part_nbytes(1 << 20, 512 << 20) == SMALL_PART_NBYTES
    assert anchor_part_nbytes(16 << 30, 512 << 20) == 512 << 20
    assert anchor_part_nbytes(4 << 30, 512 << 20) == 256 << 20
    assert anchor_part_nbytes(16 << 30, 1000) == 1000
