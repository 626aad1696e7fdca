"""Tables and numbers that modules compute from weights when they first run, and keep.

No load computes such a member again, so it looks like a constant. It is distinguished from one by
the members that the model had after loading and before it ran. Those added later are dropped
whenever weights are written, and the module computes them again. Numbers are products of scales:
attention backends compute them, and attention may have no weights of its own.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltachain.errors import TensorMismatchError

from .module_members import ACTS, containers_of, digest_of, numbers_in, same_number, tensors_in

logger = logging.getLogger(__name__)

CASTS: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes to which an engine may cast a table when it first runs."""

KV: Final = "kv_cache"  # part of the names of KV caches, which are not tables

ADAPTER: Final = "LoRA"
"""Part of the names of classes that wrap layers with the adapters of requests."""

_TORCHS: Final = vars(nn.Module()).keys() - {"_buffers"}  # attributes of every module

_loaded: "WeakKeyDictionary[nn.Module, LoadedState | str]" = WeakKeyDictionary()
"""What each model held when loaded, or why it could not be recorded."""


class LoadedState:
    def __init__(self, model: nn.Module) -> None:
        self._digests = {name: set(_casts(tensor)) for name, tensor in _beside_weights(model)}
        self._numbers = dict(_numbers(model))

    def changed(self, model: nn.Module) -> frozenset[str]:
        known, numbers = self._digests, self._numbers
        tensors = {
            name
            for name, tensor in _beside_weights(model)
            if tensor.is_floating_point() and digest_of(tensor) not in known.get(name, ())
        }
        return frozenset(tensors).union(
            n for n, number in _numbers(model) if not same_number(number, numbers.get(n))
        )


def record_loaded_state(model: nn.Module) -> None:
    """Record the members of a model after loading, before it runs.

    Never raises, since it is called while an engine loads, even if it follows no chain.
    """
    try:
        _loaded[model] = LoadedState(model)
    except Exception as exc:  # noqa: BLE001 - the engine must serve as it would without deltachain
        logger.warning("cannot record what %s holds: %r", type(model).__name__, exc)
        _loaded[model] = repr(exc)


def made_by_running(model: nn.Module) -> frozenset[str]:
    """Return the live tensors computed or changed at run time; empty if nothing was recorded."""
    found = _loaded.get(model)
    if isinstance(found, str):  # a table made from old weights could not be told from a constant
        raise TensorMismatchError(
            f"what {type(model).__name__} held when it was loaded was not recorded: {found[:200]}",
            hint="restart the engine; if it happens again, report it with the engine's version",
        )
    return found.changed(model) if found is not None else frozenset()


def _beside_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in _near_weights(dict(model.named_modules())).items():
        for path, tensor in tensors_in(module):
            if not isinstance(tensor, nn.Parameter) and not tensor.is_meta and KV not in path:
                yield f"{prefix}.{path}".lstrip("."), tensor


def _numbers(model: nn.Module) -> Iterator[tuple[str, float]]:
    modules = dict(model.named_modules())
    for prefix, module in {**_near_weights(modules), **_acting(modules)}.items():
        for path, number in numbers_in(module):
            yield f"{prefix}.{path}".lstrip("."), number


def _near_weights(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return modules with parameters of their own or in a child, except those of adapters."""
    return {
        name: module
        for name, module in modules.items()
        if ADAPTER not in type(module).__name__
        and any(any(True for _ in one.parameters(False)) for one in (module, *module.children()))
    }


def _acting(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in modules.items()
        if ADAPTER not in type(module).__name__
        and any(hasattr(type(one), ACTS) for one in (module, getattr(module, "quant_method", None)))
    }


class RuntimeTables:
    """A record of members of modules, by which added tables and numbers can be dropped."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._near = []
        for module in _near_weights(modules).values():
            flags = {key: flag for key, flag in vars(module).items() if isinstance(flag, bool)}
            boxes = [(box, frozenset(box), _nothing(box)) for box in _dictionaries(module)]
            self._near.append((vars(module), flags, boxes))
        acting = _acting(modules).values()
        self._acting = [(box, _nothing(box)) for one in acting for box in _dictionaries(one)]

    def forget(self) -> None:
        for own, flags, boxes in self._near:
            dropped = [_drop(*box) for box in boxes]
            if any(dropped):
                own.update(flags)  # they may state that a table exists
        for box, nothing in self._acting:
            box.update({key: None for key in nothing if isinstance(box.get(key), float)})


def _drop(box: dict[Any, Any], known: frozenset[Any], nothing: Iterable[Any]) -> bool:
    """Drop the tables added to a dictionary, and return whether there were any."""
    added = [key for key in box.keys() - known if _is_table(key, box[key])]
    filled = [key for key in nothing if _is_table(key, box.get(key))]
    for key in added:
        del box[key]
    box.update(dict.fromkeys(filled))
    return bool(added or filled)


def _nothing(box: Mapping[Any, Any]) -> list[Any]:
    return [key for key, value in box.items() if value is None]


def _dictionaries(module: nn.Module) -> list[dict[Any, Any]]:
    own = {id(box) for key, box in vars(module).items() if key in _TORCHS}
    return [one for one in containers_of(module) if isinstance(one, dict) and id(one) not in own]


def _is_table(key: object, value: object) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return KV not in str(key) and any(isinstance(one, Tensor) for one in values)


def _casts(tensor: Tensor) -> Iterator[bytes]:
    yield digest_of(tensor)
    if tensor.is_floating_point():
        yield from (digest_of(tensor.to(dtype)) for dtype in CASTS)
