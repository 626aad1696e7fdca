"""Whether a module may hold weights where no look at it shows them, as in a closure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.subscribe.members import SIMPLE, container_of, containers_of, is_configuration

HANDLES: Final = (torch.Stream, torch.Event, torch.Generator, PurePath, range, slice)
"""Objects that hold none either, though what is in them is not looked at."""


def hides(module: nn.Module) -> bool:
    """Whether a module, or what acts on it after loading, keeps what may hold hidden weights."""
    return any(
        may_hide(value) for box in containers_of(module, plain=False) for value in _inside(box)
    )


def may_hide(value: Any) -> bool:  # noqa: ANN401
    """Whether something may hold weights where they cannot be found, as a closure does."""
    if isinstance(value, Tensor | nn.Module | Enum | type | ModuleType) or value is None:
        return False
    if isinstance(value, (*SIMPLE, *HANDLES)) or is_configuration(value):
        return False
    if container_of(value) is not None and not isinstance(value, partial):
        return False
    if isinstance(value, frozenset):
        return any(isinstance(one, Tensor) or may_hide(one) for one in value)
    if isinstance(value, BuiltinFunctionType):
        return not isinstance(value.__self__, ModuleType | type | None)
    return not isinstance(value, FunctionType | partial) or any(
        isinstance(one, Tensor) or may_hide(one) for one in _kept_by(value)
    )


def _kept_by(function: FunctionType | partial[Any]) -> Iterator[Any]:
    """What a function was made with, beside its code and its module."""
    if isinstance(function, partial):
        yield from (function.func, *function.args, *function.keywords.values())
        return
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents


def _inside(container: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return tuple(container.values() if isinstance(container, dict) else container)
