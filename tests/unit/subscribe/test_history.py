from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest

from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.format.documents import seal
from deltachain.format.keys import manifest_key
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber, history
from deltachain.subscribe import subscriber as module
from tests.support.backup import objects_of, put_back
from tests.support.faults import Fault
from tests.support.models import Replica, TinyModel, bits_of, replica_of, same, scribble
from tests.support.values import present
from tests.unit.subscribe.accidents import Run, rewrite, unchanged

# Going back

EACH = (0, 1, 2, 3, 4)
"""One apply a version, up to the head."""


@pytest.fixture
def five(run: Run) -> Run:
    """A run of versions 0 to 4."""
    run.publish(1, 2, 3, 4)
    return run


def test_a_replica_that_holds_nothing_has_nothing_to_go_back_to(
    five: Run, replica: Replica
) -> None:
    with pytest.raises(errors.ChainError, match="cannot roll back from version None"):
        five.subscribe(replica).rollback()
    subscriber = five.join(replica)
    with pytest.raises(errors.ChainError, match="name an older version"):
        subscriber.rollback()
    assert five.matches(replica, 4)
    assert not subscriber.pinned


def test_a_newer_version_is_no_rollback(five: Run, replica: Replica) -> None:
    subscriber = five.join(replica, 2)
    with pytest.raises(errors.ChainError, match="from version 2 to 3"):
        subscriber.rollback(3)
    assert five.matches(replica, 2)


def test_applies_are_taken_back_without_the_store(five: Run, replica: Replica) -> None:
    subscriber = five.join(replica, *EACH, on=five.faulty, undo_applies=3)
    five.faulty.down = True
    assert subscriber.rollback().version == 3
    assert five.matches(replica, 3)
    assert subscriber.version == 3
    assert subscriber.scrub()
    assert subscriber.rollback(1).version == 1
    assert five.matches(replica, 1)


def test_an_apply_that_folded_versions_is_taken_back_whole(five: Run, replica: Replica) -> None:
    subscriber = five.join(replica, 1, 4)
    assert subscriber.rollback().version == 1
    assert five.matches(replica, 1)


@pytest.mark.parametrize(
    ("applied", "settings"),
    [
        pytest.param(EACH, {"undo_applies": 1}, id="forgotten"),
        pytest.param(EACH, {"undo_applies": 0}, id="never remembered"),
        pytest.param((0, 4), {}, id="between two applies"),
    ],
)
def test_what_is_not_remembered_is_planned_from_the_store(
    five: Run, replica: Replica, applied: tuple[int, ...], settings: dict[str, Any]
) -> None:
    subscriber = five.join(replica, *applied, **settings)
    assert subscriber.rollback(1).version == 1
    assert five.matches(replica, 1)
    with pytest.raises(errors.ChainError):
        subscriber.rollback()  # the applies before are no way back from here


def test_what_is_too_large_to_remember_is_planned_from_the_store(
    five: Run, replica: Replica
) -> None:
    subscriber = five.join(replica, *EACH, on=five.faulty, stage_budget=100)
    five.faulty.down = True
    with pytest.raises(errors.StoreUnavailableError):
        subscriber.rollback(3)
    assert not subscriber.pinned
    five.faulty.mend()
    assert subscriber.rollback(3).version == 3
    assert five.matches(replica, 3)


def test_bits_that_nobody_proved_are_not_gone_back_to(run: Run, replica: Replica) -> None:
    run.publish(1)
    run.faulty.add(Fault("hide", "deltas/00000000000000000002", times=None))
    subscriber = run.join(replica, on=run.faulty)
    scribble(replica)  # unnoticed, and overwritten by an anchor that needs no base
    run.publish(2)
    run.add_anchor()
    subscriber.update()
    assert run.matches(replica)
    assert subscriber.rollback(1).version == 1
    assert run.matches(replica, 1)


def test_a_rollback_that_failed_leaves_the_way_back_as_it_was(five: Run, replica: Replica) -> None:
    subscriber = five.join(replica, *EACH, on=five.faulty)
    five.faulty.down = True
    failing = mock.patch.object(
        subscriber.target, "swap", side_effect=errors.PartialApplyError("back")
    )
    with failing, pytest.raises(errors.PartialApplyError):
        subscriber.rollback(2)
    assert (subscriber.version, subscriber.pinned) == (4, False)
    assert five.matches(replica, 4)
    assert subscriber.rollback(2).version == 2
    assert five.matches(replica, 2)


def test_a_rollback_that_poisoned_leaves_no_way_back(five: Run, replica: Replica) -> None:
    subscriber = five.join(replica, *EACH)
    failing = mock.patch.object(
        subscriber.target, "swap", side_effect=errors.PoisonedError("half written")
    )
    with failing, pytest.raises(errors.PoisonedError):
        subscriber.rollback()
    assert subscriber.poisoned
    with pytest.raises(errors.ChainError, match="from version None"):
        subscriber.rollback()
    receipt = present(subscriber.update())
    assert (receipt.previous, receipt.version) == (None, 4)
    assert five.matches(replica, 4)


def test_a_rollback_of_files_that_somebody_altered_plans_from_nothing(
    five: Run,
) -> None:
    folder = replica_of(five.model, "folder", five.mirror)
    subscriber = five.join(folder, *EACH)
    scribble(folder)
    assert subscriber.rollback().version == 3
    assert subscriber.pinned
    assert five.matches(folder, 3)


# A rollback pins


def test_a_rollback_pins_until_it_is_released(five: Run, replica: Replica) -> None:
    """A trainer that pushes every version by its number would undo every rollback."""
    subscriber = five.join(replica, *EACH)
    subscriber.rollback()
    assert subscriber.pinned
    assert subscriber.status().pinned
    assert subscriber.update() is None
    assert subscriber.update(3) is None
    for version in (2, 4):
        with pytest.raises(errors.ChainError, match="keeps this target at version 3"):
            subscriber.update(version)
    assert five.matches(replica, 3)
    subscriber.release()
    receipt = present(subscriber.update())
    assert (receipt.previous, receipt.version) == (3, 4)
    assert five.matches(replica, 4)
    assert subscriber.rollback().version == 3
    assert five.matches(replica, 3)


def test_a_rollback_to_what_is_held_pins_alone(five: Run, replica: Replica) -> None:
    subscriber = five.join(replica, *EACH)
    assert subscriber.rollback(4).version == 4
    assert subscriber.pinned
    assert five.matches(replica, 4)


def test_what_was_staged_before_a_pin_does_not_lead_away_from_it(
    five: Run, replica: Replica
) -> None:
    subscriber = five.join(replica, 2)
    staged = present(subscriber.stage())
    subscriber.rollback(2)
    with pytest.raises(errors.BaseMismatchError, match="version 4 was staged before another swap"):
        subscriber.swap(staged)
    assert five.matches(replica, 2)


@pytest.mark.parametrize("moment", ["require", "fetch_around"])
def test_a_rollback_in_the_middle_of_a_stage_poisons_nobody(
    five: Run, replica: Replica, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What is staged is then compared with bits that it was not meant for."""
    subscriber = five.join(replica, 0, 1, 2)
    home = history if moment == "require" else module
    original = getattr(home, moment)

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        assert subscriber.rollback().version == 1
        return original(*args, **kwargs)

    monkeypatch.setattr(home, moment, overtaken)
    with pytest.raises(errors.BaseMismatchError, match="version 4 was staged before another swap"):
        subscriber.update()
    assert not subscriber.poisoned
    assert subscriber.pinned
    assert five.matches(replica, 1)
    subscriber.release()
    subscriber.update()
    assert five.matches(replica, 4)


def test_a_pinned_replica_heals_where_it_is_pinned(five: Run, replica: Replica) -> None:
    subscriber = five.join(replica, *EACH)
    subscriber.rollback(2)
    subscriber.poisoned = True
    receipt = present(subscriber.update())
    assert (receipt.previous, receipt.version) == (None, 2)
    assert subscriber.pinned
    assert five.matches(replica, 2)


# A history that is another than the held one


@pytest.fixture
def earlier(run: Run) -> dict[str, bytes]:
    """The store when version 1 was the newest."""
    run.publish(1)
    return objects_of(run.store)


@pytest.fixture
def subscriber(run: Run, earlier: dict[str, bytes]) -> Subscriber:
    """Holds version 2 of 2, in memory."""
    assert earlier
    run.publish(2)
    return run.join(run.zeros)


def poison(run: Run, subscriber: Subscriber) -> None:
    run.zeros["layer.weight"].view(-1)[0] = 7.0
    assert not subscriber.scrub()


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_fork_of_what_is_held_is_refused(
    run: Run, subscriber: Subscriber, earlier: dict[str, bytes], steps: int, *, poisoned: bool
) -> None:
    put_back(run.store, earlier)
    rewrite(run.store, range(steps))
    if poisoned:
        poison(run, subscriber)
    with unchanged(run.zeros), pytest.raises(errors.ForkedChainError) as caught:
        subscriber.update()
    assert "two histories" in caught.value.hint
    assert subscriber.version == (None if poisoned else 2)


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_chain_that_went_back_in_time_is_not_followed_and_does_not_heal(
    run: Run, subscriber: Subscriber, earlier: dict[str, bytes], *, poisoned: bool
) -> None:
    put_back(run.store, earlier)
    if poisoned:
        poison(run, subscriber)
    message = "version 2 is held, the newest there is 1"
    with unchanged(run.zeros), pytest.raises(errors.StoreWentBackError, match=message):
        subscriber.update()
    assert subscriber.version == (None if poisoned else 2)


def test_another_parent_of_the_next_version_is_refused(run: Run, subscriber: Subscriber) -> None:
    run.publish(3)
    manifest = Chain.open(run.store).read(3).manifest
    run.store.put(manifest_key(3), seal(msgspec.structs.replace(manifest, parent="0" * 64)))
    with unchanged(run.zeros), pytest.raises(errors.ForkedChainError) as caught:
        subscriber.update()
    assert "two histories" in caught.value.hint


def test_a_lower_epoch_is_refused(run: Run) -> None:
    run.publish(1)
    rewrite(run.store, range(2))
    subscriber = run.join(run.zeros, 2)
    manifest = Chain.open(run.store).read(5).manifest
    assert manifest.epoch == 1
    run.store.put(manifest_key(5), seal(msgspec.structs.replace(manifest, epoch=0)))
    message = "version 5 is of epoch 0, older than the held 1"
    with unchanged(run.zeros), pytest.raises(errors.ForkedChainError, match=message):
        subscriber.update()


def test_a_missing_manifest_is_named(run: Run, subscriber: Subscriber) -> None:
    run.publish(3, 4, 5)
    Chain.open(run.store).write_head(5, ())
    run.store.delete(manifest_key(3))
    with unchanged(run.zeros):
        with pytest.raises(
            errors.BrokenChainError, match="manifest of version 3 is missing, head is 5"
        ):
            subscriber.update(3)
        with pytest.raises(
            (errors.BrokenChainError, errors.ObjectNotFoundError), match=manifest_key(3)
        ):
            subscriber.update()


def test_a_chain_that_is_gone_is_said_to_be(run: Run, subscriber: Subscriber) -> None:
    put_back(run.store, {})
    for version in (None, 3):
        with pytest.raises(errors.ObjectNotFoundError, match="the chain that was at memory:"):
            subscriber.update(version)
    assert subscriber.version == 2


def test_a_folder_of_a_chain_that_is_gone_waits_for_no_first_version(run: Run) -> None:
    run.publish(1)
    run.join(run.mirror).close()
    put_back(run.store, {})
    with pytest.raises(errors.ObjectNotFoundError, match="holds a version of one") as caught:
        run.join(run.mirror)
    assert not isinstance(caught.value, errors.NoChainError)


# Another chain


def test_a_folder_that_followed_another_chain_joins_from_nothing(
    run: Run, replica: Replica
) -> None:
    run.publish(1)
    run.join(replica)
    other, trained = MemoryStore(), TinyModel(seed=3)
    with Publisher(PublishConfig(url=other.url), store=other).attach(trained):
        subscriber = run.subscribe(replica, on=other)
        assert subscriber.version is None
        receipt = present(subscriber.update())
    assert receipt.previous is None
    assert same(replica.bits(), bits_of(trained))
    assert not same(replica.bits(), bits_of(run.model))
