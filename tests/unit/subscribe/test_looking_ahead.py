"""Later versions are seen while a target stages, even if that takes long or fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest import mock

import pytest

from deltachain.errors import StoreError
from deltachain.publish import Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber, fetch
from tests.support.models import TinyModel, tensors_of, train_

WITHIN_S = 20.0


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TinyModel, Publisher, Subscriber]]:
    monkeypatch.setattr(fetch, "LEAST_LOOK_S", 0.01)
    store, model = MemoryStore(), TinyModel()
    config = SubscribeConfig(url="memory://ahead", poll_s=0.01)
    with (
        Publisher("memory://ahead", store=store).attach(model) as publisher,
        Subscriber(config, tensors_of(TinyModel(seed=1)), store=store) as subscriber,
    ):
        yield model, publisher, subscriber


@pytest.mark.parametrize("failing", [False, True])
def test_the_head_goes_on_while_a_target_hangs(
    parts: tuple[TinyModel, Publisher, Subscriber], failing: bool
) -> None:
    model, publisher, subscriber = parts
    chain, stage = subscriber.chain, subscriber.target.stage
    newest = chain.newest
    looks: list[int] = []

    def look(known: int) -> int:
        looks.append(known)
        if failing and len(looks) in (2, 3):
            raise StoreError("the store is away")
        return newest(known)

    def hang(*given: object, **settings: object) -> object:
        train_(model, seed=1)
        publisher.publish(step=1)
        publisher.flush()
        deadline = time.monotonic() + WITHIN_S
        while chain.latest != 1:
            assert time.monotonic() < deadline, "the target hangs, and the head stands still"
            time.sleep(0.01)
        return stage(*given, **settings)  # type: ignore[arg-type]

    with (
        mock.patch.object(chain, "newest", look),
        mock.patch.object(subscriber.target, "stage", hang),
    ):
        receipt = subscriber.update(0)
    assert receipt is not None
    assert receipt.version == 0
    assert len(looks) > (3 if failing else 1)
    count = len(looks)
    time.sleep(0.1)
    assert len(looks) == count  # none once the version is staged
