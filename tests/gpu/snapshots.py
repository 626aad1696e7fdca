"""Snapshot of a model on a device, on the host and there; needs deltachain's own packages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product

import numpy as np
import torch
from torch import nn

from deltachain.errors import ConfigError
from deltachain.publish.model.source import ModelTensors, collect_weights
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import quantise
from deltachain.publish.ranks.collectives import Ranks
from deltachain.publish.snapshot import Snapshot, SnapshotPlace
from tests.support.models import plain_model, train_


def snapshot_checks(where: str) -> Iterator[tuple[str, Callable[[], None]]]:
    places: tuple[SnapshotPlace, ...] = ("host", "device")
    for place in places:
        for dtype in (torch.bfloat16, torch.float32):
            check = partial(check_snapshot, where, place, dtype)
            yield f"snapshot.{place}.{str(dtype).removeprefix('torch.')}", check
    for recipe in (n for n in sorted(RECIPES) if RECIPES[n].arithmetic.rounding):
        if find_spec(RECIPES[recipe].library.replace("-", "_")) is None:
            continue
        for place, dtype in product(places, (torch.bfloat16, torch.float32)):
            check = partial(check_quantised, where, place, dtype, recipe)
            name = f"{recipe}.{place}.{str(dtype).removeprefix('torch.')}"
            yield f"snapshot.{name}", check


def check_snapshot(where: str, place: SnapshotPlace, dtype: torch.dtype) -> None:
    host_model, model = plain_model(dtype=dtype), plain_model(dtype=dtype).to(where)
    host = Snapshot(collect_weights(host_model, dtype="BF16"))
    on_device = torch.device(where).type == "cpu"
    ours = Snapshot(collect_weights(model, dtype="BF16"), where=place, on_device=on_device)
    weights = collect_weights(model, dtype="BF16").weights
    assert ours.state == host.state
    for seed in range(3):
        train_(host_model, seed)
        model.load_state_dict(host_model.state_dict())
        expected, found = host.diff_(), ours.diff_()
        assert found.live.keys() == expected.live.keys() != set()
        for name, changes in expected.live.items():
            for one, other in zip(changes, found.live[name], strict=True):
                np.testing.assert_array_equal(one, other)
        ours.restore(found)
        ours.redo(found)
        assert ours.state == host.state
        for weight in weights:
            np.testing.assert_array_equal(ours.bits(weight), host.bits(weight))


def check_quantised(where: str, place: SnapshotPlace, dtype: torch.dtype, recipe: str) -> None:
    torch.manual_seed(1)
    layers = nn.ModuleDict({"a": nn.Linear(300, 260), "b": nn.Linear(260, 130, bias=False)})
    model, host_model = layers.to(where, dtype), copy.deepcopy(layers).to("cpu", dtype)
    host = Snapshot(quantised_tensors(host_model, recipe))
    on_device = torch.device(where).type == "cpu"
    ours = Snapshot(quantised_tensors(model, recipe), where=place, on_device=on_device)
    assert ours.state == host.state
    for seed in range(2):
        train_(host_model, seed)
        model.load_state_dict(host_model.state_dict())
        expected, found = host.diff_(), ours.diff_()
        assert found.live.keys() == expected.live.keys() != set()
        for name, changes in expected.live.items():
            for one, other in zip(changes, found.live[name], strict=True):
                np.testing.assert_array_equal(one, other)
        assert ours.state == host.state
    with torch.no_grad():
        dict(model.named_parameters())["b.weight"][129, 259] = torch.nan
        dict(model.named_parameters())["a.weight"].mul_(2)
    try:
        ours.diff_()
    except ConfigError:
        assert ours.state == host.state
    else:
        raise AssertionError("a weight that is not finite was published")


def quantised_tensors(model: nn.Module, recipe: str) -> ModelTensors:
    source = collect_weights(model, dtype="BF16")
    made = quantise(source, {"a.weight", "b.weight"}, RECIPES[recipe], Ranks.alone())
    made.agree("begin")
    return made
