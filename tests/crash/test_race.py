"""Two publishers for one version: always exactly one commits it, and the other says so."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Barrier
from typing import Self, TypeVar

import pytest
from torch import Tensor

from deltachain.chain.chain import Chain, Committed
from deltachain.errors import ForkedChainError, PublisherFencedError
from deltachain.format.documents import Edge, Table
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.writer import Writer, take_over
from deltachain.store import MemoryStore, Store, open_store
from deltachain.subscribe import Subscriber
from deltachain.types import StateDigest
from tests.crash.child import Place
from tests.support.faults import Fault, FaultyStore
from tests.support.models import bits_of, plain_model, recompute, same, tensors_of, train_
from tests.support.values import present

pytestmark = pytest.mark.full


@pytest.fixture
def url(place_of: Callable[[str], Place]) -> str:
    return place_of("hf").url()


class Trainer:
    """One process that trains a model and publishes it."""

    def __init__(self, store: Store, seed: int = 0, *, trained: int | None = None) -> None:
        self.model = plain_model(seed)
        if trained is not None:
            train_(self.model, trained)
        self.publisher = Publisher(PublishConfig(url=store.url), store=store).attach(self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.publisher.close()

    def publish(self, seed: int) -> int:
        train_(self.model, seed)
        self.publisher.publish(step=seed)
        return present(self.publisher.flush()).version


def writing(url: str, *faults: Fault) -> FaultyStore:
    return FaultyStore(open_store(url, writer=True), *faults)


def following(url: str) -> tuple[Subscriber, dict[str, Tensor]]:
    held = tensors_of(plain_model())
    return Subscriber(url, held), held


def test_a_manifest_that_was_written_over_fences_its_writer_and_stops_its_followers(
    url: str,
) -> None:
    follower, held = following(url)
    early: list[Trainer] = []

    def the_early_one_goes_first() -> None:
        early.append(Trainer(writing(url)))
        follower.update()

    late = Trainer(writing(url, Fault(the_early_one_goes_first, "manifests/")), trained=5)
    before = bits_of(held)
    with pytest.raises(PublisherFencedError, match="version 0 was replaced by another publisher"):
        early[0].publish(1)
    with pytest.raises(ForkedChainError, match="version 0 was replaced by another publisher"):
        next(iter(follower.follow()))
    late.publish(6)
    with pytest.raises(ForkedChainError, match="version 0"):
        follower.update()
    assert same(bits_of(held), before)
    found = recompute(open_store(url))
    assert list(found) == [0, 1]
    assert same(found[1].state, bits_of(late.model))


def test_a_publisher_that_slept_through_a_takeover_is_fenced_as_it_wakes(url: str) -> None:
    store, later = writing(url), list[Trainer]()
    one = Trainer(store)
    one.publish(1)
    follower, held = following(url)
    follower.update()

    def another_takes_over_and_goes_on() -> None:
        later.append(Trainer(writing(url), 1))
        later[0].publish(2)

    store.add(Fault(another_takes_over_and_goes_on, "manifests/"))
    with pytest.raises(PublisherFencedError, match="already exists: another publisher"):
        one.publish(3)
    follower.update()
    # The newest history does not pass through it.
    assert same(bits_of(held), bits_of(later[0].model))
    stepping, _ = following(url)
    stepping.update(2)
    with pytest.raises(ForkedChainError, match="version 2"):
        stepping.update(3)


@pytest.mark.parametrize("number", range(5))
def test_of_two_that_race_for_everything_one_at_most_is_left(url: str, number: int) -> None:
    both = Barrier(2, timeout=60)

    def run(seed: int) -> Trainer | None:
        with suppress(PublisherFencedError, ForkedChainError):
            try:
                trainer = Trainer(writing(url), seed)
            finally:
                both.wait()  # one that ended before the other began would be left too
            for step in range(4):
                trainer.publish(10 * number + step)
            return trainer
        return None

    with ThreadPoolExecutor(2) as pool:
        left = [trainer for trainer in pool.map(run, (1, 2)) if trainer is not None]
    assert len(left) <= 1
    for winner in left:
        follower, held = following(url)
        follower.update()
        assert same(bits_of(held), bits_of(winner.model))


ROUNDS = {"memory": 100, "file": 50, "s3": 20}
TABLE = Table(tensors=(("a", "BF16", (4,)),))

T = TypeVar("T")


def new_store(kind: str, number: int, place_of: Callable[[str], Place]) -> Store:
    return MemoryStore() if kind == "memory" else open_store(place_of(kind).url(str(number)))


@pytest.fixture(params=ROUNDS)
def fresh(request: pytest.FixtureRequest, place_of: Callable[[str], Place]) -> Iterator[Store]:
    kind = request.param
    return (new_store(kind, number, place_of) for number in range(ROUNDS[kind]))


def race(one: Callable[[], T], two: Callable[[], T]) -> T:
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(one), pool.submit(two)]
    errors = [future.exception() for future in futures]
    assert [type(error) for error in errors if error is not None] == [PublisherFencedError]
    return next(future.result() for future in futures if future.exception() is None)


def at_once(store: Store, *, nth: int = 1) -> tuple[FaultyStore, FaultyStore]:
    barrier = Barrier(2, timeout=60)
    fault = Fault(barrier.wait, "manifests/", nth=nth)
    return FaultyStore(store, fault), FaultyStore(store, fault)


def open_chain(store: Store) -> Chain:
    return Chain.create(store, TABLE, chain_id="one", time=0.0, assets={})


def writer(store: Store, parent: Committed | None) -> Writer:
    return Writer(open_chain(store), numel=4, metadata={}, parent=parent)


def commit(store: Store, parent: Committed | None) -> Callable[[], Committed]:
    def run() -> Committed:
        mine = writer(store, parent)
        base = None if parent is None else parent.version
        edge = Edge(kind="anchor" if parent is None else "delta", base=base)
        return mine.commit(edge, state=StateDigest(1, 1), step=None, nnz=0)

    return run


def adopt(store: Store) -> Callable[[], Committed]:
    def run() -> Committed:
        mine = take_over(open_chain(store), numel=4, metadata={})
        assert mine is not None
        assert mine.parent is not None
        return mine.parent

    return run


def test_of_two_racing_writers_exactly_one_commits(fresh: Iterator[Store]) -> None:
    for store in fresh:
        chain = open_chain(store)
        head: Committed | None = None
        for version in range(3):  # the first version, and then from one head
            one, two = at_once(store)
            head = race(commit(one, head), commit(two, head))
            assert chain.head() == head
            assert head.version == version
        one, two = at_once(store)
        owner = race(adopt(one), adopt(two))
        assert (owner.version, owner.manifest.epoch) == (3, 1)
        assert [c.manifest.epoch for c in chain.history(0, 3)] == [0, 0, 0, 1]


def attach(store: Store) -> Callable[[], Trainer]:
    return partial(Trainer, store)


@pytest.mark.parametrize(
    ("kind", "number"), [*(("memory", n) for n in range(50)), *(("s3", n) for n in range(10))]
)
def test_of_two_racing_publishers_exactly_one_owns_the_chain(
    kind: str, number: int, place_of: Callable[[str], Place]
) -> None:
    store = new_store(kind, number, place_of)
    one, two = at_once(store)
    with race(attach(one), attach(two)) as owner:
        owner.publish(number)
        found = recompute(store)
        assert list(found) == [0, 1]
        one, two = at_once(store)
        with race(attach(one), attach(two)) as successor:
            publisher = successor.publisher
            assert (publisher.version, publisher.epoch) == (3, 1)  # took over, then went back
            with pytest.raises(PublisherFencedError):
                owner.publish(7)
    found = recompute(store)
    assert same(found[max(found)].state, bits_of(successor.model))


@pytest.mark.parametrize("number", range(10))
def test_a_last_publish_that_races_a_takeover_is_whole_or_not_there(number: int) -> None:
    store = MemoryStore()
    barrier = Barrier(2, timeout=60)
    old = FaultyStore(store, Fault(barrier.wait, "manifests/", nth=2))
    new = FaultyStore(store, Fault(barrier.wait, "manifests/", nth=1))
    with Trainer(old) as trainer, ThreadPoolExecutor(1) as pool:
        takeover = pool.submit(attach(new))
        with suppress(PublisherFencedError):
            trainer.publish(number)
        with takeover.result(60) as successor:
            with pytest.raises(PublisherFencedError):
                trainer.publish(99)
            successor.publish(3)
    found = recompute(store)
    epochs = [found[v].committed.manifest.epoch for v in found]
    assert epochs == sorted(epochs)
    assert epochs.count(0) in (1, 2)
    assert same(found[max(found)].state, bits_of(successor.model))
