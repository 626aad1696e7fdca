"""Experts that vLLM moves between slots: where they are, and loads that find them.

vLLM's own loaders write every expert into the slots in which an engine starts.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeAlias

from torch import nn

from deltachain.errors import ExpertsMovedError

Rows: TypeAlias = Mapping[str, tuple[Any, list[int]]]
"""Layers of experts, and the experts in their slots on all ranks, by the names of the layers."""


EXPERT: Final = 4  # position of the expert among the arguments of a loader


def slots(model: nn.Module, balancer: Any) -> Mapping[str, tuple[int, ...]]:
    """Return the experts in the slots of this rank, by layer.

    Raises an :class:`ExpertsMovedError` while another thread moves experts: it has read some of
    their weights, and writes these later.
    """
    if any(state.rebalanced for state in balancer.model_states.values()):
        raise ExpertsMovedError(
            "vLLM is moving experts to other slots",
            hint="update again after some steps of the engine, which end that",
        )
    found = {}
    for name, (layer, row) in _rows(model, balancer).items():
        count = layer.local_num_experts
        first = count * layer.moe_config.moe_parallel_config.ep_rank
        found[name] = tuple(row[first : first + count])
    return found


@contextmanager
def found(model: nn.Module, balancer: Any) -> Iterator[None]:
    """Have loaders write every expert into the slots in which it is now."""
    given: list[tuple[Any, Any, Any]] = []
    for layer, row in _rows(model, balancer).values():
        where: dict[int, list[int]] = {}
        for slot, expert in enumerate(row):
            where.setdefault(expert, []).append(slot)
        for parameter in layer.parameters(recurse=False):
            if (loader := getattr(parameter, "weight_loader", None)) is not None:
                own = parameter.weight_loader = _to(where, loader)
                given.append((parameter, own, loader))
    try:
        yield
    finally:
        for parameter, own, loader in given:
            if getattr(parameter, "weight_loader", None) is own:
                parameter.weight_loader = loader


def _to(where: Mapping[int, list[int]], loader: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a parameter's loader: write an expert into all its present slots.

    vLLM names an expert by its first slot at the start of the engine.
    """

    @wraps(loader)
    def load(*given: Any, expert_id: int | None = None, **named: Any) -> Any:
        if expert_id is None and len(given) > EXPERT:
            expert_id, given = given[EXPERT], given[:EXPERT]
        if expert_id is None:
            return loader(*given, **named)
        written = [loader(*given, expert_id=slot, **named) for slot in where.get(expert_id, ())]
        return any(written) or None

    return load


def _rows(model: nn.Module, balancer: Any) -> Rows:
    names = {module: name for name, module in model.named_modules()}
    return {
        names[runner.routed_experts]: (runner.routed_experts, row)
        for state in balancer.model_states.values()
        for runner, row in zip(
            state.model.moe_layers, state.physical_to_logical_map.tolist(), strict=True
        )
        if runner.routed_experts in names
    }
