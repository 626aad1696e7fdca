"""Comparison of packed linear layers with columns of their raw weights.

The product of a row with a single one is a column of the weight, bit for bit: all other terms of
the sum are zero.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.errors import TensorMismatchError
from deltachain_vllm.compat import linears
from deltachain_vllm.computing import WIDTHS

COLUMNS: Final = 16
"""Number of columns of a layer to compare; chosen anew each time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a weight before it was packed.

    Attributes:
        chosen: Indices of the columns, int64 ``[columns]``, on the device of the weight.
        width: Number of all columns of the weight.
        values: Values of the chosen columns, ``[columns, rows]``, in the dtype of the weight.
    """

    chosen: Tensor
    width: int
    values: Tensor

    def read(self, layer: Any) -> Tensor:  # noqa: ANN401 - a layer of vLLM
        """Return the same columns from products of the packed layer."""
        count = len(self.chosen)
        rows = torch.zeros(count, self.width, dtype=self.values.dtype, device=self.values.device)
        rows[torch.arange(count, device=rows.device), self.chosen] = 1
        found: Tensor = layer.quant_method.apply(layer, rows, None)
        return found


@contextmanager
def compared(model: nn.Module) -> Iterator[None]:
    """Compare layers that are packed while this is open with their raw weights.

    Only layers without a quantised weight, except those that leave their weight to another layer.

    Raises:
        TensorMismatchError: A layer multiplies by another weight.
    """
    names = {layer: name for name, layer in model.named_modules() if _is_plain(layer)}
    methods: set[Any] = {layer.quant_method for layer in names}
    taken: dict[nn.Module, Columns] = {}
    for method in methods:
        method.process_weights_after_loading = partial(_process, method, taken)
    try:
        yield
    finally:
        for method in methods:
            vars(method).pop("process_weights_after_loading", None)
    for layer, columns in taken.items():
        _compare(names.get(layer, ""), layer, columns)


def is_compared(layer: Any) -> bool:  # noqa: ANN401 - a layer of vLLM
    """Return whether a layer only multiplies by a packed weight, and adds its bias, any bits.

    The raw weight is compared at every load, which verifies where the packing puts elements.
    """
    if not _is_plain(layer):
        return False
    weight, bias = layer.weight, getattr(layer, "bias", None)
    width = next((getattr(layer, name) for name in WIDTHS if hasattr(layer, name)), 0)
    saved = [(one, one.detach().clone()) for one in (weight, bias) if isinstance(one, Tensor)]
    rows = torch.ones(1, width, dtype=weight.dtype, device=weight.device)
    try:
        product: Tensor = layer.quant_method.apply(layer, rows, None)
        weight.data.add_(1)
        if not torch.equal(layer.quant_method.apply(layer, rows, None), product):
            return False
        if bias is None:
            return True
        bias.data.copy_(torch.arange(bias.numel(), device=bias.device).remainder(241))
        added = layer.quant_method.apply(layer, torch.zeros_like(rows), bias)
        return bool(torch.equal(added.view(-1).float(), bias.data.float()))
    except Exception:  # noqa: BLE001 - a layer that cannot be tested is not compared
        return False
    finally:
        for one, before in saved:
            one.data.copy_(before)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is linear, or a head, and its weight is not quantised."""
    return isinstance(layer, linears()) and "Unquantized" in type(layer.quant_method).__name__


def _process(method: Any, taken: dict[nn.Module, Columns], layer: nn.Module) -> None:  # noqa: ANN401
    """Save columns of a raw weight, then let its method pack it."""
    columns = _take(getattr(layer, "weight", None))
    if columns is not None:
        taken[layer] = columns
    type(method).process_weights_after_loading(method, layer)


def _take(weight: object) -> Columns | None:
    """Return some columns of a weight; ``None`` if its products are not exact."""
    exact = [torch.bfloat16, torch.float16]
    if torch.get_float32_matmul_precision() == "highest":
        exact.append(torch.float32)
    if not isinstance(weight, Tensor) or weight.is_meta or weight.dtype not in exact:
        return None
    if weight.ndim != 2 or not weight.numel() or not weight.isfinite().all():
        return None
    width = weight.shape[1]
    chosen = torch.tensor(_some(width), device=weight.device)
    return Columns(chosen, width, weight.detach()[:, chosen].T.clone())


def _some(width: int) -> Sequence[int]:
    """Choose columns to compare, without a change to any shared random state."""
    drawn = torch.Generator()
    drawn.seed()
    return torch.randperm(width, generator=drawn)[:COLUMNS].tolist()


def _compare(name: str, layer: nn.Module, columns: Columns) -> None:
    try:
        found = columns.read(layer)
    except Exception as exc:  # noqa: BLE001 - a layer that cannot be run by itself
        logger.debug("%s cannot be compared: %s", name, exc)
        return
    if found.shape != columns.values.shape or not torch.equal(
        *map(_normal, (found, columns.values))
    ):
        raise TensorMismatchError(
            f"{name} was packed from another weight than was loaded",
            hint="restart the engine; if it happens again, report it with vLLM's version",
        )


def _normal(values: Tensor) -> Tensor:
    """Replace subnormal values by zeros, as products of bfloat16 on CPUs do."""
    return values.masked_fill(values.abs() < torch.finfo(values.dtype).tiny, 0)
