"""Kinds of layers: what an engine stores and computes alike, as far as modules and loads show."""

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum
from typing import Final

from torch import Tensor, nn

from .findings import Findings
from .model_state import LoadGroup, ModelState
from .module_members import SIMPLE, containers_of, items
from .runtime_tables import KV

ADDRESS: Final = 1 << 32
"""Integers from here on may be addresses, which differ from start to start."""


def some_of_each(
    state: ModelState, found: Findings, groups: Iterable[LoadGroup], most: int
) -> list[LoadGroup]:
    """Return groups of each kind of layers and tensors, chosen at random, in order.

    Tensors of one kind are also stored alike at this start, as far as a dry run shows.
    """
    groups = list(groups)
    alike: dict[str, list[LoadGroup]] = defaultdict(list)
    for group in groups:
        kinds = sorted(json.dumps(options_of(state.modules[one])) for one in group.layers)
        specs = [state.source.specs[name] for name in group.names]
        why = [found.reasons.get(name) for name in group.names]
        alike[repr((kinds, [(one.dtype, one.shape) for one in specs], why))].append(group)
    draw = random.SystemRandom().sample
    chosen = {one for same in alike.values() for one in draw(same, min(most, len(same)))}
    return [group for group in groups if group in chosen]


def options_of(module: nn.Module, *, named: bool = False) -> list[object]:
    """Return the classes, forms of tensors and plain values of a module, without its submodules.

    Floats may be made from weights, and texts, without ``named``, may name the module.
    """
    found: list[object] = [_path(module)]
    for container in containers_of(module):
        if isinstance(container, set):
            continue
        for key, value in items(container).items():
            if KV in str(key) or isinstance(value, float) or (isinstance(value, str) and not named):
                continue
            if isinstance(value, Tensor):
                form = [str(value.dtype), value.shape, value.stride(), value.device.type]
                found.append([str(key), _path(value), form])
            elif isinstance(value, int) and abs(value) >= ADDRESS:
                continue
            else:
                plain = isinstance(value, (*SIMPLE, Enum))
                found.append([str(key), str(value) if plain else _path(value)])
    return found


def _path(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
