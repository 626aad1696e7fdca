"""What an engine holds, as only its maker can see it: what is served, and what must not be touched.

This knows nothing of how deltachain records members; it also looks into what kernels keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.property.engine import RandomEngine
from tests.property.layers import Packed

LOADER = "loader_"
"""What a loader keeps for itself on a module: nothing is computed from it."""


class Seen(NamedTuple):
    served: object
    kept: object


def look(engine: RandomEngine) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    names = [*engine.modules().items()]
    found["modules"] = Seen([name for name, _ in names], [id(module) for _, module in names])
    for name, module in names:
        found.update(_walk(name, vars(module), set()))
    return found


def served(seen: dict[str, Seen]) -> dict[str, object]:
    return {
        path: one.served
        for path, one in seen.items()
        if f".{LOADER}" not in path and one.served is not None
    }


def addresses(engine: RandomEngine) -> dict[str, tuple[int, int]]:
    return {name: (id(t), t.data_ptr()) for name, t in engine.tensors().items()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        f"{path}: {_short(one.get(path))} / {_short(other.get(path))}"
        for path in sorted(one.keys() | other.keys())
        if path not in one or path not in other or one[path] != other[path]
    ]


def _short(thing: object) -> str:
    return repr(thing)[:900]


def _walk(path: str, value: Any, inside: set[int]) -> Iterator[tuple[str, Seen]]:
    if isinstance(value, Tensor):
        yield path, _tensor(value)
        if vars(value):
            yield from _walk(f"{path}@", vars(value), inside)
        return
    if isinstance(value, nn.Module | type) or value is None:
        yield path, Seen(None, id(value))
        return
    if isinstance(value, bool | int | float | str | bytes):
        yield path, Seen(value, value)
        return
    if id(value) in inside:
        return
    inside = inside | {id(value)}
    items = _items(value)
    yield path, Seen(None, (id(value), None if items is None else [str(key) for key in items]))
    for key, held in (items or {}).items():
        yield from _walk(f"{path}.{key}", held, inside)


def _items(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, set | frozenset):
        return {repr(held): held for held in sorted(value, key=repr)}
    if isinstance(value, Packed):
        return {"weight": value.weight, "bias": value.bias}
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return {number: cell.cell_contents for number, cell in enumerate(cells)}
    return vars(value) if hasattr(value, "__dict__") else None


def _tensor(tensor: Tensor) -> Seen:
    data = tensor.detach()
    bits = b"" if data.is_meta else data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    content = str(data.dtype), tuple(data.shape), str(data.device), bits
    return Seen(content, (id(tensor), data.data_ptr(), data.stride(), content))
