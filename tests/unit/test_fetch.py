from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deltachain.chain import fetch as fetch_module
from deltachain.chain import fetch as part_fetch
from deltachain.chain.chain import Chain
from deltachain.chain.fetch import Arrival, fetch, fetching, open_base
from deltachain.codec import Part
from deltachain.codec.frames import FRAME
from deltachain.errors import (
    ConfigError,
    DigestMismatchError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
)
from deltachain.format.documents import BaseRef, ObjectRef
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.store.file import FileStore
from deltachain.subscribe import Subscriber
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel, bits_of, plain_model, same, tensors_of


@pytest.mark.parametrize("path", ["a" * 5000, "/not/there", "a\0b", "/dev/null", "/dev/zero"])
def test_a_base_at_a_path_that_can_not_be_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"base checkpoint|no safetensors"):
        open_base(BaseRef(path=path), Path(path))


def test_a_base_path_that_a_store_names_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to the store would choose what is opened and hashed here."""
    save_file(plain_model().state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr(fetch_module, "Checkpoint", pytest.fail)
    with pytest.raises(ConfigError, match="no folder of it was given") as caught:
        open_base(BaseRef(path=str(tmp_path)), None)
    assert "--base" in caught.value.hint


def test_a_part_that_is_gone_is_named_with_a_way_out() -> None:
    store = MemoryStore()
    with Publisher(PublishConfig(url=store.url), store=store).attach(plain_model()):
        chain = Chain.open(store)
        head = chain.read(0)
        (part,) = head.manifest.edge.parts
        store.delete(part.key)
        with pytest.raises(
            ObjectNotFoundError, match=r"restore it, .*, or restart the publisher"
        ) as lost:
            fetch(chain, chain.plan(None, head))
        assert lost.value.key == part.key


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """One version in a folder, whose anchor has two parts that count as large."""
    monkeypatch.setattr(part_fetch, "LARGE", 0)
    monkeypatch.setattr(part_fetch, "PIECE", 1000)
    store = FaultyStore(FileStore(tmp_path / "chain"))
    config = PublishConfig(url=store.url, part_nbytes=1 << 16)
    Publisher(config, store=store).attach(TinyModel(width=256)).close()
    chain = Chain.open(store)
    assert len(parts_of(chain)) > 1
    return chain


def parts_of(chain: Chain) -> tuple[ObjectRef, ...]:
    return chain.read(0).manifest.edge.parts


def faults_of(chain: Chain) -> FaultyStore:
    assert isinstance(chain.store, FaultyStore)
    return chain.store


def decoded(chain: Chain, *, hold: bool) -> dict[str, bytes]:
    with fetching(chain, chain.plan(None, chain.read(0)), hold=hold) as fetched:
        return {name: fetched.read(name).values.tobytes() for name in fetched.arriving()}


def test_an_object_that_is_corrupt_once_is_verified_again_without_being_held(chain: Chain) -> None:
    expected, last = decoded(chain, hold=True), parts_of(chain)[-1].key
    faults_of(chain).add(Fault("corrupt", last))
    with fetching(chain, chain.plan(None, chain.read(0)), hold=False) as fetched:
        found = {name: fetched.read(name).values.tobytes() for name in fetched.arriving()}
    assert fetched.refetched == (last,)
    assert found == expected


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: data[:-1], MalformedError),
        (lambda data: data + b"\0", MalformedError),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), DigestMismatchError),
        (lambda _: None, ObjectNotFoundError),
    ],
    ids=["short", "long", "corrupt", "gone"],
)
def test_an_object_is_refused_as_if_it_were_held(
    chain: Chain, damage: Callable[[bytes], bytes | None], error: type[Exception]
) -> None:
    key = parts_of(chain)[0].key
    data = damage(chain.store.get(key))
    chain.store.delete(key)
    if data is not None:
        chain.store.put(key, data)
    for hold in (True, False):
        with pytest.raises(error) as caught:
            decoded(chain, hold=hold)
        assert getattr(caught.value, "key", "") == key


def test_damage_at_any_read_is_found_before_anything_is_written(chain: Chain) -> None:
    store, model = faults_of(chain), TinyModel(width=256)
    results: list[bool] = []
    while len(results) == len(store.struck):
        store.add(Fault("corrupt", "anchors/", nth=1 + 7 * len(results)))
        live = tensors_of(model)
        before = bits_of(live)
        try:
            Subscriber(store.url, live, store=store).update()
        except FormatError:
            results.append(False)
            assert same(bits_of(live), before)
        else:
            results.append(True)
            assert same(bits_of(live), bits_of(model))
        store.mend()
    assert set(results) == {False, True}


def test_a_newcomer_needs_memory_for_its_tensors_not_for_objects_in_a_folder(
    tmp_path: Path,
) -> None:
    store = FileStore(tmp_path)
    weights = torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    torch.nn.init.normal_(weights.weight)
    Publisher(PublishConfig(url=store.url), store=store).attach(weights, assets={}).close()
    (part,) = parts_of(Chain.open(store))
    assert part.nbytes > part_fetch.LARGE
    live = {"weight": torch.zeros_like(weights.weight)}
    tracemalloc.start()
    try:
        Subscriber(store.url, live).update()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(live["weight"].view(torch.int16), weights.weight.view(torch.int16))
    once = 16 * FRAME  # by each thread, never written: see `frames._ThreadState`
    assert peak < weights.weight.nbytes + once + part.nbytes // 2


def test_tensors_of_an_anchor_come_with_their_objects(chain: Chain) -> None:
    with fetching(chain, chain.plan(None, chain.read(0))) as there:
        parts = there.parts
    on_the_way = [Future[Part]() for _ in parts]
    arrivals = [Arrival(a.ref, 0, f) for a, f in zip(there.arrivals, on_the_way, strict=True)]
    fetched = replace(there, arrivals=tuple(arrivals), early={})
    names = fetched.arriving()
    seen: list[str] = []
    for part, future in zip(parts, on_the_way, strict=True):
        future.set_result(part)
        for name in part.rows:
            seen.append(next(names))
            assert fetched.read(name).is_dense
    assert next(names, None) is None
    assert sorted(seen) == sorted(there.specs)
    assert list(fetched.arriving()) == seen
