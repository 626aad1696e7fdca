import errno
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain import errors
from deltachain.chain import fetch as fetch_module
from deltachain.chain.chain import Chain
from deltachain.chain.fetch import Arrival, fetching, open_base
from deltachain.codec import Part
from deltachain.codec.frames import FRAME
from deltachain.control.announce import Fleet
from deltachain.format.documents import BaseRef, ObjectRef
from deltachain.format.keys import CHAIN_KEY, TABLE_KEY, manifest_key
from deltachain.publish import PublishConfig, Publisher
from deltachain.retry import SLOWEST, Backoff, Deadline, shortly_after
from deltachain.store import Capabilities, MemoryStore, Store, open_store
from deltachain.store.file import FileStore
from deltachain.subscribe import Subscriber
from deltachain.threads import Pool
from tests.support.engine import Sharding
from tests.support.faults import Fault, FaultyStore
from tests.support.fetch import fetch
from tests.support.models import (
    TinyModel,
    bits_of,
    plain_model,
    replica_of,
    same,
    tensors_of,
    train_,
)
from tests.support.seaweed import Seaweed
from tests.unit.control.replicas import app_of, followed, leader_of, served
from tests.unit.manifest_chains import SingleWriterStore, WideStore, create, extend
from tests.unit.replica.replicas import Followed

KEYS = [CHAIN_KEY, TABLE_KEY, manifest_key(1)]


class WithoutRanges(FaultyStore):
    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, cheap_ranges=False)

    def read(self, key: str, *, nbytes: int, pin: str = "") -> bytes:
        assert nbytes <= fetch_module.LARGE
        return super().read(key, nbytes=nbytes, pin=pin)


class Flipping(FaultyStore):
    """Flips one bit of one object, the first times that it is read."""

    def __init__(self, inner: MemoryStore, key: str, bit: int, times: int) -> None:
        super().__init__(inner)
        self.key, self.bit, self.times = key, bit, times

    def get(self, key: str, **limits: Any) -> bytes:
        return self._flip(key, super().get(key, **limits))

    def read(self, key: str, *, nbytes: int, pin: str = "") -> bytes:
        return self._flip(key, super().read(key, nbytes=nbytes, pin=pin))

    def _flip(self, key: str, data: bytes) -> bytes:
        if key != self.key or not self.times:
            return data
        self.times -= 1
        flipped = bytearray(data)
        flipped[self.bit // 8 % len(data)] ^= 1 << self.bit % 8
        return bytes(flipped)


@pytest.mark.parametrize("store", [MemoryStore, SingleWriterStore, WideStore])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("bit", [5, 8 * 10 + 1, 8 * 12 + 6])
def test_a_bit_that_flips_once_is_of_no_consequence(
    store: type[MemoryStore], key: str, bit: int
) -> None:
    """The first bit breaks the syntax, the second the digest or a name, the third a number."""
    inner = store()
    made = extend(create(inner), 3)
    assert Chain.open(Flipping(inner, key, bit, 1)).read(1) == made[1]


@pytest.mark.parametrize("key", KEYS)
def test_an_object_that_stays_corrupt_is_refused(key: str) -> None:
    inner = MemoryStore()
    extend(create(inner), 3)
    with pytest.raises(errors.FormatError) as caught:
        Chain.open(Flipping(inner, key, 5, 1000)).read(1)
    assert isinstance(caught.value, errors.DeltaChainError)
    assert key in str(caught.value)


@contextmanager
def threads_used_up() -> Iterator[None]:
    """No thread can be started: none has room for a stack of this size."""
    threading.stack_size(1 << 46)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(0)


def test_work_is_done_side_by_side_by_threads_that_end_with_the_pool() -> None:
    before, release, barrier = threading.active_count(), Event(), Barrier(3, timeout=30)
    with Pool(3) as pool:
        assert sorted(pool.map(lambda n: (barrier.wait(), n)[1], range(3))) == [0, 1, 2]
        futures = [pool.submit(release.wait, 30) for _ in range(9)]
        assert threading.active_count() == before + 3
        release.set()
    assert threading.active_count() == before
    assert all(future.result() for future in futures)
    pool.shutdown()


@threads_used_up()
def test_without_threads_the_caller_works() -> None:
    caller = threading.get_ident()
    with Pool(4) as pool:
        assert set(pool.map(lambda _: threading.get_ident(), range(9))) == {caller}
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0).result()


@threads_used_up()
@pytest.mark.parametrize("kind", ["dict", "folder"])
def test_versions_are_published_and_followed_without_threads(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, store = TinyModel(), MemoryStore()
    replica = replica_of(TinyModel(), kind, tmp_path_factory.mktemp("mirror"))
    with Publisher(PublishConfig(url=store.url, part_nbytes=64), store=store) as publisher:
        publisher.attach(model)
        follower = Subscriber(store.url, replica.target, store=store)
        follower.update()
        for seed in (1, 2):
            train_(model, seed, share=0.05)
            publisher.publish(step=seed).result()
        stop = Event()
        for receipt in follower.follow(stop=stop):
            if receipt.version == 2:
                stop.set()
    assert same(replica.bits(), bits_of(model))


@pytest.mark.full
def test_s3_reads_and_writes_without_threads(s3_url: Callable[[], str], seaweed: Seaweed) -> None:
    store = open_store(s3_url(), {**seaweed.options, "deadline_s": 5})
    large = bytes(range(256)) * (12 << 12)  # two ranges
    with threads_used_up():
        store.put("large", large)
        assert store.read("large", nbytes=len(large)) == large
        assert set(store.find_all(["large", "absent"])) == {"large"}
        with pytest.raises(errors.StoreUnavailableError):  # boto3 has no other way for its parts
            store.put("larger", 2 * large)
    store.close()


def test_a_rank_stages_without_threads(tmp_path: Path) -> None:
    here = Followed(Sharding(tp=2), tmp_path)
    try:
        here.publish(1)
        with threads_used_up():
            here.subscribe().update()
        assert here.holds(1)
    finally:
        here.close()


def test_a_fleet_without_threads_says_so_and_tells_all_once_there_are_some(tmp_path: Path) -> None:
    with ExitStack() as stack:
        here = stack.enter_context(contextmanager(followed)(tmp_path))
        leader = stack.enter_context(contextmanager(leader_of)(here))
        url = stack.enter_context(served(app_of(leader, is_open=True)))
        with threads_used_up():
            fleet = Fleet([url])
            announced = fleet.announce(1, deadline=0.1)
        assert announced.stragglers == (url,)
        assert "cannot start another thread" in announced.trouble[url]
        assert fleet.announce(1).enough
        fleet.close()
        fleet.close()


def test_results_and_errors_come_in_order_and_only_a_few_calls_are_ahead() -> None:
    began: list[int] = []
    caller = threading.get_ident()

    def work(number: int) -> tuple[int, bool]:
        began.append(number)
        return number, threading.get_ident() == caller

    with Pool(2) as pool:
        results = pool.ordered(work, range(9), ahead=3, small=lambda number: number % 2 == 0)
        for expected in range(9):
            assert next(results) == (expected, expected % 2 == 0)
            assert max(began) <= expected + 3
        assert next(results, None) is None
        failing = pool.ordered(lambda number: 1 // number, [1, 0, 1], ahead=2)
        assert next(failing) == 1
        with pytest.raises(ZeroDivisionError):
            next(failing)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one element is the time; sleeping takes none but that."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return now


def test_it_ends_once_nothing_moved_for_long(clock: list[float]) -> None:
    deadline = Deadline("a", "s3://b", 10, 100 * SLOWEST)
    for _ in range(5):
        clock[0] += 9
        deadline.moved()
    clock[0] += 11
    assert deadline.left_s < 0
    assert not deadline.pause(0)
    with pytest.raises(TimeoutError):
        deadline.moved()
    error = deadline.error("too slow")
    assert (error.key, error.url) == ("a", "s3://b")
    assert "given up after 56.0 s" in str(error)


def test_it_ends_though_bytes_move_if_they_are_too_few(clock: list[float]) -> None:
    deadline = Deadline("a", "s3://b", 10, 5 * SLOWEST)
    clock[0] += 9
    deadline.moved()
    clock[0] += 5.5
    deadline.moved()
    clock[0] += 1
    with pytest.raises(TimeoutError, match="too slow"):
        deadline.moved()


def test_pauses_fit_what_is_left(clock: list[float]) -> None:
    deadline = Deadline("a", "s3://b", 7)
    assert deadline.pause(5)
    assert deadline.pause(5)
    assert clock[0] == 1007
    assert not deadline.pause(5)
    assert clock[0] == 1007
    deadline = Deadline("a", "hf://b", 7)
    assert deadline.pause(1.0, 5.0)
    assert not deadline.pause(1.0, 3.0)  # does not fit, and is not begun
    assert clock[0] == 1012


@pytest.mark.parametrize("share", [1.0, 0.5, 0.4])
def test_pauses_are_drawn_from_a_range_that_doubles_up_to_a_bound(share: float) -> None:
    pauses = Backoff(0.1, 5.0, random_share=share)
    for failures, longest in ((0, 0.1), (1, 0.2), (3, 0.8), (10, 5.0), (10_000, 5.0)):
        least = longest * (1 - share)
        drawn = [pauses.pause_s(failures) for _ in range(2000)]
        assert least <= min(drawn) < least + 0.1 * longest
        assert longest - 0.1 * longest * share < max(drawn) <= longest


def test_callers_that_wait_for_one_moment_come_apart_without_the_trainers_draws() -> None:
    before = random.getstate()
    drawn = [shortly_after(10.0) for _ in range(2000)]
    assert random.getstate() == before
    assert 10 < min(drawn) < 10.2
    assert 10.4 < max(drawn) < 10.7


@pytest.mark.parametrize("path", ["a" * 5000, "/not/there", "a\0b", "/dev/null", "/dev/zero"])
def test_a_base_at_a_path_that_can_not_be_is_refused(path: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"base checkpoint|no safetensors"):
        open_base(BaseRef(path=path), Path(path))


def test_a_base_path_that_a_store_names_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to the store would choose what is opened and hashed here."""
    save_file(plain_model().state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr(fetch_module, "Checkpoint", pytest.fail)
    with pytest.raises(errors.ConfigError, match="no folder of it was given") as caught:
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
            errors.ObjectNotFoundError, match="restore it from a backup, or restart the publisher"
        ) as lost:
            fetch(chain, chain.plan(None, head))
        assert lost.value.key == part.key


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """One version in a folder, whose anchor has two parts that count as large."""
    monkeypatch.setattr(fetch_module, "LARGE", 0)
    monkeypatch.setattr(fetch_module, "PIECE", 1000)
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


def decoded(chain: Chain, *, hold: bool, room: Path | None = None) -> dict[str, bytes]:
    with fetching(chain, chain.plan(None, chain.read(0)), hold=hold, room=room) as fetched:
        assert room is None or not [*room.iterdir()]  # a killed process leaves nothing
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
        (lambda data: data[:-1], errors.MalformedError),
        (lambda data: data + b"\0", errors.MalformedError),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), errors.DigestMismatchError),
        (lambda _: None, errors.ObjectNotFoundError),
    ],
    ids=["short", "long", "corrupt", "gone"],
)
def test_an_object_is_refused_as_if_it_were_held(
    chain: Chain, damage: Callable[[bytes], bytes | None], error: type[Exception], tmp_path: Path
) -> None:
    key = parts_of(chain)[0].key
    data = damage(chain.store.get(key))
    chain.store.delete(key)
    if data is not None:
        chain.store.put(key, data)
    room = tmp_path / "room"
    room.mkdir()
    for hold, where in ((True, None), (False, None), (True, room)):
        with pytest.raises(error) as caught:
            decoded(chain, hold=hold, room=where)
        assert getattr(caught.value, "key", "") == key
        assert not [*room.iterdir()]


def test_objects_on_their_way_to_a_folder_are_held_in_files_while_there_is_room(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then in memory: a disk that fills, or is read-only, is no reason to fail here."""
    held: list[str] = []
    read = fetch_module._held

    def hold(store: Store, ref: ObjectRef) -> Part:
        held.append(ref.key)
        return read(store, ref)

    monkeypatch.setattr(fetch_module, "_held", hold)
    monkeypatch.setattr(fetch_module, "RANGE", 1000)
    room, expected = tmp_path / "room", decoded(chain, hold=False)
    room.mkdir()
    assert decoded(chain, hold=True, room=room) == expected
    assert not held
    full = OSError(errno.ENOSPC, "full")

    def fill(*_: object) -> int:
        raise full

    numel = sum(spec.nbytes for spec in chain.table.specs())
    free = SimpleNamespace(f_bfree=numel, f_bavail=numel, f_frsize=1)
    for module, name, substitute in ((os, "pwrite", fill), (os, "statvfs", lambda _: free)):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, substitute)
            assert decoded(chain, hold=True, room=room) == expected
        assert sorted(held) == sorted(part.key for part in parts_of(chain))
        held.clear()


def test_a_folder_is_filled_without_memory_for_large_objects(tmp_path: Path) -> None:
    """Of a store without cheap ranges, too, and for deltas."""
    store = WithoutRanges(FileStore(tmp_path / "chain"))
    weights = torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    torch.nn.init.normal_(weights.weight)
    with Publisher(PublishConfig(url=store.url), store=store).attach(
        weights, assets={}
    ) as publisher:
        torch.nn.init.normal_(weights.weight)
        publisher.publish().result()
    parts = [Chain.open(store).read(version).manifest.edge.parts[0] for version in range(2)]
    assert min(part.nbytes for part in parts) > fetch_module.LARGE
    with closing(Subscriber(store.url, tmp_path / "out", store=store)) as subscriber:
        for version in range(2):
            subscriber.update(version)
    found = load_file(tmp_path / "out" / "model.safetensors")["weight"]
    assert torch.equal(found.view(torch.int16), weights.weight.view(torch.int16))


@pytest.mark.full
def test_damage_at_any_read_is_found_before_anything_is_written(chain: Chain) -> None:
    store, model = faults_of(chain), TinyModel(width=256)
    results: list[bool] = []
    while len(results) == len(store.struck):
        store.add(Fault("corrupt", "anchors/", nth=1 + 7 * len(results)))
        live = tensors_of(model)
        before = bits_of(live)
        try:
            Subscriber(store.url, live, store=store).update()
        except errors.FormatError:
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
    assert part.nbytes > fetch_module.LARGE
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
