import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deltachain.chain.chain import Chain
from deltachain.errors import (
    ChainMismatchError,
    ConfigError,
    PublisherFencedError,
    StoreUnavailableError,
)
from deltachain.publish import Publisher
from deltachain.store import MemoryStore
from tests.support.faults import Fault, FaultyStore
from tests.support.models import State, TinyModel, bits_of, plain_model, recompute, same, train_
from tests.support.values import present

Attach = Callable[..., Publisher]


@pytest.fixture
def trained(attach: Attach) -> TinyModel:
    """A model whose chain has versions 0 to 3."""
    model = TinyModel()
    publisher = attach(model, anchor_factor=1000.0)
    for step in (1, 2, 3):
        train_(model, step)
        publisher.publish(step=step)
        publisher.flush()
    publisher.close()
    return model


def at_step(step: int) -> TinyModel:
    """The model as a checkpoint of that step has it."""
    model = TinyModel()
    for done in range(1, step + 1):
        train_(model, done)
    return model


def versions(store: MemoryStore) -> list[tuple[int, str, int]]:
    """Version, kind and epoch of all that is committed; every one is proven on the way."""
    manifests = [r.committed.manifest for r in recompute(store).values()]
    return [(m.version, m.edge.kind, m.epoch) for m in manifests]


def head(store: MemoryStore) -> State:
    found = recompute(store)
    return found[max(found)].state


# What cannot be continued


@pytest.mark.parametrize(
    "other",
    [
        plain_model(),
        TinyModel(width=32),
        nn.Sequential(nn.Linear(24, 40, dtype=torch.float32), nn.Linear(40, 8)),
    ],
)
def test_the_chain_of_another_model_is_refused(
    attach: Attach, store: MemoryStore, trained: TinyModel, other: nn.Module
) -> None:
    before = versions(store)
    with pytest.raises(ChainMismatchError, match="another model") as caught:
        attach(other)
    assert "URL of its own" in caught.value.hint
    assert versions(store) == before
    assert same(recompute(store)[3].state, bits_of(trained))


def test_another_wire_dtype_is_another_model(attach: Attach) -> None:
    attach(plain_model(dtype=torch.float32))
    with pytest.raises(ChainMismatchError):
        attach(plain_model(dtype=torch.float32), dtype="BF16")


def test_another_publisher_that_takes_over_first_wins(
    attach: Attach, store: MemoryStore, trained: TinyModel
) -> None:
    faulty = FaultyStore(store, Fault(lambda: attach(trained), "manifests/"))
    with pytest.raises(PublisherFencedError):
        attach(trained, on=faulty)
    assert versions(store)[-1] == (4, "delta", 1)


def test_a_last_version_of_the_publisher_before_is_taken_over_too(
    attach: Attach, store: MemoryStore
) -> None:
    old, new = plain_model(), plain_model()
    before = attach(old)
    train_(old, 1)

    def publish_last() -> None:
        before.publish(step=1)
        before.flush()

    owner = attach(new, on=FaultyStore(store, Fault(publish_last, "manifests/")))
    assert [(v, e) for v, _, e in versions(store)] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert owner.version == 3
    assert same(head(store), bits_of(new))


# What can


def test_a_restart_in_the_same_state_adds_an_empty_version(
    attach: Attach, store: MemoryStore, trained: TinyModel
) -> None:
    publisher = attach(at_step(3))
    assert (publisher.version, publisher.epoch) == (4, 1)
    assert versions(store)[3:] == [(3, "delta", 0), (4, "delta", 1)]
    assert recompute(store)[4].committed.manifest.edge.parts == ()
    assert same(head(store), bits_of(trained))


def test_a_restart_from_an_older_checkpoint_publishes_the_difference(
    attach: Attach, store: MemoryStore, trained: TinyModel
) -> None:
    model = at_step(1)
    publisher = attach(model)
    assert versions(store)[4:] == [(4, "delta", 1), (5, "delta", 1)]
    assert not same(bits_of(model), bits_of(trained))
    assert same(head(store), bits_of(model))
    train_(model, 9)
    publisher.publish(step=9)
    publisher.flush()
    assert same(head(store), bits_of(model))


@pytest.mark.parametrize("encoding", ["overwrite", "raw"])
def test_the_difference_is_written_as_configured(
    attach: Attach, store: MemoryStore, trained: TinyModel, encoding: str
) -> None:
    attach(at_step(2), encoding=encoding)
    newest = recompute(store)[5]
    assert encoding in newest.committed.manifest.edge.encodings
    assert not same(newest.state, bits_of(trained))


def test_a_restart_from_an_unrelated_state_starts_over_with_an_anchor(
    attach: Attach, store: MemoryStore, trained: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyModel(seed=77)
    attach(model)
    assert versions(store)[4:] == [(4, "delta", 1), (5, "anchor", 1)]
    assert "starts over with an anchor" in caplog.text
    assert same(head(store), bits_of(model))
    assert not same(head(store), bits_of(trained))


@pytest.mark.parametrize("action", ["hide", "corrupt", "truncate"])
@pytest.mark.parametrize("prefix", ["anchors/", "deltas/00000000000000000002"])
def test_a_chain_that_can_not_be_rebuilt_is_continued_with_an_anchor(
    attach: Attach, store: MemoryStore, trained: TinyModel, action: str, prefix: str
) -> None:
    model = at_step(1)
    attach(model, on=FaultyStore(store, Fault(action, prefix, times=None)))  # type: ignore[arg-type]
    assert versions(store)[4:] == [(4, "delta", 1), (5, "anchor", 1)]
    assert same(head(store), bits_of(model))
    assert not same(bits_of(model), bits_of(trained))


def test_an_object_that_is_corrupt_once_is_fetched_again(
    attach: Attach, store: MemoryStore, trained: TinyModel
) -> None:
    model = at_step(1)
    attach(model, on=FaultyStore(store, Fault("corrupt", "anchors/")))
    assert versions(store)[5] == (5, "delta", 1)
    assert not same(bits_of(model), bits_of(trained))


def test_attaching_can_be_tried_again(
    attach: Attach, store: MemoryStore, trained: TinyModel
) -> None:
    faulty = FaultyStore(store, Fault("fail", "deltas/"))
    with pytest.raises(StoreUnavailableError):
        attach(at_step(1), on=faulty)
    attach(at_step(1), on=faulty)
    assert same(head(store), bits_of(at_step(1)))
    assert not same(head(store), bits_of(trained))


def test_a_chain_without_a_version_is_begun(attach: Attach, store: MemoryStore) -> None:
    with pytest.raises(StoreUnavailableError):
        attach(plain_model(), on=FaultyStore(store, Fault("fail", "anchors/")))
    attach(plain_model())
    assert versions(store) == [(0, "anchor", 0)]


# A base checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(plain_model().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


def test_a_model_that_does_not_hold_the_base_is_refused(
    attach: Attach, store: MemoryStore, base: Path
) -> None:
    with pytest.raises(ConfigError, match="does not hold the bits") as caught:
        attach(plain_model(1), base=base)
    assert "before training" in caught.value.hint
    assert store.find("manifests/00000000000000000000.json") is None


def test_a_base_that_lacks_a_tensor_is_refused(attach: Attach, tmp_path: Path) -> None:
    tensors = plain_model().state_dict()
    del tensors["1.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has None, the model has .*1\.bias"):
        attach(plain_model(), base=tmp_path)


def test_a_base_is_referred_to_and_not_uploaded(
    attach: Attach, store: MemoryStore, base: Path
) -> None:
    model = plain_model()
    publisher = attach(model, base=base)
    train_(model, 1)
    publisher.publish()
    publisher.flush()
    found = recompute(store)
    reference = present(found[0].committed.manifest.edge.reference)
    assert [file.name for file in reference.files] == ["model.safetensors"]
    assert list(store.list("anchors/")) == []
    assert same(found[1].state, bits_of(model))
    assert [info.key.rsplit("/", 1)[1] for info in store.list("assets/")] == ["config.json"]


def test_a_restart_rebuilds_from_the_base_wherever_it_lies_now(
    attach: Attach, store: MemoryStore, base: Path, tmp_path: Path
) -> None:
    model = plain_model()
    publisher = attach(model, base=base)
    for step in (1, 2):
        train_(model, step)
        publisher.publish(step=step)
        publisher.flush()
    moved = tmp_path / "elsewhere"
    shutil.copytree(base, moved)
    again = plain_model()
    train_(again, 1)
    attach(again, base=moved)
    assert versions(store)[4] == (4, "delta", 1)
    assert same(head(store), bits_of(again))


def test_a_restart_without_its_base_starts_over_with_an_anchor(
    attach: Attach, store: MemoryStore, base: Path
) -> None:
    model = plain_model()
    attach(model, base=base)
    shutil.rmtree(base)
    train_(model, 1)
    attach(model)
    newest = present(Chain.open(store).head())
    assert (newest.version, newest.manifest.edge.kind) == (2, "anchor")
