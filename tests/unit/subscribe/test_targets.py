"""What every target must do; each test runs for a dict, a module and a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from deltachain.errors import BaseMismatchError, ChainError, ConfigError, ObjectNotFoundError
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.faults import FaultyStore
from tests.support.models import Replica, TinyModel, bits_of, same, scribble
from tests.support.values import present

Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]


def assert_holds(replica: Replica, model: nn.Module) -> None:
    assert same(replica.bits(), bits_of(model))


# What is no target


@pytest.mark.parametrize("thing", [3, None, ["0.weight"]])
def test_what_is_no_target_is_refused(thing: Any, store: MemoryStore) -> None:
    with pytest.raises(ConfigError, match="no target") as caught:
        Subscriber(SubscribeConfig(url=store.url), thing, store=store)
    assert "module" in caught.value.hint


def test_the_url_comes_before_the_target() -> None:
    swapped: Any = TinyModel()
    with pytest.raises(ConfigError, match="URL or a path"):
        Subscriber(swapped, "policy")


# Joining


def test_without_a_chain_there_is_nothing_to_join(replica: Replica, subscribe: Subscribe) -> None:
    with pytest.raises(ObjectNotFoundError) as caught:
        subscribe(replica).update()
    assert "no publisher has created a chain here yet" in caught.value.hint


@pytest.mark.usefixtures("publisher")
def test_a_newcomer_joins_from_nothing(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1, 2)
    receipt = present(subscribe(replica).update())
    assert (receipt.version, receipt.previous, receipt.step) == (2, None, 2)
    assert_holds(replica, model)


def test_one_version_is_caught_up_with_its_delta_alone(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel, store: MemoryStore
) -> None:
    publish(1)
    faulty = FaultyStore(store)
    subscriber = subscribe(replica, on=faulty)
    subscriber.update()
    publish(2)
    faulty.keys_read.clear()
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous, receipt.lag_versions) == (2, 1, 0)
    payloads = [key for key in faulty.keys_read if key.startswith(("anchors/", "deltas/"))]
    assert [key.split("-")[0] for key in payloads] == [f"deltas/{2:020d}"]
    assert_holds(replica, model)
    assert subscriber.update() is None
    assert subscriber.update(2) is None


def test_several_versions_are_folded_into_one_apply(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    publish(2, 3, 4, 5)
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous) == (5, 1)
    assert receipt.plan.count("delta->") == 4
    assert_holds(replica, model)


def test_dense_changes_are_applied(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    publish(2, share=1.0)
    publish(3)
    subscriber.update()
    assert_holds(replica, model)


def test_a_version_can_be_named(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    at_one = bits_of(model)
    publish(2)
    subscriber = subscribe(replica)
    receipt = present(subscriber.update(1))
    assert (receipt.version, receipt.lag_versions) == (1, 1)
    assert same(replica.bits(), at_one)
    with pytest.raises(ChainError, match="version 7 is not committed, head is 2"):
        subscriber.update(7)


def test_an_older_version_is_reached_by_rollback_alone(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1, 2)
    subscriber = subscribe(replica)
    subscriber.update()
    with pytest.raises(ChainError, match="version 1 is older than the held 2") as caught:
        subscriber.update(1)
    assert "rollback" in caught.value.hint
    assert_holds(replica, model)


# Starting again


def test_a_target_that_holds_a_version_is_recognised_by_its_bits(
    replica: Replica, subscribe: Subscribe, publish: Publish
) -> None:
    publish(1, 2)
    subscribe(replica).update(1)
    if isinstance(replica.target, Path):
        (replica.target / "deltachain.json").unlink()
    again = subscribe(replica)
    again.update(2)
    assert again.last is not None
    assert again.last.previous == 1


def test_a_target_that_somebody_wrote_to_joins_from_nothing(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1, 2)
    subscribe(replica).update(1)
    scribble(replica)
    again = subscribe(replica)
    again.update()
    assert again.last is not None
    assert again.last.previous is None
    assert_holds(replica, model)


# Two things that a swap must not survive


def test_what_was_staged_before_another_swap_is_refused(
    replica: Replica, subscribe: Subscribe, publish: Publish
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    publish(2)
    stale = present(subscriber.stage())
    publish(3)
    subscriber.update()
    before = replica.bits()
    with pytest.raises(BaseMismatchError, match="staged before another swap"):
        subscriber.swap(stale)
    assert same(replica.bits(), before)
    assert subscriber.version == 3
    assert not subscriber.poisoned


def test_what_was_staged_before_a_scrub_that_failed_is_refused(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    publish(2)
    staged = present(subscriber.stage())
    scribble(replica)
    assert not subscriber.scrub()
    with pytest.raises(BaseMismatchError):
        subscriber.swap(staged)
    assert subscriber.version is None
    subscriber.update()
    assert_holds(replica, model)


def scribble_unseen(replica: Replica) -> None:
    """Flip a bit, and give the file of a folder its old time again."""
    files = replica.target.glob("*.safetensors") if isinstance(replica.target, Path) else ()
    times = {file: file.stat().st_mtime_ns for file in files}
    scribble(replica)
    for file, time_ns in times.items():
        os.utime(file, ns=(time_ns, time_ns))


def test_a_foreign_write_where_a_delta_writes_is_found_before_anything_is_written(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    scribble_unseen(replica)
    before = replica.bits()
    publish(2, share=0.7)  # touches every tensor nearly everywhere
    with pytest.raises(BaseMismatchError, match="nothing was written"):
        subscriber.update()
    assert same(replica.bits(), before)
    assert subscriber.version is None
    receipt = present(subscriber.update())
    assert receipt.previous is None
    assert_holds(replica, model)


def test_a_scrub_finds_a_foreign_write_and_the_next_update_heals(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    assert subscriber.scrub()
    scribble(replica)
    assert not subscriber.scrub()
    assert subscriber.status().poisoned
    assert subscriber.status().version is None
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous) == (1, None)
    assert subscriber.scrub()
    assert_holds(replica, model)


def test_a_replica_that_holds_nothing_proves_nothing(
    replica: Replica, subscribe: Subscribe, publish: Publish
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    assert not subscriber.scrub()
    assert subscriber.status().version is None
    assert subscriber.status().head == 1


# Two replicas, and settings


@pytest.mark.parametrize("settings", [{"poll_s": 0}, {"stage_budget": -1}, {"undo_applies": -1}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        SubscribeConfig(url="memory://unused", **settings)  # type: ignore[arg-type]


def test_status_tells_held_head_and_lag(
    replica: Replica, subscribe: Subscribe, publish: Publish, store: MemoryStore
) -> None:
    publish(1, 2, 3)
    with subscribe(replica) as subscriber:
        subscriber.update(1)
        status = subscriber.status()
    assert (status.version, status.head, status.lag_versions) == (1, 3, 2)
    assert (status.url, status.pinned, status.poisoned) == (store.url, False, False)
    assert status.last is not None
    assert (status.last["version"], status.last["previous"]) == (1, None)
