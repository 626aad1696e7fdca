"""Gaps between manifests, in every mode of following."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from deltachain.errors import (
    BrokenChainError,
)
from deltachain.format.keys import HEAD_KEY, manifest_key
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.subscribe.subscriber import LOOK_BACK
from tests.support.models import (
    TinyModel,
    bits_of,
    same,
)
from tests.unit.manifest_chains import SingleWriterStore, WideStore
from tests.unit.subscribe.accidents import Told, nothing

Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]


@pytest.fixture(params=[MemoryStore, SingleWriterStore, WideStore])
def store(request: pytest.FixtureRequest) -> MemoryStore:
    made: MemoryStore = request.param()
    return made


@pytest.fixture
def subscriber(zeros: dict[str, Tensor], subscribe: Subscribe) -> Subscriber:
    return subscribe(zeros)


def gap(store: MemoryStore, *versions: int) -> None:
    for version in versions:
        store.delete(manifest_key(version))


@pytest.mark.parametrize("every_version", [False, True])
@pytest.mark.parametrize("missing", [(3,), (3, 4)])
def test_a_gap_behind_what_is_held_is_named_in_every_mode(
    told: Told,
    publish: Publish,
    store: MemoryStore,
    missing: tuple[int, ...],
    *,
    every_version: bool,
) -> None:
    publish(1, 2)
    subscriber = told.subscriber
    subscriber.update()
    publish(3, 4, 5, 6, 7, 8)
    gap(store, *missing)
    told.clock.happens = [nothing] * (LOOK_BACK + 2)
    follow = subscriber.follow(
        stop=told.clock.stop, every_version=every_version, looked=told.looked
    )
    assert list(follow) == []
    wrong = told.said[-1]
    assert isinstance(wrong, BrokenChainError)
    assert wrong.version in missing
    assert f"manifest of version {wrong.version} is missing" in str(wrong)
    assert subscriber.watch.doubt is None  # what is held is the chain's
    with pytest.raises(BrokenChainError, match="is missing"):
        subscriber.update()


@pytest.mark.parametrize("every_version", [False, True])
@pytest.mark.parametrize("hint", [True, False])
def test_an_anchor_leads_around_a_gap(
    told: Told,
    publish: Publish,
    store: MemoryStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
    caplog: pytest.LogCaptureFixture,
    *,
    add_anchor: Callable[[], None],
    every_version: bool,
    hint: bool,
) -> None:
    publish(1, 2)
    subscriber = told.subscriber
    subscriber.update()
    publish(3, 4, 5)
    add_anchor()
    publish(6)
    gap(store, 3)
    if not hint:
        store.delete(HEAD_KEY)
    told.clock.happens = [nothing] * (LOOK_BACK + 2)
    follow = subscriber.follow(stop=told.clock.stop, every_version=every_version)
    assert [receipt.version for receipt in follow][-1] == 6
    assert same(bits_of(zeros), bits_of(model))
    assert "manifest of version 3 is missing" in caplog.text
    assert "reached version 6 by another plan" in caplog.text


def test_an_update_goes_around_a_gap(
    subscriber: Subscriber,
    publish: Publish,
    store: MemoryStore,
    add_anchor: Callable[[], None],
    zeros: dict[str, Tensor],
    model: TinyModel,
) -> None:
    publish(1, 2)
    subscriber.update()
    publish(3, 4, 5)
    add_anchor()
    publish(6)
    gap(store, 3)
    store.delete(HEAD_KEY)
    receipt = subscriber.update()
    assert receipt is not None
    assert receipt.version == 6
    assert same(bits_of(zeros), bits_of(model))
