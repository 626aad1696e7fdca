"""Objects that are corrupt, gone or unreadable, and what a subscriber makes of them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain.chain import chain
from deltachain.errors import (
    BrokenChainError,
    ConfigError,
    DeltaChainError,
    DigestMismatchError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from deltachain.format.documents import EdgeRecord, seal, unseal
from deltachain.format.keys import manifest_key
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from tests.support.faults import Action, Fault, FaultyStore
from tests.support.models import TinyModel, bits_of, plain_model, same, tensors_of, train_
from tests.support.values import present

Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]

BAD: list[Action] = ["corrupt", "truncate", "hide"]


def delta(version: int) -> str:
    return f"deltas/{version:020d}-"


@pytest.fixture
def subscriber(
    zeros: dict[str, Tensor], subscribe: Subscribe, publish: Publish, faulty: FaultyStore
) -> Subscriber:
    """Holds version 1 of 3."""
    publish(1)
    subscriber = subscribe(zeros, on=faulty)
    subscriber.update()
    publish(2, 3)
    return subscriber


# Payloads


@pytest.mark.parametrize("action", ["corrupt", "truncate"])
def test_an_object_that_is_corrupt_once_is_fetched_again(
    subscriber: Subscriber,
    faulty: FaultyStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
    action: Action,
) -> None:
    faulty.add(Fault(action, delta(2)))
    receipt = present(subscriber.update())
    assert [key.startswith(delta(2)) for key in receipt.refetched] == [True]
    assert same(bits_of(zeros), bits_of(model))


@pytest.mark.parametrize("action", BAD)
def test_an_object_that_stays_unusable_is_refused_and_nothing_is_written(
    subscriber: Subscriber, faulty: FaultyStore, zeros: dict[str, Tensor], action: Action
) -> None:
    before = bits_of(zeros)
    faulty.add(Fault(action, delta(2), times=None), Fault(action, "anchors/", times=None))
    expected: dict[str, type[DeltaChainError]] = {
        "hide": ObjectNotFoundError,
        "truncate": MalformedError,
        "corrupt": DigestMismatchError,
    }
    with pytest.raises(expected[action], match=r"(anchors|deltas)/") as caught:
        subscriber.update()
    assert caught.value.hint
    assert same(bits_of(zeros), before)
    assert subscriber.version == 1


@pytest.mark.parametrize("action", BAD)
def test_an_unusable_object_is_planned_around(
    subscriber: Subscriber,
    faulty: FaultyStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
    publish: Publish,
    *,
    add_anchor: Callable[[], None],
    action: Action,
) -> None:
    add_anchor()
    publish(4)
    faulty.add(Fault(action, delta(2), times=None))
    receipt = present(subscriber.update())
    assert "anchor->3" in receipt.plan
    assert same(bits_of(zeros), bits_of(model))


def test_a_swapped_object_is_refused(
    subscriber: Subscriber, store: MemoryStore, zeros: dict[str, Tensor]
) -> None:
    keys = [next(store.list(delta(version))).key for version in (2, 3)]
    store.put(keys[0], store.get(keys[1]))
    before = bits_of(zeros)
    with pytest.raises(FormatError) as caught:  # by its size or by its digest
        subscriber.update()
    assert caught.value.key == keys[0]
    assert same(bits_of(zeros), before)


def test_a_store_that_is_down_is_an_error_and_nothing_is_written(
    subscriber: Subscriber, faulty: FaultyStore, zeros: dict[str, Tensor], model: TinyModel
) -> None:
    before = bits_of(zeros)
    faulty.down = True
    with pytest.raises(StoreUnavailableError):
        subscriber.update()
    assert same(bits_of(zeros), before)
    faulty.mend()
    subscriber.update()
    assert same(bits_of(zeros), bits_of(model))


# Manifests, records and the hint


def test_a_manifest_that_can_not_be_read_is_refused(
    subscriber: Subscriber, faulty: FaultyStore, zeros: dict[str, Tensor]
) -> None:
    before = bits_of(zeros)
    faulty.add(Fault("truncate", manifest_key(3), times=None))
    with pytest.raises(FormatError):
        subscriber.update()
    assert same(bits_of(zeros), before)


@pytest.fixture
def record(store: MemoryStore, publish: Publish, add_anchor: Callable[[], None]) -> str:
    """Key of the record of an anchor of version 2; the head is 3."""
    publish(1, 2)
    add_anchor()
    publish(3)
    (info,) = store.list("edges/")
    return info.key


def test_an_anchor_whose_record_is_gone_is_planned_around(
    record: str,
    subscribe: Subscribe,
    store: MemoryStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
) -> None:
    store.delete(record)
    receipt = present(subscribe(zeros).update())
    assert "anchor->0" in receipt.plan
    assert same(bits_of(zeros), bits_of(model))


def test_an_anchor_whose_record_was_rewritten_is_planned_around(
    record: str,
    subscribe: Subscribe,
    store: MemoryStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
) -> None:
    document = unseal(store.get(record), EdgeRecord, key=record)
    assert document.edge.parts
    forged = EdgeRecord(
        chain=document.chain,
        version=document.version,
        manifest=document.manifest,
        base_state=document.base_state,
        state="0" * 32,
        edge=document.edge,
    )
    store.put(record, seal(forged))
    receipt = present(subscribe(zeros).update())
    assert "anchor->0" in receipt.plan
    assert same(bits_of(zeros), bits_of(model))


# An encoding of a later version


def test_an_unknown_encoding_disables_its_edge_alone(
    subscriber: Subscriber,
    add_anchor: Callable[[], None],
    zeros: dict[str, Tensor],
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain, "ENCODINGS", frozenset({"dense"}))  # a reader before steps
    before = bits_of(zeros)
    with pytest.raises(BrokenChainError) as caught:
        subscriber.update()
    assert "anchor" in caught.value.hint
    assert same(bits_of(zeros), before)
    add_anchor()
    receipt = present(subscriber.update())
    assert receipt.plan.startswith("1 to 3: anchor->3 ")
    assert same(bits_of(zeros), bits_of(model))


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
    based: nn.Module, base: Path, tmp_path: Path, subscribe: Subscribe
) -> None:
    moved = base.rename(tmp_path / "moved")
    tensors = tensors_of(based)
    receipt = present(subscribe(tensors, base=moved).update())
    assert receipt.plan.startswith("nothing to 2: base->0 ")
    assert same(bits_of(tensors), bits_of(based))


def test_a_base_that_is_not_there_is_refused_with_what_to_do(
    based: nn.Module, base: Path, subscribe: Subscribe
) -> None:
    shutil.rmtree(base)
    tensors = tensors_of(based)
    with pytest.raises(ConfigError, match="does not exist") as caught:
        subscribe(tensors, base=base).update()
    assert "give the folder of the base checkpoint" in caught.value.hint
    assert not any(bits.any() for bits in bits_of(tensors).values())


def altered(base: Path) -> None:
    file = base / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def missing(base: Path) -> None:
    (base / "model.safetensors").rename(base / "other.safetensors")


def truncated(base: Path) -> None:
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [altered, missing, truncated])
def test_a_base_that_is_not_the_one_referred_to_is_refused(
    based: nn.Module, base: Path, subscribe: Subscribe, damage: Callable[[Path], None]
) -> None:
    damage(base)
    tensors = tensors_of(based)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        subscribe(tensors, base=base).update()
    assert not any(bits.any() for bits in bits_of(tensors).values())


def test_a_base_that_is_gone_is_planned_around(
    based: nn.Module, base: Path, store: MemoryStore, subscribe: Subscribe
) -> None:
    shutil.rmtree(base)
    with Publisher(PublishConfig(url=store.url), store=store) as publisher:
        publisher.attach(based)  # nothing can be rebuilt, so nothing is known to differ
        train_(based, 3)
        publisher.publish()
        session: Any = publisher._session
        publisher.flush()
        session.add_anchor(session.begin_anchor(), topic="")
    tensors = tensors_of(based)
    receipt = present(subscribe(tensors, base=base).update())
    assert "anchor->" in receipt.plan
    assert same(bits_of(tensors), bits_of(based))


# A chain that nobody can read


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize("key", ["chain.json", "table.json"])
def test_a_chain_whose_identity_is_damaged_is_refused(
    subscribe: Subscribe, zeros: dict[str, Tensor], faulty: FaultyStore, key: str
) -> None:
    faulty.add(Fault("truncate", key, times=None))
    with pytest.raises(FormatError):
        subscribe(zeros, on=faulty).update()
    faulty.mend()
    assert chain.Chain.open(faulty).identity is not None
