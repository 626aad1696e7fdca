"""Objects that are corrupt, gone or unreadable, and what a subscriber makes of them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import save_file
from torch import nn

from deltachain import errors
from deltachain.chain import chain
from deltachain.format.documents import EdgeRecord, seal, unseal
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from tests.support.faults import Action, Fault
from tests.support.models import bits_of, plain_model, same, tensors_of, train_
from tests.support.values import present
from tests.unit.subscribe.accidents import Run, unchanged

UNUSABLE: dict[Action, type[errors.DeltaChainError]] = {
    "corrupt": errors.DigestMismatchError,
    "truncate": errors.MalformedError,
    "hide": errors.ObjectNotFoundError,
}


def delta(version: int) -> str:
    return f"deltas/{version:020d}-"


@pytest.fixture
def subscriber(run: Run) -> Subscriber:
    """Holds version 1 of 3, in memory."""
    run.publish(1)
    subscriber = run.join(run.zeros, on=run.faulty)
    run.publish(2, 3)
    return subscriber


# Payloads


@pytest.mark.parametrize("action", ["corrupt", "truncate"])
def test_an_object_that_is_corrupt_once_is_fetched_again(
    run: Run, subscriber: Subscriber, action: Action
) -> None:
    run.faulty.add(Fault(action, delta(2)))
    receipt = present(subscriber.update())
    assert [key.startswith(delta(2)) for key in receipt.refetched] == [True]
    assert run.matches(run.zeros)


@pytest.mark.parametrize("action", UNUSABLE)
def test_an_object_that_stays_unusable_is_refused_and_nothing_is_written(
    run: Run, subscriber: Subscriber, action: Action
) -> None:
    run.faulty.add(Fault(action, delta(2), times=None), Fault(action, "anchors/", times=None))
    refused = pytest.raises(UNUSABLE[action], match=r"(anchors|deltas)/")
    with unchanged(run.zeros), refused as caught:
        subscriber.update()
    assert ("restart the publisher" if action == "hide" else "") in caught.value.hint
    assert subscriber.version == 1


@pytest.mark.parametrize("action", UNUSABLE)
def test_an_unusable_object_is_planned_around(
    run: Run, subscriber: Subscriber, action: Action
) -> None:
    run.add_anchor()
    run.publish(4)
    run.faulty.add(Fault(action, delta(2), times=None))
    receipt = present(subscriber.update())
    assert "anchor->3" in receipt.plan
    assert run.matches(run.zeros)


# Records of anchors, and encodings of a later version


def removed(store: MemoryStore, record: str) -> None:
    store.delete(record)


def rewritten(store: MemoryStore, record: str) -> None:
    document = unseal(store.get(record), EdgeRecord, key=record)
    assert document.edge.parts
    store.put(record, seal(msgspec.structs.replace(document, state="0" * 32)))


@pytest.mark.parametrize("change", [removed, rewritten])
def test_an_anchor_whose_record_is_not_its_own_is_planned_around(
    run: Run, change: Callable[[MemoryStore, str], None]
) -> None:
    run.publish(1, 2)
    run.add_anchor()
    run.publish(3)
    (record,) = run.store.list("edges/")
    change(run.store, record.key)
    receipt = present(run.subscribe(run.zeros).update())
    assert "anchor->0" in receipt.plan
    assert run.matches(run.zeros)


def test_an_unknown_encoding_disables_its_edge_alone(
    run: Run, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "ENCODINGS", frozenset({"dense"}))  # a reader before steps
    with unchanged(run.zeros), pytest.raises(errors.BrokenChainError) as caught:
        subscriber.update()
    assert "anchor" in caught.value.hint
    run.add_anchor()
    receipt = present(subscriber.update())
    assert receipt.plan.startswith("1 to 3: anchor->3 ")
    assert run.matches(run.zeros)


# A base checkpoint that the follower has


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(plain_model().state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def based(store: MemoryStore, base: Path) -> Iterator[nn.Module]:
    """A model on a chain that begins with a reference; the head is version 2."""
    model = plain_model()
    publisher = Publisher(PublishConfig(url=store.url, base=base, anchor_factor=1e6), store=store)
    with publisher.attach(model):
        for seed in (1, 2):
            train_(model, seed)
            publisher.publish(step=seed)
            publisher.flush()
        yield model


def test_a_newcomer_starts_from_the_base_wherever_it_lies(
    run: Run, based: nn.Module, base: Path, tmp_path: Path
) -> None:
    moved = base.rename(tmp_path / "moved")
    tensors = tensors_of(based)
    receipt = present(run.subscribe(tensors, base=moved).update())
    assert receipt.plan.startswith("nothing to 2: base->0 ")
    assert same(bits_of(tensors), bits_of(based))


def gone(base: Path) -> None:
    shutil.rmtree(base)


def without_weights(base: Path) -> None:
    (base / "model.safetensors").rename(base / "other.safetensors")


def altered(base: Path) -> None:
    file = base / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncated(base: Path) -> None:
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [gone, without_weights, altered, truncated])
def test_a_base_that_is_not_the_one_referred_to_is_refused(
    run: Run, based: nn.Module, base: Path, damage: Callable[[Path], None]
) -> None:
    damage(base)
    tensors = tensors_of(based)
    message = "does not exist" if damage is gone else r"model\.safetensors"
    refused = pytest.raises(
        errors.ConfigError if damage is gone else errors.FormatError, match=message
    )
    with unchanged(tensors), refused as caught:
        run.join(tensors, base=base)
    if damage is gone:
        assert "give the folder of the base checkpoint" in caught.value.hint


def test_a_base_that_is_gone_is_planned_around(run: Run, based: nn.Module, base: Path) -> None:
    gone(base)
    with Publisher(PublishConfig(url=run.store.url), store=run.store) as publisher:
        publisher.attach(based)  # nothing can be rebuilt, so nothing is known to differ
        train_(based, 3)
        publisher.publish()
        session: Any = publisher._session
        publisher.flush()
        session.add_anchor(session.begin_anchor(), topic="")
    tensors = tensors_of(based)
    receipt = present(run.subscribe(tensors, base=base).update())
    assert "anchor->" in receipt.plan
    assert same(bits_of(tensors), bits_of(based))
