"""Work that is handed over is done, whether or not there is a thread for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from threading import Barrier, Event

import pytest

from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.testing.models import TinyModel, bits_of, replica_of, same, train_
from deltachain.threads import Pool


@pytest.fixture
def no_threads() -> Iterator[None]:
    """No thread can be started: none has room for a stack of this size."""
    threading.stack_size(1 << 46)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=print).start()
    yield
    threading.stack_size(0)


def test_work_is_done_side_by_side() -> None:
    barrier = Barrier(4, timeout=30)
    with Pool(4) as pool:
        assert sorted(pool.map(lambda n: (barrier.wait(), n)[1], range(4))) == [0, 1, 2, 3]


def test_results_come_in_order_and_errors_where_they_belong() -> None:
    with Pool(2) as pool:
        assert list(pool.map(divmod, range(9), [2] * 9)) == [divmod(n, 2) for n in range(9)]
        results = pool.map(lambda n: 1 // n, [1, 0, 1])
        assert next(results) == 1
        with pytest.raises(ZeroDivisionError):
            next(results)


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
