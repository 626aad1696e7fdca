"""Outputs of single vLLM layers for a fixed input, whatever the form of their weights."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.model_state import fixed_rows
from deltachain.replica.layout.module_members import tensors_in

from .compat import acts_last, allow_tiles, experts, linears

WIDTHS: Final = ("input_size_per_partition", "input_size", "embedding_dim")
"""Attributes with the number of columns of this rank's share of a layer."""

logger = logging.getLogger(__name__)


def computed(layer: nn.Module, seed: int | None = None) -> Tensor | None:
    """Return the output of a linear layer, a head or experts; ``None`` if it cannot be run.

    With a seed, outputs for several rows; without one, also what a plain layer keeps for others.
    """
    try:
        with torch.no_grad():
            is_experts = isinstance(layer, experts())
            if not is_experts and not isinstance(layer, linears()):
                return None
            output = _of_experts(layer) if is_experts else _of_linear(layer, seed)
            used = ("w13_", "w2_") if is_experts else ("weight", "bias")
            return output if seed is not None else _with_others(output, layer, used)
    except Exception as exc:  # noqa: BLE001 - then only its tensors are compared
        logger.debug("%s cannot be tried: %s", type(layer).__name__, exc)
    return None


def _with_others(output: Tensor | None, layer: nn.Module, used: tuple[str, ...]) -> Tensor | None:
    """Return an output with the tensors that a plain layer keeps for others, such as its router."""
    if output is None or "Unquantized" not in type(getattr(layer, "quant_method", None)).__name__:
        return output
    held = {**layer._parameters, **layer._buffers}
    others = [t for n, t in held.items() if t is not None and not n.startswith(used)]
    return torch.cat([t.detach().reshape(-1).float() for t in (output, *others)])


def taken_over(
    layers: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """Return the tensors that attention layers made from the weight taken from a linear layer.

    Latent attention on CPUs with AMX does so: it computes in place of its ``kv_b_proj``.
    """
    empty = {
        layer: name
        for name, layer in layers.items()
        if isinstance(layer, linears())
        and isinstance(weight := getattr(layer, "weight", None), Tensor)
        and not weight.numel()
        and getattr(layer, "_cpu_skip_gemm_dispatch", False)
    }
    return {
        empty[part]: torch.cat([t.detach().reshape(-1).float() for _, t in held])
        for attention in modules.values()
        if empty and acts_last(attention)
        for part in attention.modules()
        if part in empty and (held := _made(attention))
    }


def _made(attention: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in tensors_in(attention) if t.numel() and "kv_cache" not in n]


def _of_linear(layer: Any, seed: int | None = None) -> Tensor | None:
    width = next((getattr(layer, name) for name in WIDTHS if hasattr(layer, name)), 0)
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    dtype = _dtype(layer, weight)
    if not width or dtype is None:
        return None
    device = weight.device if isinstance(weight, Tensor) else None
    rows = fixed_rows(1, width, dtype, device, seed)
    output: Tensor = layer.quant_method.apply(layer, rows, bias)
    return output.float()


def _of_experts(layer: Any) -> Tensor:
    """Return outputs for one row per expert of this rank, regardless of the router's choice."""
    allow_tiles()
    weight = layer.w13_weight
    local = _local_experts(layer)
    rows = fixed_rows(len(local), layer.hidden_size, layer.moe_config.in_dtype, weight.device)
    if layer.quant_method.is_monolithic:
        logits = torch.full((len(local), layer.global_num_experts), -1.0, device=weight.device)
        logits[torch.arange(len(local)), local] = 1.0
        output = layer.forward_monolithic(rows, logits)
    else:
        chosen = torch.tensor(local, device=weight.device, dtype=torch.int32)[:, None]
        weights = torch.ones(chosen.shape, device=weight.device)
        output = layer.forward_modular(rows, weights, chosen)
    found: Tensor = output.float()
    return found


def _local_experts(layer: Any) -> list[int]:
    where = layer.expert_map
    if where is None:
        return list(range(layer.local_num_experts))
    return [number for number, at in enumerate(where.tolist()) if at >= 0]


def _dtype(layer: Any, weight: object) -> torch.dtype | None:
    """Return the dtype of a layer's input: the dtype of its weight, if not quantised."""
    floats = (torch.float32, torch.float16, torch.bfloat16)
    if isinstance(weight, Tensor) and weight.dtype in floats:
        return weight.dtype
    found = getattr(layer, "params_dtype", None)
    return found if isinstance(found, torch.dtype) else None


# The product of a row with a single one is a column of the weight, bit for bit: all other terms of
# the sum are zero.


COLUMNS: Final = 16  # number of columns of a layer to compare; chosen anew each time


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a weight before it was packed."""

    chosen: Tensor  # indices of the columns, int64 [columns], on the device of the weight
    width: int  # number of all columns of the weight
    values: Tensor  # values of the chosen columns, [columns, rows], in the dtype of the weight

    def read(self, layer: Any) -> Tensor:
        count = len(self.chosen)
        rows = torch.zeros(count, self.width, dtype=self.values.dtype, device=self.values.device)
        rows[torch.arange(count, device=rows.device), self.chosen] = 1
        found: Tensor = layer.quant_method.apply(layer, rows, None)
        return found


@contextmanager
def compared(model: nn.Module) -> Iterator[None]:
    """Compare layers that are packed while this is open with their raw weights.

    Only layers without a quantised weight, except those that leave their weight to another layer.
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


def is_compared(layer: Any) -> bool:
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
    return isinstance(layer, linears()) and "Unquantized" in type(layer.quant_method).__name__


def _process(method: Any, taken: dict[nn.Module, Columns], layer: nn.Module) -> None:
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
    if weight.ndim != 2 or not weight.numel() or not all(map(torch.isfinite, weight.aminmax())):
        return None
    width = weight.shape[1]
    drawn = torch.Generator()  # no shared random state changes
    drawn.seed()
    chosen = torch.randperm(width, generator=drawn)[:COLUMNS].to(weight.device)
    return Columns(chosen, width, weight.detach()[:, chosen].T.clone())


def _compare(name: str, layer: nn.Module, columns: Columns) -> None:
    try:
        found = columns.read(layer)
    except Exception as exc:  # noqa: BLE001 - a layer that cannot be run by itself
        logger.debug("%s cannot be compared: %s", name, exc)
        return
    pair = found, columns.values
    if found.shape != columns.values.shape or not (
        torch.equal(*pair) or torch.equal(*map(_normal, pair))
    ):
        raise TensorMismatchError(
            f"{name} was packed from another weight than was loaded",
            hint="restart the engine; if it happens again, report it with vLLM's version",
        )


def _normal(values: Tensor) -> Tensor:
    """Replace subnormal values by zeros, as products of bfloat16 on CPUs do."""
    return values.masked_fill(values.abs() < torch.finfo(values.dtype).tiny, 0)
