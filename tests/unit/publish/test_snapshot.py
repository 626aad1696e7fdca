from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from deltachain.errors import ConfigError
from deltachain.publish.diff import Diff
from deltachain.publish.model.source import collect_weights
from deltachain.publish.snapshot import Snapshot
from deltachain.testing.models import TinyModel, bits_of, plain_model, same, train_


def snapshot_of(model: nn.Module, *, on_device: bool = False, dtype: str | None = None) -> Snapshot:
    return Snapshot(collect_weights(model, dtype=dtype), on_device=on_device)


def kept(snapshot: Snapshot, model: nn.Module) -> dict[str, object]:
    return {w.spec.name: snapshot.bits(w).tolist() for w in collect_weights(model).weights}


def listed(diff: Diff) -> dict[str, list[list[int]]]:
    return {name: [part.tolist() for part in changes] for name, changes in diff.live.items()}


@pytest.mark.parametrize("dtype", [None, "BF16"])
@pytest.mark.parametrize("model", [TinyModel, lambda: plain_model(dtype=torch.float32)])
def test_the_device_path_finds_what_the_host_path_finds(
    model: type[TinyModel], dtype: str | None
) -> None:
    live = model()
    host = snapshot_of(live, dtype=dtype)
    device = snapshot_of(live, on_device=True, dtype=dtype)
    assert device.kernel == "device" != host.kernel
    for step in range(3):
        train_(live, step)
        found = host.diff_()
        assert listed(found) == listed(device.diff_())
        assert found.live
        assert host.state == device.state
        weights = collect_weights(live, dtype=dtype).weights
        assert all(np.array_equal(host.bits(w), device.bits(w)) for w in weights)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_diff_that_is_restored_is_found_again(on_device: bool) -> None:
    model = TinyModel()
    snapshot = snapshot_of(model, on_device=on_device)
    before, state = kept(snapshot, model), snapshot.state
    train_(model, 1)
    diff = snapshot.diff_()
    after, moved = kept(snapshot, model), snapshot.state
    assert moved != state
    snapshot.restore(diff)
    assert (kept(snapshot, model), snapshot.state) == (before, state)
    assert listed(snapshot.diff_()) == listed(diff)
    snapshot.restore(diff)
    snapshot.redo(diff)
    assert (kept(snapshot, model), snapshot.state) == (after, moved)
    assert snapshot.diff_().live == {}


def test_the_state_is_that_of_a_fresh_snapshot() -> None:
    model = TinyModel()
    snapshot = snapshot_of(model)
    for step in range(4):
        train_(model, step, share=0.2)
        snapshot.diff_()
        assert snapshot.state == snapshot_of(model).state


def test_a_diff_that_fails_moves_nothing() -> None:
    model = plain_model()
    snapshot = snapshot_of(model)
    before, state = kept(snapshot, model), snapshot.state
    train_(model, 1, share=0.5)
    last = model[1].weight  # type: ignore[index]
    whole = last.data
    last.data = whole.new_zeros(whole.shape[::-1]).t()
    with pytest.raises(RuntimeError):
        snapshot.diff_()
    last.data = whole
    assert (kept(snapshot, model), snapshot.state) == (before, state)
    assert set(snapshot.diff_().live) == {"0.bias", "0.weight", "1.bias", "1.weight"}


def test_tensors_that_a_load_replaced_are_found() -> None:
    model, other = plain_model(0), plain_model(1)
    snapshot = snapshot_of(model)
    model.load_state_dict(other.state_dict(), assign=True)
    snapshot.diff_()
    weights = collect_weights(model).weights
    assert same({w.spec.name: snapshot.bits(w) for w in weights}, bits_of(other))


def test_a_weight_that_changed_shape_is_refused() -> None:
    model = plain_model()
    snapshot = snapshot_of(model)
    model[1] = nn.Linear(40, 9, dtype=torch.bfloat16)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="when the publisher was attached"):
        snapshot.diff_()


def test_a_frozen_weight_that_is_trained_later_is_refused() -> None:
    model = TinyModel()
    snapshot = snapshot_of(model)
    model.frozen.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="was frozen"):
        snapshot.diff_()


def test_empty_tensors_have_no_changes() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(3, 0))
    for on_device in (False, True):
        snapshot = snapshot_of(model, on_device=on_device)
        assert snapshot.diff_().live == {}
