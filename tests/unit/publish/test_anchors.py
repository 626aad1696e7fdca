from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from deltachain.chain.chain import Chain
from deltachain.chain.plan import VERSIONS_LISTED
from deltachain.format.keys import HEAD_KEY
from deltachain.publish import Publisher, snapshot
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from tests.support.faults import Fault, FaultyStore
from tests.support.models import (
    TinyModel,
    bits_of,
    plain_model,
    recompute,
    same,
    tensors_of,
    train_,
)
from tests.support.values import present

Attach = Callable[..., Publisher]


def publish(publisher: Publisher, model: nn.Module, steps: range) -> None:
    for step in steps:
        train_(model, step)
        publisher.publish(step=step)
        publisher.flush()


def anchored(store: MemoryStore) -> list[int]:
    """Versions that have an anchor of their own, each proven to lead to the same bits."""
    return [version for version, found in recompute(store).items() if found.anchored]


def joined(store: MemoryStore, model: nn.Module) -> str:
    """The plan by which a newcomer came to hold the model."""
    tensors = tensors_of(model)
    receipt = present(Subscriber("memory://unused", tensors, store=store).update())
    assert same(bits_of(tensors), bits_of(model))
    return receipt.plan


def test_without_a_need_there_is_no_anchor(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publish(attach(model, anchor_factor=1000.0), model, range(1, 20))
    assert anchored(store) == []
    assert joined(store, model).count("delta->") == 19


def test_anchors_are_added_when_a_newcomer_would_pay_too_much(
    attach: Attach, store: MemoryStore
) -> None:
    model = nn.Linear(640, 640, dtype=torch.bfloat16)  # deltas that are larger than manifests
    publisher = attach(model, anchor_factor=3.0)
    for step in range(1, 50):
        train_(model, step, share=0.7)
        publisher.publish(step=step)
        publisher.flush()
    found = anchored(store)
    assert 2 < len(found) < 10
    assert joined(store, model).count("->") <= 50 // len(found)


def test_anchors_come_as_often_as_is_set(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publisher = attach(model, anchor_every=3)
    publish(publisher, model, range(1, 30))
    gaps = [later - earlier for earlier, later in pairwise([0, *anchored(store)])]
    assert set(gaps) == {3}


def test_the_anchor_of_the_head_is_found_by_the_hint_and_by_the_next_manifest(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    publisher = attach(model, anchor_factor=0.001)
    publish(publisher, model, range(1, 3))
    store.delete(HEAD_KEY)
    assert joined(store, model).startswith("nothing to 2: anchor->1 ")
    publish(publisher, model, range(3, 4))
    store.delete(HEAD_KEY)
    assert "anchor->2 " in joined(store, model)


def manifests_of_a_plan(store: MemoryStore) -> int:
    """Number of manifests that a newcomer reads to plan a way through versions 0 to 79."""
    faulty = FaultyStore(store)
    chain = Chain.open(faulty)
    head = present(chain.head())
    assert [edge.version for edge in chain.plan(None, head).edges] == list(range(80))
    return len([key for key in faulty.keys_read if key.startswith("manifests/")])


def test_a_long_history_is_read_a_window_at_a_time(attach: Attach, store: MemoryStore) -> None:
    model = nn.Linear(1280, 1280, dtype=torch.bfloat16)
    publisher = attach(model, anchor_factor=1000.0)
    for step in range(1, 80):  # large deltas: each manifest lists all 16 versions
        train_(model, step, share=0.7)
        publisher.publish(step=step)
        publisher.flush()
    assert manifests_of_a_plan(store) <= 80 // VERSIONS_LISTED + 2


def test_small_deltas_have_small_manifests_and_few_of_them_are_read(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    publish(attach(model, anchor_factor=1000.0), model, range(1, 80))
    sizes = [info.nbytes for info in store.list("manifests/")]
    assert sum(sizes) / len(sizes) < 2048
    assert max(sizes) > 3072  # of a version divisible by 16
    assert manifests_of_a_plan(store) <= 80 // VERSIONS_LISTED + 6


def test_a_publisher_started_again_lists_every_edge_it_claims(
    attach: Attach, store: MemoryStore
) -> None:
    model, step = plain_model(), 0
    for _ in range(7):
        publisher = attach(model, anchor_every=5)
        for _ in range(6):
            step += 1
            train_(model, step)
            publisher.publish(step=step)
        publisher.close()
    chain = Chain.open(store)
    head = present(chain.head())
    manifests = [committed.manifest for committed in chain.history(0, head.version)]
    for manifest in manifests:
        listed = {edge.version for edge in manifest.recent if not edge.record}
        assert listed >= set(range(manifest.window_from, manifest.version))
        assert any(edge.base is None for edge in manifest.recent) or manifest.version == 0


def test_the_newest_anchor_is_where_newcomers_start_unless_it_is_unusable(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    publish(attach(model, anchor_factor=0.001), model, range(1, 4))
    assert anchored(store) == [1, 2, 3]
    assert joined(store, model).startswith("nothing to 3: anchor->3 ")
    for info in list(store.list("anchors/00000000000000000003")):
        store.delete(info.key)
    assert joined(store, model).startswith("nothing to 3: anchor->2 ")


def test_an_anchor_holds_the_bits_of_its_version_although_training_goes_on(
    attach: Attach, store: MemoryStore
) -> None:
    # Training moves on while the anchor is put: it must hold the bits of the snapshot.
    model = plain_model()

    def train_on() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()

    faulty = FaultyStore(store)
    publisher = attach(model, on=faulty, anchor_factor=0.001)
    faulty.add(Fault(train_on, "manifests/"))
    train_(model, 1)
    truth = bits_of(model)
    publisher.publish()
    publisher.flush()
    assert anchored(store) == [1]
    assert same(recompute(store)[1].state, truth)


def test_an_anchor_of_changed_frozen_weights_is_not_recorded(
    attach: Attach,
    store: MemoryStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "TURN_NUMEL", 0)  # so that no diff reads frozen weights in turn
    model = TinyModel()
    publisher = attach(model, anchor_factor=0.001)
    frozen = next(parameter for parameter in model.parameters() if not parameter.requires_grad)
    frozen.data.add_(1)  # which torch counts as no write, so that the diff passes it over
    publish(publisher, model, range(1, 2))
    assert anchored(store) == []
    assert "a frozen weight was changed in place" in caplog.text
    newcomer = Subscriber("memory://unused", tensors_of(model), store=store)
    assert newcomer.update() is not None
    assert newcomer.version == 1
