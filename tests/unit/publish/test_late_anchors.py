"""Versions are published while an anchor is on its way, and it is still exactly its version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from deltachain.chain.chain import Chain
from deltachain.errors import ChainError, PublisherFencedError, StoreUnavailableError
from deltachain.format.keys import HEAD_KEY
from deltachain.publish import Publisher
from deltachain.publish.model.source import ModelTensors, collect_weights
from deltachain.publish.publisher import AnchorThread
from deltachain.publish.session import VersionBits
from deltachain.publish.snapshot import Snapshot
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.types import Buffer
from tests.support.models import bits_of, fill_, recompute, same, tensors_of, train_
from tests.support.values import present

Attach = Callable[..., Publisher]


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
    attach: Attach, gated: GatedStore, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = attach_to(gated, attach, model)
    gated.shut()
    step(publisher, model, 1)
    assert gated.waiting.wait(60)
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
    assert not [t for t in threading.enumerate() if t.name.startswith("deltachain-anchor")]


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
