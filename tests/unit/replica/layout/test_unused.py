"""Checkpoint tensors that an engine does not use: proven so, counted in the digest, never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.engine import FakeModel, Sharding, put, trained
from tests.unit.replica import replicas
from tests.unit.replica.replicas import Followed

HEADS = ("mtp.0.weight", "mtp.1.weight")

Make = Callable[..., Followed]


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an engine that follows a model with heads which no layer of the engine is made for."""

    def with_heads(shape: Sharding) -> nn.Module:
        model = trained(shape)
        for name in HEADS:
            put(model, name, nn.Parameter(torch.randn(6, 4).to(torch.bfloat16)))
        return model

    monkeypatch.setattr(replicas, "trained", with_heads)
    return lambda **shape: Followed(Sharding(**shape), tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replica_follows_a_model_of_which_it_uses_a_part(followed: Make, tp: int) -> None:
    scene = followed(tp=tp)
    try:
        for version in range(1, 5):
            scene.publish(version)
            scene.subscriber.update()
            assert scene.subscriber.version == version
            assert scene.holds(version)
        assert scene.target.classes()["unused"] == {"tensors": 2, "nbytes": 96}
        assert "nothing that the engine holds follows it" in scene.target.on_host()[HEADS[0]]
        assert scene.subscriber.scrub(), "what nobody keeps is in the digest all the same"
        assert scene.subscriber.rollback(3).version == 3
        assert scene.holds(3)
        assert scene.subscriber.scrub()
    finally:
        scene.close()


def test_one_who_cannot_know_what_they_hold_joins_from_nothing(followed: Make) -> None:
    """The engine holds version 1, its files say version 0: a second leader takes it over."""
    scene = followed()
    try:
        scene.publish(1)
        scene.subscriber.update()
        scene.publish(2)
        second = scene.subscribe()
        receipt = second.update()
        assert receipt is not None
        assert receipt.previous is None
        assert second.version == 2
        assert scene.holds(2)
        assert second.scrub()
        second.close()
    finally:
        scene.close()


def test_a_tensor_that_something_is_derived_from_is_not_unused(
    followed: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = FakeModel.load

    def load_and_derive(model: FakeModel, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        given = dict(tensors)
        done = load(model, given.items())
        if HEADS[1] in given and not given[HEADS[1]].is_meta:
            model.root.scale = given[HEADS[1]].float().sum()
        return done

    monkeypatch.setattr(FakeModel, "load", load_and_derive)
    scene = followed()
    try:
        scene.publish(1, share=1.0)
        scene.subscriber.update()
        classes = scene.target.classes()
        assert classes["unused"]["tensors"] == classes["reloaded"]["tensors"] == 1
        assert "derives scale from it" in scene.target.on_host()[HEADS[1]]
        wanted = scene.truth[1][HEADS[1]].float().sum()
        live = scene.engine.models[0].tensors()["scale"]
        assert torch.equal(live, wanted)
        assert scene.subscriber.scrub()
    finally:
        scene.close()
