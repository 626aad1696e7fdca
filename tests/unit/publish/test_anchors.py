from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from deltachain.chain.chain import Chain
from deltachain.chain.plan import VERSIONS_LISTED
from deltachain.errors import ChainError, PublisherFencedError, StoreUnavailableError
from deltachain.format.keys import HEAD_KEY
from deltachain.publish import snapshot
from deltachain.publish.model.source import collect_weights
from deltachain.publish.publisher import AnchorThread
from deltachain.publish.session import VersionBits
from deltachain.publish.snapshot import Snapshot
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.types import Buffer
from tests.support.faults import FaultyStore
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
from tests.unit.publish.chains import Attach, NewThreads, assert_head_is, head_of, publish


def anchored(store: MemoryStore) -> list[int]:
    """Versions that have an anchor of their own, each proven to lead to the same bits."""
    return [version for version, found in recompute(store).items() if found.anchored]


def joined(store: MemoryStore, model: nn.Module) -> str:
    """The plan by which a newcomer came to hold the model."""
    tensors = tensors_of(model)
    receipt = present(Subscriber("memory://unused", tensors, store=store).update())
    assert same(bits_of(tensors), bits_of(model))
    return receipt.plan


class Held(MemoryStore):
    """Parts of anchors wait until ``gate`` is set; with ``failure`` they then fail.

    A model is published to it, until the anchor of version 1 waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    @override
    def put(self, key: str, data: Buffer) -> str:
        if key.startswith("anchors/") and not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(60)
            if self.failure is not None:
                raise self.failure
        return super().put(key, data)

    def begin(self, attach: Attach, **settings: float) -> None:
        settings = {"anchor_factor": 0.001, "part_nbytes": 1, "anchor_memory": 100.0} | settings
        self.model = ten_layers()
        self.publisher = attach(self.model, on=self, **settings)
        self.gate.clear()
        self.step(1)
        self.truth = bits_of(self.model)
        assert self.waiting.wait(60)

    def step(self, number: int) -> int:
        """Train and publish a version, without waiting for an anchor; return its number."""
        train_(self.model, number, share=0.05)
        return self.publisher.publish(step=number).result(60).version


def ten_layers() -> nn.Module:
    """Most of which an anchor in parts of one tensor has not reached when it waits."""
    layers = [nn.Linear(40, 40, bias=False, dtype=torch.bfloat16) for _ in range(10)]
    made = nn.Sequential(*layers)
    fill_(made, 0)
    return made


Hold: TypeAlias = Callable[..., Held]


@pytest.fixture
def hold(attach: Attach) -> Iterator[Hold]:
    store = Held()

    def begin(**settings: float) -> Held:
        store.begin(attach, **settings)
        return store

    yield begin
    store.gate.set()


def test_versions_are_committed_while_an_anchor_is_on_its_way(hold: Hold) -> None:
    one = hold()
    assert [one.step(number) for number in range(2, 7)] == [2, 3, 4, 5, 6]
    assert present(one.publisher.last).kept_nbytes > 0
    assert not recompute(one)[1].anchored
    one.gate.set()
    one.publisher.flush()
    assert anchored(one) == [1]
    assert same(recompute(one)[1].state, one.truth)
    assert_head_is(one.model, 6, one)
    assert one.step(7) == 7  # lists it, and gets an anchor of its own
    one.publisher.flush()
    one.delete(HEAD_KEY)
    listed = [(e.version, e.kind) for e in head_of(one).manifest.recent if e.base is None]
    assert listed == [(0, "anchor"), (1, "anchor")]
    assert joined(one, one.model).startswith("nothing to 7: anchor->1 ")


def test_the_next_publisher_lists_an_anchor_that_only_the_hint_has(
    hold: Hold, attach: Attach
) -> None:
    one = hold()
    one.step(2)
    one.gate.set()
    one.publisher.close()
    attach(one.model, on=one, anchor_factor=1000.0).close()
    one.delete(HEAD_KEY)
    head = head_of(one)
    assert head.version == 3
    assert 1 in [edge.version for edge in head.manifest.recent if edge.kind == "anchor"]


def test_a_store_that_fails_in_the_middle_of_an_anchor_fails_no_version(
    hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    one = hold()
    one.failure = StoreUnavailableError("the store is down")
    assert one.step(2) == 2
    one.gate.set()
    one.publisher.flush()
    assert "no anchor yet" in caplog.text
    one.failure = None
    assert one.step(3) == 3
    one.publisher.flush()
    assert anchored(one) == [3]


def test_a_version_that_fails_beside_an_anchor_leaves_it_exact(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object) -> None:
        raise StoreUnavailableError("the store is down")

    one = hold()
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "put_if_absent", unavailable)
        with pytest.raises(StoreUnavailableError):
            one.step(2)
    with pytest.raises(StoreUnavailableError):  # reverts the diff
        one.publisher.publish(step=2)
    assert one.step(3) == 2
    one.gate.set()
    one.publisher.flush()
    assert 1 in anchored(one)
    assert same(recompute(one)[1].state, one.truth)
    assert_head_is(one.model, 2, one)


def test_without_memory_a_version_stays_in_flight_until_the_anchor_has_landed(hold: Hold) -> None:
    one = hold(anchor_memory=0.0)
    train_(one.model, 2, share=0.05)
    second = one.publisher.publish(step=2)
    while present(one.publisher.last).version < 2:
        pass
    assert not second.done()
    train_(one.model, 3, share=0.05)
    third = one.publisher.publish(step=3)
    assert not third.running()  # no version has it yet
    one.gate.set()
    assert second.result(60).kept_nbytes > 0
    one.publisher.flush()
    assert third.result(60).version == 3
    assert 1 in anchored(one)
    assert_head_is(one.model, 3, one)


def test_a_publisher_fenced_beside_an_anchor_abandons_it(
    hold: Hold, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    one = hold()
    other = ten_layers()
    other.load_state_dict(one.model.state_dict())
    owner = attach(other, on=one, anchor_factor=1000.0)
    with pytest.raises(PublisherFencedError):
        one.step(2)
    with pytest.raises(PublisherFencedError):
        one.publisher.publish(step=3)
    one.gate.set()
    one.publisher.close()
    assert "another publisher owns the chain" in caplog.text
    assert anchored(one) == []
    publish(owner, other, 4)
    assert owner.version == 3


def test_an_interrupted_close_commits_the_version_and_abandons_the_anchor(
    hold: Hold, monkeypatch: pytest.MonkeyPatch, new_threads: NewThreads
) -> None:
    one = hold()
    assert new_threads("deltachain-anchor")
    train_(one.model, 2)
    one.publisher.publish(step=2)

    def interrupted(_: AnchorThread) -> None:
        threading.Timer(0.2, one.gate.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(AnchorThread, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.publisher.close()
    assert same(recompute(one)[2].state, bits_of(one.model))
    assert not recompute(one)[1].anchored
    assert not new_threads("deltachain-anchor")


@pytest.mark.parametrize("place", [None, "host", "device"])
def test_bits_of_a_version_stay_whatever_happens_to_the_snapshot(
    place: Literal["host", "device"] | None,
) -> None:
    model = ten_layers()
    source = collect_weights(model)
    snapshot = Snapshot(source, where=place, on_device=place is not None)
    changing = threading.Lock()
    truth = {w.spec.name: snapshot.bits(w).copy() for w in source.weights}
    late = VersionBits(snapshot, source.weights, changing)
    state, first = snapshot.state, source.weights[0]
    snapshot.on_change = late.keep
    for number in range(1, 9):
        train_(model, number, share=0.3)
        diff = snapshot.diff_()  # number 4 takes bits before the changes of its diff are found
        if number % 3 == 0:
            snapshot.restore(diff)
        if number % 6 == 0:
            snapshot.redo(diff)
            late.keep(diff.live)
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


def test_without_a_need_there_is_no_anchor(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publish(attach(model, anchor_factor=1000.0), model, *range(1, 20))
    assert anchored(store) == []
    assert joined(store, model).count("delta->") == 19


def test_anchors_are_added_when_a_newcomer_would_pay_too_much(
    attach: Attach, store: MemoryStore
) -> None:
    model = nn.Linear(640, 640, dtype=torch.bfloat16)  # deltas that are larger than manifests
    publish(attach(model, anchor_factor=3.0), model, *range(1, 50), share=0.7)
    found = anchored(store)
    assert 2 < len(found) < 10
    assert joined(store, model).count("->") <= 50 // len(found)


def test_anchors_come_as_often_as_is_set(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publish(attach(model, anchor_every=3), model, *range(1, 30))
    assert {later - earlier for earlier, later in pairwise([0, *anchored(store)])} == {3}


def test_the_anchor_of_the_head_is_found_by_the_hint_and_by_the_next_manifest(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    publisher = attach(model, anchor_factor=0.001)
    publish(publisher, model, 1, 2)
    store.delete(HEAD_KEY)
    assert joined(store, model).startswith("nothing to 2: anchor->1 ")
    publish(publisher, model, 3)
    store.delete(HEAD_KEY)
    assert "anchor->2 " in joined(store, model)


def manifests_of_a_plan(store: MemoryStore) -> int:
    """Number of manifests that a newcomer reads to plan a way through versions 0 to 79."""
    faulty = FaultyStore(store)
    chain = Chain.open(faulty)
    head = present(chain.head())
    assert [edge.version for edge in chain.plan(None, head).edges] == list(range(80))
    return len([key for key in faulty.keys_read if key.startswith("manifests/")])


@pytest.mark.slow
def test_a_long_history_is_read_a_window_at_a_time(attach: Attach, store: MemoryStore) -> None:
    model = nn.Linear(1280, 1280, dtype=torch.bfloat16)
    publisher = attach(model, anchor_factor=1000.0)
    publish(publisher, model, *range(1, 80), share=0.7)  # each manifest lists all 16 versions
    assert manifests_of_a_plan(store) <= 80 // VERSIONS_LISTED + 2


def test_small_deltas_have_small_manifests_and_few_of_them_are_read(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    publish(attach(model, anchor_factor=1000.0), model, *range(1, 80))
    sizes = [info.nbytes for info in store.list("manifests/")]
    assert sum(sizes) / len(sizes) < 2048
    assert max(sizes) > 3072  # of a version divisible by 16
    assert manifests_of_a_plan(store) <= 80 // VERSIONS_LISTED + 6


def test_a_publisher_started_again_lists_every_edge_it_claims(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    for start in range(0, 42, 6):
        publisher = attach(model, anchor_every=5)
        for step in range(start + 1, start + 7):
            train_(model, step)
            publisher.publish(step=step)
        publisher.close()
    for committed in Chain.open(store).history(0, head_of(store).version):
        manifest = committed.manifest
        listed = {edge.version for edge in manifest.recent if not edge.record}
        assert listed >= set(range(manifest.window_from, manifest.version))
        assert any(edge.base is None for edge in manifest.recent) or manifest.version == 0


def test_the_newest_anchor_is_where_newcomers_start_unless_it_is_unusable(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    publish(attach(model, anchor_factor=0.001), model, 1, 2, 3)
    assert anchored(store) == [1, 2, 3]
    assert joined(store, model).startswith("nothing to 3: anchor->3 ")
    for info in list(store.list("anchors/00000000000000000003")):
        store.delete(info.key)
    assert joined(store, model).startswith("nothing to 3: anchor->2 ")


def test_an_anchor_of_changed_frozen_weights_is_not_recorded(
    attach: Attach,
    store: MemoryStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "TURN_NUMEL", 0)  # so that no diff reads frozen weights in turn
    model = TinyModel()
    publisher = attach(model, anchor_factor=0.001)
    model.frozen.weight.data.add_(1)  # which torch counts as no write: the diff passes it over
    publish(publisher, model, 1)
    assert anchored(store) == []
    assert "a frozen weight was changed in place" in caplog.text
    newcomer = Subscriber("memory://unused", tensors_of(model), store=store)
    assert newcomer.update() is not None
    assert newcomer.version == 1
