"""Comparison of loaded layers with a fresh load of the same weights, apart from the model.

A layer with quantised weights does not keep what was loaded into it: the engine packs the codes, or
computes codes and scales from other weights. Such a layer is proven by loading it a second time,
from nothing, into modules of its own: every tensor and every number must be equal, and the outputs
of a layer with members that cannot be inspected.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from deltachain.errors import TensorMismatchError
from deltachain.replica.engine import EngineModel
from deltachain.types import TensorSpec

from .loaded_checkpoint import WeightsFactory
from .model_state import RELOADS, LoadGroup, LoadMethod, batches
from .module_members import is_opaque, numbers_in, same_number, same_tensor, storage_id, tensors_in
from .runtime_tables import KV

TOGETHER: Final = 32 << 20
"""Bytes of weights up to which groups are loaded together; a larger one is loaded alone."""


def find_comparable(
    model: EngineModel, groups: Iterable[tuple[LoadMethod, LoadGroup]], weights: WeightsFactory
) -> tuple[frozenset[LoadGroup], Mapping[str, str]]:
    """Find the groups that can be compared with a fresh load: one equals the model as it is."""
    found: set[LoadGroup] = set()
    reasons: dict[str, str] = {}
    for method, group in groups:
        if method not in RELOADS:
            continue
        try:
            if _compare(model, [group], weights):
                found.add(group)
        except Exception as exc:  # noqa: BLE001 - an engine may raise anything
            told = exc.args[0] if isinstance(exc, TensorMismatchError) else repr(exc)
            reasons.update(dict.fromkeys(group.names, str(told)[:200]))
    return frozenset(found), reasons


def expect_fresh(
    model: EngineModel,
    groups: Iterable[LoadGroup],
    weights: WeightsFactory,
    specs: Mapping[str, TensorSpec],
) -> None:
    """Prove that the layers of some groups hold and compute what a fresh load gives.

    All groups are loaded, even after a difference, and in the same order on every rank: ranks may
    exchange values while they quantise, and must do so equally often.
    """
    different: list[TensorMismatchError] = []
    for together in batches(groups, lambda group: group.names, specs, TOGETHER):
        try:
            _compare(model, together, weights)
        except TensorMismatchError as exc:
            different.append(exc)
    if different:
        raise different[0]


def _compare(model: EngineModel, groups: Sequence[LoadGroup], weights: WeightsFactory) -> bool:
    """Compare the layers of some groups with fresh ones; return whether there are any."""
    seed = random.SystemRandom().getrandbits(32)
    live = model.modules()
    layers = frozenset().union(*(group.layers for group in groups))
    tensors = weights(name for group in groups for name in group.names)
    with torch.no_grad(), model.loaded_apart(layers, tensors) as fresh:
        for name, module in fresh.items():
            why = _difference(model, live[name], module, seed)
            if why:
                raise TensorMismatchError(
                    f"{name} is not what a fresh load of the same weights gives: {why}",
                    tensor=next((g for g in groups if name in g.layers), groups[0]).names[0],
                    hint="restart the engine; if it happens again, report it with the engine's "
                    "version",
                )
        return bool(fresh)


def _difference(model: EngineModel, live: nn.Module, fresh: nn.Module, seed: int) -> str:
    """Return how a layer differs from the fresh one; empty if it does not."""
    mine = dict(tensors_in(live))
    for path, tensor in tensors_in(fresh):
        is_weight = tensor.numel() and not tensor.is_meta and KV not in path
        if is_weight and (path not in mine or not same_tensor(mine[path], tensor)):
            return f"{path} differs"
    numbers = dict(numbers_in(live))
    for path, number in numbers_in(fresh):
        if not same_number(numbers.get(path), number):
            return f"{path} is {numbers.get(path)}, not {number}"
    visible = {storage_id(tensor) for _, tensor in tensors_in(fresh)}
    if not is_opaque(fresh, visible):
        return ""
    found, wanted = (model.probe(one, seed) for one in (live, fresh))
    if found is None or wanted is None:
        return "it has members that cannot be inspected, and cannot be tried by itself"
    return "" if same_tensor(found, wanted) else "it computes something else"
