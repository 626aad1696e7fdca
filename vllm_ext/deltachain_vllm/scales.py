"""Scales that kernels keep: as numbers in captured graphs, or by their address once packed.

Some attention backends give their kernels scales as numbers of the host. A graph that was captured
with such a kernel repeats it with the numbers of that time, whatever a load writes later.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from torch import Tensor, nn

from deltachain.errors import TensorMismatchError

NUMBER: Final = "_scale_float"
"""Suffix of the attributes of attention layers with scales as numbers."""


@contextmanager
def uncaptured(model: nn.Module, config: Any) -> Iterator[None]:
    """Refuse a load that changes numbers which captured graphs have."""
    mode = config.compilation_config.cudagraph_mode
    captures_attention = mode is not None and bool(mode.has_full_cudagraphs())
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if captures_attention and _numbers(layer) and any(map(_takes_numbers, _backends(layer)))
    }
    before = {name: _numbers(layer) for name, layer in layers.items()}
    yield
    for name, layer in layers.items():
        if _numbers(layer) != before[name]:
            raise TensorMismatchError(
                f"captured graphs have the scales of {name} as numbers, which stay as they are",
                hint='start vLLM with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'',
            )


def _numbers(layer: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(layer).items() if key.endswith(NUMBER)}


def _backends(layer: Any) -> Iterator[type]:
    impl = getattr(layer, "impl", None)
    variants = getattr(impl, "get_impl_variants", None)
    for one in (impl,) if variants is None else variants():
        yield from type(one).__mro__[:-1]


def _takes_numbers(kind: type) -> bool:
    """Return whether the source of a class reads such a number; true if there is no source."""
    try:
        return NUMBER in inspect.getsource(kind)
    except (OSError, TypeError):
        return True


OPS: Final = "vllm._custom_ops"
CREATE: Final = "create_onednn_scaled_mm"
"""Operation that packs an eight-bit weight for CPUs without AMX; oneDNN gets its scales' address.
"""


@contextmanager
def owned() -> Iterator[None]:
    """Keep the scales of weights packed while this is open: a reload drops them once copied."""
    ops: Any = import_module(OPS)
    create = getattr(ops, CREATE, None)
    if create is None:
        yield
        return

    def keep(weight: Tensor, scales: Tensor, *more: Any, **named: Any) -> Any:
        handler = create(weight, scales, *more, **named)
        handler.scales = scales.data
        return handler

    setattr(ops, CREATE, keep)
    try:
        yield
    finally:
        setattr(ops, CREATE, create)
