"""The layers of a random engine: how they are created, and what they compute."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.property.recipe import Source, Unit
from tests.property.writers import Region

DTYPES: Final[dict[str, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "int32": torch.int32,
}


class Packed:
    """What a kernel keeps to itself: nobody can look inside, as with weights packed by oneDNN."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.weight.float()
        return y if self.bias is None else y + self.bias.float()


class Layer(nn.Module):
    weight: Any

    def __init__(self, unit: Unit, rank: int) -> None:
        super().__init__()
        self.unit = unit
        self.rank = rank
        live = DTYPES[unit.live]
        count, rows = len(unit.rows), sum(unit.rows)
        shape: tuple[int, ...] = (rows + unit.padded, unit.cols)
        if unit.layout == "transposed":
            shape = (unit.cols, rows)
        if unit.layout == "experts":
            shape = (count, unit.rows[0], unit.cols)
        self.weight = frozen(torch.zeros(shape, dtype=live))
        if unit.bias and not unit.bias_late:
            self.bias = frozen(torch.zeros(rows, dtype=live))
        if unit.scale or unit.process in ("dequantize", "number", "maximum"):
            self.scale = frozen(torch.zeros(1))
        if unit.process == "maximum":
            self.scale2 = frozen(torch.zeros(1))
        if unit.process in ("order", "unordered"):
            self.order = frozen(torch.zeros(unit.cols, dtype=torch.int32))
        self._make_constants()

    def _make_constants(self) -> None:
        constants = self.unit.constants
        if "parameter" in constants:
            self.ones = frozen(torch.ones(4))
        if "buffer" in constants:
            self.register_buffer("table", torch.arange(5).float(), persistent=False)
        if "attribute" in constants:
            self.factors = [torch.full((2,), 0.5), torch.full((2,), 1.5)]

    def forward(self, x: Tensor) -> Tensor:
        packed: Packed | None = vars(self).get("apply_packed")
        if packed is None:
            packed = vars(vars(self).get("quant_method", self)).get("kernel")
        bias = self._parameters.get("bias")
        if packed is not None:
            y = packed(x)
            return y if packed.bias is not None or bias is None else y + bias.float()
        weight: Tensor = self.weight.float()
        if vars(vars(self).get("quant_method", self)).get("is_packed", False):
            weight = weight.flip(-1)
        if self.unit.layout == "experts":
            return (weight @ x).flatten()
        y = x @ (weight if self.unit.layout == "transposed" else weight.t())
        y = y if bias is None or len(bias) != len(y) else y + bias.float()
        scale: float = vars(self).get("scale_number", 1.0)
        return y * scale

    def region(self, source: Source) -> Region:
        if not source.part.startswith("w") and source.part != "shadow":
            return Region(self, source.part, lambda data: data)
        at = 0 if source.part == "shadow" else int(source.part[1:])
        return Region(self, "weight", partial(_cut, self.unit, at))

    def own_share(self, source: Source, w: Tensor) -> Tensor:
        unit = self.unit
        if source.part in ("scale", "scale2", "order", "bias") or not unit.shard or unit.only >= 0:
            return w
        at = 0 if source.part == "shadow" else int(source.part[1:])
        dim, size = (0, unit.rows[at]) if unit.shard == "rows" else (1, unit.cols)
        return w.narrow(dim, self.rank * size % w.shape[dim], size)


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def fixed_input(layer: Layer) -> Tensor:
    return torch.linspace(0.5, 1.5, layer.unit.cols)


def _cut(unit: Unit, at: int, data: Tensor) -> Tensor:
    if unit.layout == "experts":
        return data[at]
    turned = data.t() if unit.layout == "transposed" else data
    if unit.layout == "interleaved":
        return turned[: sum(unit.rows)][at :: len(unit.rows)]
    return turned.narrow(0, sum(unit.rows[:at]), unit.rows[at])
