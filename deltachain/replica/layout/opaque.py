"""Detect modules that may hold weights in memory that cannot be inspected, such as a closure."""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.replica.layout.members import (
    LEAVES,
    SIMPLE,
    container_of,
    containers_of,
    is_configuration,
)
from deltachain.replica.layout.provenance import storage_id

HANDLES: Final = (torch.Stream, torch.Event, torch.Generator, PurePath, range, slice)
"""Other types of objects without weights, which are not inspected."""


DEEP: Final = 3
"""Depth to which nested objects are inspected."""


def is_opaque(module: nn.Module, visible: Container[int]) -> bool:
    """Return whether a module, or an object of its post-load processing, may hide weights.

    Args:
        module: Module to inspect, without its children.
        visible: Storages of the model's live tensors.
    """
    return any(
        may_hide_tensors(value) or any(storage_id(one) not in visible for one in _tensors_in(value))
        for box in containers_of(module, plain=False)
        for value in _inside(box)
    )


def may_hide_tensors(value: Any, within: frozenset[int] = frozenset()) -> bool:  # noqa: ANN401
    """Return whether an object may hold tensors that cannot be found, as a closure does.

    Args:
        value: Member of a module.
        within: Identities of the objects around it, which it may contain in turn.
    """
    if id(value) in within:
        return False
    if isinstance(value, Tensor | nn.Module | Enum | type | ModuleType) or value is None:
        return False
    if isinstance(value, (*SIMPLE, *HANDLES)) or is_configuration(value):
        return False
    if container_of(value) is not None and not isinstance(value, partial):
        return False
    if isinstance(value, BuiltinFunctionType):
        return not isinstance(value.__self__, ModuleType | type | None)
    kept, within = _kept_by(value), within | {id(value)}
    return kept is None or any(
        isinstance(one, Tensor) or may_hide_tensors(one, within) for one in kept
    )


def _kept_by(value: Any) -> list[Any] | None:  # noqa: ANN401
    """Return the parts of an object without attributes; ``None`` if they are unknown."""
    if isinstance(value, frozenset):
        return list(value)
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return defaults + [inner for cell in cells for inner in _in_cell(cell)]
    slots = [slot for one in type(value).__mro__ for slot in _slots(one)]
    return [getattr(value, slot) for slot in slots if hasattr(value, slot)] if slots else None


def _tensors_in(value: Any, within: frozenset[int] = frozenset()) -> Iterator[Tensor]:  # noqa: ANN401
    """Yield tensors reachable from an object through others, except modules and process groups."""
    kind = type(value)
    if isinstance(value, nn.Module) or "distributed" in kind.__module__:
        return
    if kind in LEAVES and kind is not FunctionType:
        return
    if id(value) in within or len(within) > DEEP:
        return
    inner = container_of(value)
    kept = [value.__self__] if isinstance(value, MethodType) else _kept_by(value) or []
    if inner is not None:
        kept = [*kept, *_inside(inner)]
    elif is_configuration(value):
        kept = list(vars(value).values()) if hasattr(value, "__dict__") else kept
    for one in kept:
        if isinstance(one, Tensor):
            yield one
        else:
            yield from _tensors_in(one, within | {id(value)})


def _in_cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # the cell is still empty
        return []


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _inside(container: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return tuple(container.values() if isinstance(container, dict) else container)
