"""Work that is handed over is done, whether or not there is a thread for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Barrier, Event

import pytest

from deltachain.control.fleet import Fleet
from deltachain.errors import StoreUnavailableError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import Subscriber
from deltachain.threads import Pool
from tests.support.engine import Sharding
from tests.support.models import TinyModel, bits_of, replica_of, same, train_
from tests.support.seaweed import Seaweed
from tests.unit.control.replicas import app_of, followed, leader_of, served
from tests.unit.replica.replicas import Followed


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


@pytest.fixture
def no_threads() -> Iterator[None]:
    with threads_used_up():
        yield


def test_work_is_done_side_by_side() -> None:
    barrier = Barrier(4, timeout=30)
    with Pool(4) as pool:
        assert sorted(pool.map(lambda n: (barrier.wait(), n)[1], range(4))) == [0, 1, 2, 3]


def test_threads_end_with_the_pool() -> None:
    before, release = threading.active_count(), Event()
    with Pool(3) as pool:
        futures = [pool.submit(release.wait, 30) for _ in range(9)]
        assert threading.active_count() == before + 3
        release.set()
    assert threading.active_count() == before
    assert all(future.result() for future in futures)
    pool.shutdown()


@pytest.mark.usefixtures("no_threads")
def test_without_threads_the_caller_works() -> None:
    caller = threading.get_ident()
    with Pool(4) as pool:
        assert set(pool.map(lambda _: threading.get_ident(), range(9))) == {caller}
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0).result()


@pytest.mark.usefixtures("no_threads")
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


def test_s3_reads_and_writes_without_threads(s3_url: Callable[[], str], seaweed: Seaweed) -> None:
    store = open_store(s3_url(), {**seaweed.options, "deadline_s": 5})
    large = bytes(range(256)) * (12 << 12)  # two ranges
    with threads_used_up():
        store.put("large", large)
        assert store.read("large", nbytes=len(large)) == large
        assert set(store.find_all(["large", "absent"])) == {"large"}
        with pytest.raises(StoreUnavailableError):  # boto3 has no other way for its parts
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


def test_results_come_in_order_and_only_a_few_calls_are_ahead() -> None:
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


def test_an_ordered_call_that_fails_raises_in_its_turn() -> None:
    with Pool(2) as pool:
        results = pool.ordered(lambda number: 1 // number, [1, 0, 1], ahead=2)
        assert next(results) == 1
        with pytest.raises(ZeroDivisionError):
            next(results)
