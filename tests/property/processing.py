"""What engines do to a layer after it was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tests.property.layers import Layer, Packed, frozen
from tests.property.recipe import Unit


class Method:
    def process_weights_after_loading(self, layer: Layer) -> None:
        PROCESSES[layer.unit.process](layer, self)


def create(unit: Unit, rank: int) -> Layer:
    layer = Layer(unit, rank)
    if unit.process in PROCESSES:
        vars(layer)["quant_method"] = Method()
    return layer


def packed(layer: Layer) -> Packed:
    weight = layer.weight.data
    if layer.unit.layout == "experts":
        weight = weight.flatten(0, 1)
    matrix = weight if layer.unit.layout == "transposed" else weight.t()
    bias = layer._parameters.get("bias")
    hides = layer.unit.hides_bias and bias is not None
    return Packed(matrix.clone(), bias.data.clone() if hides and bias is not None else None)


def keep_kernel(layer: Layer, method: Method, kernel: Any) -> None:
    """Beside the weight, or in the object that acts: engines do either."""
    if layer.unit.place in ("method", "list"):
        vars(method)["kernel"] = kernel
    else:
        vars(layer)["apply_packed"] = kernel


def _kernel(layer: Layer, method: Method) -> Any:
    return vars(layer).get("apply_packed", vars(method).get("kernel"))


def _flip(layer: Layer, _: Method) -> None:
    layer.weight.data.copy_(layer.weight.data.flip(-1).clone())


def _turn(layer: Layer, _: Method) -> None:
    layer.weight = frozen(layer.weight.data.transpose(-1, -2).contiguous().transpose(-1, -2))


def _pack(layer: Layer, method: Method) -> None:
    keep_kernel(layer, method, packed(layer))


def _empty(layer: Layer, method: Method) -> None:
    _pack(layer, method)
    layer.weight = frozen(torch.empty(0))
    if layer.unit.hides_bias and "bias" in layer._parameters:
        layer.bias = None  # type: ignore[assignment]


def _delete(layer: Layer, method: Method) -> None:
    _pack(layer, method)
    del layer.weight


def _prepack(layer: Layer, method: Method) -> None:
    if not vars(method).get("is_packed", False):
        layer.weight.data.copy_(layer.weight.data.flip(-1).clone())
        vars(method)["is_packed"] = True


def _first(layer: Layer, method: Method) -> None:
    """A kernel made on the first call alone."""
    if _kernel(layer, method) is None:
        _pack(layer, method)


def _into(layer: Layer, method: Method) -> None:
    """A kernel whose memory stays, with other bits in it."""
    kernel = _kernel(layer, method)
    if kernel is None:
        _pack(layer, method)
        return
    made = packed(layer)
    kernel.weight.copy_(made.weight)
    if made.bias is not None:
        kernel.bias.copy_(made.bias)


def _alias(layer: Layer, method: Method) -> None:
    """A kernel that computes from the weight where it lay when it was made."""
    weight = layer.weight.data
    if layer.unit.layout == "experts":
        weight = weight.flatten(0, 1)
    keep_kernel(
        layer, method, Packed(weight if layer.unit.layout == "transposed" else weight.t(), None)
    )


def _quantize(layer: Layer, _: Method) -> None:
    wide = layer.weight.data.float()
    scale = wide.abs().max().clamp(min=1e-6) / 127
    layer.weight = frozen((wide / scale).nan_to_num().round().clamp(-127, 127).to(torch.int8))
    layer.weight_scale = frozen(scale.view(1))


def _dequantize(layer: Layer, _: Method) -> None:
    layer.weight = frozen(layer.weight.data.float() * layer.scale.data)
    if layer.unit.place == "list":
        del layer.scale


def _order(layer: Layer, _: Method) -> None:
    """As GPTQ: columns are sorted by group, and what said how is gone."""
    order = torch.argsort(layer.order.data, stable=True)
    layer.weight.data.copy_(
        layer.weight.data[..., order] if _last_is_cols(layer) else layer.weight.data[order]
    )
    layer.order = frozen(torch.empty(0, dtype=torch.int32))


def _last_is_cols(layer: Layer) -> bool:
    return layer.unit.layout != "transposed"


def _unordered(layer: Layer, _: Method) -> None:
    layer.order = frozen(torch.empty(0, dtype=torch.int32))


def _derive(layer: Layer, method: Method) -> None:
    keep(layer, method, layer.weight.data.float() * 2 + 1)


def keep(layer: Layer, method: object, made: Tensor) -> None:
    place = layer.unit.place
    if place == "list":
        vars(layer)["parts"] = [made, "and more"]
    elif place == "dictionary":
        vars(layer)["parts"] = {"derived": made}
    elif place == "method":
        vars(method)["derived"] = made
    elif place == "buffer":
        layer.register_buffer("derived", made, persistent=False)
    else:
        vars(layer)["derived"] = made


def _number(layer: Layer, _: Method) -> None:
    """As scales of a KV cache: kernels are given a number."""
    vars(layer)["scale_number"] = float(layer.scale.data)
    if layer.unit.place == "list":
        del layer.scale


def _maximum(layer: Layer, method: Method) -> None:
    """As scales of fused layers: the larger one is kept."""
    keep(layer, method, torch.maximum(layer.scale.data, layer.scale2.data))
    del layer.scale, layer.scale2


def _other(layer: Layer, method: Method) -> None:
    other = vars(layer)["neighbour"][0]
    found = (
        other.weight.data.float().sum()
        if other is not None and "weight" in other._parameters
        else 0.0
    )
    keep(layer, method, layer.weight.data.float() + found)


def _nothing(layer: Layer, method: Method) -> None:
    del layer, method


PROCESSES: Final[dict[str, Callable[[Layer, Method], None]]] = {
    "nothing": _nothing,
    "flip": _flip,
    "turn": _turn,
    "pack": _pack,
    "empty": _empty,
    "delete": _delete,
    "prepack": _prepack,
    "first": _first,
    "into": _into,
    "alias": _alias,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "order": _order,
    "unordered": _unordered,
    "derive": _derive,
    "number": _number,
    "maximum": _maximum,
    "other": _other,
}


def process(layer: Layer) -> None:
    method = vars(layer).get("quant_method")
    if method is not None:
        method.process_weights_after_loading(layer)
        if "by process" in layer.unit.constants:
            vars(layer)["made"] = torch.full((3,), 0.25)
