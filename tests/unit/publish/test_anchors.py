from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from deltachain.chain.chain import Chain
from deltachain.chain.plan import VERSIONS_LISTED
from deltachain.errors import ChainError, PublisherFencedError, StoreUnavailableError
from deltachain.format.keys import HEAD_KEY
from deltachain.publish import Publisher, snapshot
from deltachain.publish.model.source import ModelTensors, collect_weights
from deltachain.publish.publisher import AnchorThread
from deltachain.publish.session import VersionBits
from deltachain.publish.snapshot import Snapshot
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.types import Buffer
from tests.support.faults import Fault, FaultyStore
from tests.support.models import (
    TinyModel,
    bits_of,
    fill_,
    plain_model,
    recompute,
    same,
    tensors_of,
    train_,
)
from tests.support.values import present


class GatedStore(MemoryStore):
    """Parts of anchors wait until ``gate`` is set; with ``failure`` they then fail."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def shut(self) -> None:
        self.gate.clear()
        self.waiting.clear()

    @override
    def put(self, key: str, data: Buffer) -> str:
        if key.startswith("anchors/") and not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(60)
            if self.failure is not None:
                raise self.failure
        return super().put(key, data)


@pytest.fixture
def gated() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()


@pytest.fixture
def model() -> nn.Module:
    """Ten tensors, most of which an anchor in parts of one tensor has not reached when it waits."""
    layers = [nn.Linear(40, 40, bias=False, dtype=torch.bfloat16) for _ in range(10)]
    made = nn.Sequential(*layers)
    fill_(made, 0)
    return made


def attach_to(store: MemoryStore, attach: Attach, model: nn.Module, **settings: float) -> Publisher:
    settings = {"anchor_factor": 0.001, "part_nbytes": 1, "anchor_memory": 100.0} | settings
    return attach(model, on=store, **settings)


def step(publisher: Publisher, model: nn.Module, number: int) -> int:
    """Train and publish one version, without waiting for an anchor; return its number."""
    train_(model, number, share=0.05)
    return publisher.publish(step=number).result(60).version


def test_versions_are_committed_while_an_anchor_is_on_its_way(
    attach: Attach, gated: GatedStore, model: nn.Module
) -> None:
    publisher = attach_to(gated, attach, model)
    gated.shut()
    assert step(publisher, model, 1) == 1
    truth = bits_of(model)
    assert gated.waiting.wait(60)
    assert [step(publisher, model, number) for number in range(2, 7)] == [2, 3, 4, 5, 6]
    assert publisher.last is not None
    assert publisher.last.kept_nbytes > 0
    assert not recompute(gated)[1].anchored
    gated.gate.set()
    publisher.flush()
    found = recompute(gated)
    assert [version for version in found if found[version].anchored] == [1]
    assert same(found[1].state, truth)
    assert same(found[6].state, bits_of(model))
    assert step(publisher, model, 7) == 7  # lists it, and gets an anchor of its own
    publisher.flush()
    gated.delete(HEAD_KEY)
    tensors = tensors_of(model)
    head = present(Chain.open(gated).head())
    assert [(e.version, e.kind) for e in head.manifest.recent if e.base is None] == [
        (0, "anchor"),
        (1, "anchor"),
    ]
    receipt = present(Subscriber("memory://unused", tensors, store=gated).update())
    assert receipt.plan.startswith("nothing to 7: anchor->1 ")


def test_the_next_publisher_lists_an_anchor_that_only_the_hint_has(
    attach: Attach, gated: GatedStore, model: nn.Module
) -> None:
    publisher = attach_to(gated, attach, model)
    gated.shut()
    step(publisher, model, 1)
    assert gated.waiting.wait(60)
    step(publisher, model, 2)
    gated.gate.set()
    publisher.close()
    attach_to(gated, attach, model, anchor_factor=1000.0).close()
    gated.delete(HEAD_KEY)
    head = present(Chain.open(gated).head())
    assert head.version == 3
    assert 1 in [edge.version for edge in head.manifest.recent if edge.kind == "anchor"]


def test_a_store_that_fails_in_the_middle_of_an_anchor_fails_no_version(
    attach: Attach, gated: GatedStore, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = attach_to(gated, attach, model)
    gated.failure = StoreUnavailableError("the store is down")
    gated.shut()
    step(publisher, model, 1)
    assert gated.waiting.wait(60)
    assert step(publisher, model, 2) == 2
    gated.gate.set()
    publisher.flush()
    assert "no anchor yet" in caplog.text
    gated.failure = None
    assert step(publisher, model, 3) == 3
    publisher.flush()
    found = recompute(gated)
    assert [version for version in found if found[version].anchored] == [3]


def test_a_version_that_fails_beside_an_anchor_leaves_it_exact(
    attach: Attach, gated: GatedStore, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = attach_to(gated, attach, model, anchor_factor=0.001)
    gated.shut()
    step(publisher, model, 1)
    truth = bits_of(model)
    assert gated.waiting.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "put_if_absent", _unavailable)
        train_(model, 2, share=0.05)
        future = publisher.publish(step=2)
        with pytest.raises(StoreUnavailableError):
            future.result(60)
    with pytest.raises(StoreUnavailableError):  # reverts the diff
        publisher.publish(step=2)
    assert step(publisher, model, 3) == 2
    gated.gate.set()
    publisher.flush()
    found = recompute(gated)
    assert found[1].anchored
    assert same(found[1].state, truth)
    assert same(found[2].state, bits_of(model))


def _unavailable(*_: object) -> None:
    raise StoreUnavailableError("the store is down")


def test_without_memory_a_version_stays_in_flight_until_the_anchor_has_landed(
    attach: Attach, gated: GatedStore, model: nn.Module
) -> None:
    publisher = attach_to(gated, attach, model, anchor_memory=0.0)
    gated.shut()
    step(publisher, model, 1)
    assert gated.waiting.wait(60)
    train_(model, 2, share=0.05)
    second = publisher.publish(step=2)
    while publisher.last is None or publisher.last.version < 2:
        pass
    assert not second.done()
    train_(model, 3, share=0.05)
    third = publisher.publish(step=3)
    assert not third.running()  # no version has it yet
    gated.gate.set()
    assert second.result(60).kept_nbytes > 0
    publisher.flush()
    assert third.result(60).version == 3
    found = recompute(gated)
    assert found[1].anchored
    assert same(found[3].state, bits_of(model))


def test_a_publisher_fenced_beside_an_anchor_abandons_it(
    attach: Attach, gated: GatedStore, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = attach_to(gated, attach, model)
    gated.shut()
    step(publisher, model, 1)
    assert gated.waiting.wait(60)
    other = nn.Sequential(*[nn.Linear(40, 40, bias=False, dtype=torch.bfloat16) for _ in range(10)])
    other.load_state_dict(model.state_dict())
    owner = attach(other, on=gated, anchor_factor=1000.0)
    train_(model, 2)
    with pytest.raises(PublisherFencedError):
        publisher.publish(step=2).result(60)
    with pytest.raises(PublisherFencedError):
        publisher.publish(step=3)
    gated.gate.set()
    publisher.close()
    assert "another publisher owns the chain" in caplog.text
    found = recompute(gated)
    assert not any(version.anchored for version in found.values())
    assert step(owner, other, 4) == 3


def test_an_interrupted_close_commits_the_version_and_abandons_the_anchor(
    attach: Attach,
    gated: GatedStore,
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    new_threads: NewThreads,
) -> None:
    publisher = attach_to(gated, attach, model)
    gated.shut()
    step(publisher, model, 1)
    assert gated.waiting.wait(60)
    assert new_threads("deltachain-anchor")
    train_(model, 2)
    publisher.publish(step=2)

    def interrupted(_: AnchorThread) -> None:
        threading.Timer(0.2, gated.gate.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(AnchorThread, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publisher.close()
    found = recompute(gated)
    assert same(found[2].state, bits_of(model))
    assert not found[1].anchored
    assert not new_threads("deltachain-anchor")


def test_bits_of_a_version_stay_whatever_happens_to_the_snapshot(model: nn.Module) -> None:
    source: ModelTensors = collect_weights(model)
    snapshot, changing = Snapshot(source), threading.Lock()
    truth = {w.spec.name: snapshot.bits(w).copy() for w in source.weights}
    late = VersionBits(snapshot, source.weights, changing)
    state, first = snapshot.state, source.weights[0]
    for number in range(1, 9):
        train_(model, number, share=0.3)
        diff = snapshot.diff_()
        late.keep(diff)
        if number % 3 == 0:
            snapshot.restore(diff)
        if number % 6 == 0:
            snapshot.redo(diff)
            late.keep(diff)
        if number == 4:
            np.testing.assert_array_equal(late.take(first), truth[first.spec.name])
    assert late.state == state != snapshot.state
    assert late.kept_nbytes > 0
    for weight in source.weights[1:-1]:
        np.testing.assert_array_equal(late.take(weight), truth[weight.spec.name])
    late.abandon("no more")
    assert late.kept_nbytes == 0
    with pytest.raises(ChainError, match="no more"):
        late.take(source.weights[-1])


Attach = Callable[..., Publisher]
NewThreads = Callable[[str], list[threading.Thread]]


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


@pytest.mark.full
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
