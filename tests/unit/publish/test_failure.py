from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from deltachain.errors import (
    ConfigError,
    DeltaChainError,
    PublisherFencedError,
    RankError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.format.keys import HEAD_KEY, manifest_key
from deltachain.publish import Publisher
from deltachain.publish.ranks.collectives import Collective
from deltachain.publish.session import Conclusion
from deltachain.store import MemoryStore
from tests.support.faults import Action, Fault, FaultyStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_

Attach = Callable[..., Publisher]

FAILURES: list[tuple[Action, str]] = [
    ("fail", "deltas/"),
    ("lose-reply", "deltas/"),
    ("full", "deltas/"),
    ("refuse", "deltas/"),
    ("fail", "manifests/"),
    ("full", "manifests/"),
    ("refuse", "manifests/"),
]


@pytest.fixture
def faulty(store: MemoryStore) -> FaultyStore:
    return FaultyStore(store)


def publish(publisher: Publisher, model: nn.Module, step: int) -> None:
    train_(model, step)
    publisher.publish(step=step)
    publisher.flush()


def assert_head_is(model: nn.Module, version: int, store: MemoryStore) -> None:
    found = recompute(store)
    assert max(found) == version
    assert same(found[version].state, bits_of(model))


# A publish that failed loses nothing


def test_publishing_goes_on_after_a_commit_whose_conclusion_was_lost(
    attach: Attach, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has the version, and the ranks do not know: as if rank 0 lost its channel."""
    model = TinyModel()
    publisher = attach(model, on_error="warn")
    publish(publisher, model, 1)
    broadcast = Collective.broadcast
    lost: list[object] = []

    def lose_one(collective: Collective, value: object, kind: type[object]) -> object:
        if kind is Conclusion and not lost:
            lost.append(value)
            raise RankError("rank 0 is disconnected")
        return broadcast(collective, value, kind)

    monkeypatch.setattr(Collective, "broadcast", lose_one)
    train_(model, 2)
    with pytest.raises(RankError, match="disconnected"):
        publisher.publish(step=2).result()
    assert len(lost) == 1
    train_(model, 3)
    assert publisher.publish(step=3).result().version == 3
    assert_head_is(model, 3, store)


@pytest.mark.parametrize("failure", FAILURES)
def test_the_next_version_covers_one_that_failed(
    attach: Attach, faulty: FaultyStore, store: MemoryStore, failure: tuple[Action, str]
) -> None:
    model = TinyModel()
    publisher = attach(model, on=faulty)
    faulty.add(Fault(*failure))
    train_(model, 1)
    future = publisher.publish(step=1)
    with pytest.raises(DeltaChainError) as raised:
        publisher.flush()
    assert future.exception(0) is raised.value
    assert list(recompute(store)) == [0]
    publish(publisher, model, 2)
    assert_head_is(model, 1, store)


@pytest.mark.parametrize("failure", FAILURES)
def test_with_warnings_alone_training_goes_on_and_nothing_is_lost(
    attach: Attach,
    faulty: FaultyStore,
    store: MemoryStore,
    failure: tuple[Action, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = TinyModel()
    publisher = attach(model, on=faulty, on_error="warn")
    faulty.add(Fault(*failure, times=2))
    for step in (1, 2):
        train_(model, step)
        future = publisher.publish(step=step)
        publisher.flush()
        assert isinstance(future.exception(0), DeltaChainError)
    assert caplog.text.count("the next version makes up for it") == 2
    publish(publisher, model, 3)
    assert_head_is(model, 1, store)


def test_a_close_says_that_the_last_version_is_missing(
    attach: Attach, faulty: FaultyStore, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyModel()
    publisher = attach(model, on=faulty, on_error="warn")
    publish(publisher, model, 1)
    faulty.add(Fault("full", "deltas/"))
    publish(publisher, model, 2)
    assert max(recompute(store)) == 1
    assert "closed at" not in caplog.text
    publisher.close()
    publisher.close()
    (said,) = (text for text in caplog.messages if "closed at" in text)
    assert "closed at version 1; what was trained since may not be published" in said
    assert "the disk is full: free some space" in said


def test_a_close_says_nothing_of_a_failure_that_was_made_up_for(
    attach: Attach, faulty: FaultyStore, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyModel()
    publisher = attach(model, on=faulty, on_error="warn")
    faulty.add(Fault("full", "deltas/"))
    publish(publisher, model, 1)
    publish(publisher, model, 2)
    publisher.close()
    assert_head_is(model, 1, store)
    assert "closed at" not in caplog.text


@pytest.mark.parametrize("when_busy", ["cover", "wait"])
def test_an_error_is_raised_once_by_the_next_call(
    attach: Attach, faulty: FaultyStore, store: MemoryStore, when_busy: str
) -> None:
    model = plain_model()
    publisher = attach(model, on=faulty, when_busy=when_busy)
    faulty.add(Fault("fail", "deltas/"))
    train_(model, 1)
    first = publisher.publish(step=1)
    assert isinstance(first.exception(60), StoreUnavailableError)
    train_(model, 2)
    with pytest.raises(StoreUnavailableError):
        publisher.publish(step=2)
    publish(publisher, model, 3)
    assert_head_is(model, 1, store)


def test_a_diff_that_was_interrupted_loses_nothing(attach: Attach, store: MemoryStore) -> None:
    model, last = plain_model(), torch.ones(1)
    model.register_buffer("last_scale", last)
    publisher = attach(model)
    train_(model, 1, share=0.1)
    last.fill_(torch.nan)  # the diff gives up at this one
    with pytest.raises(ConfigError, match="'last_scale' is a scale that is not finite"):
        publisher.publish(step=1)
    last.fill_(1)
    publish(publisher, model, 2)
    assert_head_is(model, 1, store)


# Outcomes that nobody knows


def test_a_lost_reply_of_our_own_commit_is_success(
    attach: Attach, faulty: FaultyStore, store: MemoryStore
) -> None:
    model = plain_model()
    publisher = attach(model, on=faulty)
    faulty.add(Fault("lose-reply", "manifests/"))
    publish(publisher, model, 1)
    assert publisher.version == 1
    publish(publisher, model, 2)
    assert_head_is(model, 2, store)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_commit_that_turns_out_to_have_happened_is_not_repeated(
    attach: Attach, faulty: FaultyStore, store: MemoryStore, on_error: str
) -> None:
    model = plain_model()
    publisher = attach(model, on=faulty, on_error=on_error)
    # The reply is lost, and the read-back says that there is nothing: a store that lags.
    faulty.add(Fault("lose-reply", "manifests/"), Fault("hide", manifest_key(1)))
    train_(model, 1)
    after_first = bits_of(model)
    future = publisher.publish(step=1)
    assert isinstance(future.exception(60), StoreUnavailableError)
    if on_error == "raise":
        with pytest.raises(StoreUnavailableError):
            publisher.flush()
    publish(publisher, model, 2)
    assert same(recompute(store)[1].state, after_first)
    assert_head_is(model, 2, store)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_an_unknown_outcome_is_not_forgotten_while_the_store_is_down(
    attach: Attach, faulty: FaultyStore, store: MemoryStore, on_error: str
) -> None:
    model = plain_model()
    publisher = attach(model, on=faulty, on_error=on_error)

    def go_down() -> None:
        faulty.down = True

    faulty.add(Fault("lose-reply", "manifests/"), Fault(go_down, "manifests/"))
    train_(model, 1)
    after_first = bits_of(model)
    unknown = publisher.publish(step=1)
    assert isinstance(unknown.exception(60), StoreUnavailableError)
    for step in (2, 3):  # still down: each call fails as the first did
        train_(model, step)
        if on_error == "raise":
            with pytest.raises(StoreUnavailableError):
                publisher.publish(step=step)
        else:
            publisher.publish(step=step)  # left to the next
    faulty.mend()
    publish(publisher, model, 4)
    assert same(recompute(store)[1].state, after_first)
    assert_head_is(model, 2, store)


def test_a_hint_that_can_not_be_written_fails_nothing(
    attach: Attach, faulty: FaultyStore, store: MemoryStore
) -> None:
    model = plain_model()
    publisher = attach(model, on=faulty)
    actions: tuple[Action, ...] = ("refuse", "fail", "full", "lose-reply")
    for step, action in enumerate(actions, 1):
        faulty.add(Fault(action, HEAD_KEY))
        publish(publisher, model, step)
        assert_head_is(model, step, store)


@pytest.mark.parametrize("prefix", ["anchors/", "edges/"])
def test_an_anchor_that_can_not_be_added_fails_nothing(
    attach: Attach,
    faulty: FaultyStore,
    store: MemoryStore,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = plain_model()
    publisher = attach(model, on=faulty, anchor_factor=0.001)
    faulty.add(Fault("fail", prefix))
    publish(publisher, model, 1)
    assert "no anchor yet" in caplog.text
    publish(publisher, model, 2)
    found = recompute(store)
    assert [found[v].anchored for v in found] == [False, False, True]


# Two publishers


def test_a_publisher_that_was_taken_over_stays_fenced_and_says_so(
    attach: Attach, store: MemoryStore
) -> None:
    old, new = plain_model(), plain_model()
    fenced, owner = attach(old), attach(new)
    assert (owner.version, owner.epoch) == (1, 1)
    train_(old, 1)
    future = fenced.publish(step=1)
    for step in (2, 3):
        with pytest.raises(PublisherFencedError, match="another publisher"):
            publish(fenced, old, step)
        publish(owner, new, 10 + step)
    assert isinstance(future.exception(0), PublisherFencedError)
    assert_head_is(new, 3, store)


def test_a_publisher_fenced_between_upload_and_commit_commits_nothing(
    attach: Attach, faulty: FaultyStore, store: MemoryStore
) -> None:
    old, new = plain_model(), plain_model()
    fenced = attach(old, on=faulty)
    faulty.add(Fault(lambda: attach(new), "manifests/"))
    train_(old, 1)
    fenced.publish(step=1)
    with pytest.raises(PublisherFencedError):
        fenced.flush()
    assert_head_is(new, 1, store)


def test_an_unknown_outcome_that_another_publisher_decided_is_fenced(
    attach: Attach, faulty: FaultyStore, store: MemoryStore
) -> None:
    old, new = plain_model(), plain_model()
    fenced = attach(old, on=faulty)
    faulty.add(Fault("fail", "manifests/"))
    train_(old, 1)
    assert isinstance(fenced.publish(step=1).exception(60), StoreUnavailableError)
    with pytest.raises(StoreUnavailableError):
        fenced.flush()
    attach(new)
    with pytest.raises(PublisherFencedError):
        publish(fenced, old, 2)
    assert_head_is(new, 1, store)


def test_missing_permission_is_not_mistaken_for_an_unknown_outcome(
    attach: Attach, faulty: FaultyStore, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = plain_model()
    publisher = attach(model, on=faulty)
    faulty.add(Fault("refuse", "manifests/"))
    train_(model, 1)
    publisher.publish()
    with pytest.raises(StorePermissionError):
        publisher.flush()
    faulty.add(Fault("fail", "deltas/"))
    train_(model, 2)
    publisher.publish()
    with pytest.raises(StoreUnavailableError):
        publisher.flush()
    publish(publisher, model, 3)
    assert_head_is(model, 1, store)
