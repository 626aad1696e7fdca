"""Two publishers where there may be one: on a bucket that cannot decide which of them is first.

Nothing there keeps the second from writing over the first. What holds instead: the publisher that
lost its place says so at its next commit at the latest, naming the version; a follower of what it
wrote says so at its next look; and nobody applies a version to another one's parent.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from torch import nn

from deltachain.errors import ForkedChainError, PublisherFencedError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from tests.crash.places import Place
from tests.support.faults import Fault, FaultyStore
from tests.support.models import bits_of, plain_model, recompute, same, tensors_of, train_


@pytest.fixture
def url(place_of: Callable[[str], Place]) -> str:
    return place_of("hf").url()


def change_(model: nn.Module, seed: int) -> None:
    train_(model, seed, share=0.05)


def attach_to(url: str, model: nn.Module, *faults: Fault) -> tuple[Publisher, FaultyStore]:
    store = FaultyStore(open_store(url, writer=True), *faults)
    return Publisher(PublishConfig(url=url), store=store).attach(model), store


def publish(publisher: Publisher, model: nn.Module, seed: int) -> None:
    change_(model, seed)
    publisher.publish(step=seed)
    publisher.flush()


def test_the_bucket_says_that_it_can_not_decide(url: str) -> None:
    assert not open_store(url).capabilities.conditional_put


def test_a_second_publisher_that_comes_later_fences_the_first(url: str) -> None:
    first, second = plain_model(), plain_model(1)
    one, _ = attach_to(url, first)
    publish(one, first, 1)
    two, _ = attach_to(url, second)
    with pytest.raises(PublisherFencedError, match="version 2 was committed by another publisher"):
        publish(one, first, 2)
    publish(two, second, 2)
    found = recompute(open_store(url))
    assert same(found[max(found)].state, bits_of(second))


def test_a_manifest_that_was_written_over_fences_its_writer_and_stops_its_followers(
    url: str,
) -> None:
    early, late = plain_model(), plain_model()
    held = tensors_of(early)
    follower = Subscriber(url, held)

    def the_early_one_goes_first() -> None:
        one, _ = attach_to(url, early)
        follower.update()
        publishers.append(one)

    publishers: list[Publisher] = []
    change_(late, 5)
    two, _ = attach_to(url, late, Fault(the_early_one_goes_first, "manifests/"))
    publishers.append(two)
    before = bits_of(held)
    with pytest.raises(PublisherFencedError, match="version 0 was replaced by another publisher"):
        publish(publishers[0], early, 1)
    with pytest.raises(ForkedChainError, match="version 0 was replaced by another publisher"):
        next(iter(follower.follow()))
    publish(two, late, 6)
    with pytest.raises(ForkedChainError, match="version 0"):
        follower.update()
    assert same(bits_of(held), before)
    found = recompute(open_store(url))
    assert list(found) == [0, 1]
    assert same(found[1].state, bits_of(late))


def test_a_publisher_that_slept_through_a_takeover_is_fenced_as_it_wakes(url: str) -> None:
    first, second = plain_model(), plain_model(1)
    one, store = attach_to(url, first)
    publish(one, first, 1)
    held = tensors_of(first)
    follower = Subscriber(url, held)
    follower.update()

    def another_takes_over_and_goes_on() -> None:
        two, _ = attach_to(url, second)
        publish(two, second, 2)

    store.add(Fault(another_takes_over_and_goes_on, "manifests/"))
    with pytest.raises(PublisherFencedError, match="already exists: another publisher"):
        publish(one, first, 3)
    follower.update()
    assert same(bits_of(held), bits_of(second))  # the newest history does not pass through it
    stepping = Subscriber(url, tensors_of(first))
    stepping.update(2)
    with pytest.raises(ForkedChainError, match="version 2"):
        stepping.update(3)


@pytest.mark.parametrize("number", range(5))
def test_of_two_that_race_for_everything_one_at_most_is_left(url: str, number: int) -> None:
    models = plain_model(1), plain_model(2)

    def run(model: nn.Module) -> bool:
        with suppress(PublisherFencedError, ForkedChainError):
            publisher, _ = attach_to(url, model)
            for seed in range(4):
                publish(publisher, model, 10 * number + seed)
            return True
        return False

    with ThreadPoolExecutor(2) as pool:
        left = [model for model, alone in zip(models, pool.map(run, models), strict=True) if alone]
    assert len(left) <= 1
    for winner in left:
        held = tensors_of(winner)
        Subscriber(url, held).update()
        assert same(bits_of(held), bits_of(winner))
