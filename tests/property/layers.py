"""The layers of a random engine: how they are created, and what they compute."""

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.property.recipe import Recipe, Region, Source, Unit

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


WIDTHS: Final = {2: torch.int16, 4: torch.int32}


def first(recipe: Recipe) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(recipe.seed)
    random = Random(recipe.seed)
    found: dict[str, Tensor] = {}
    for name, source in sorted(recipe.sources().items()):
        tensor = _drawn(source, drawn)
        if source.flat:
            tensor.fill_(random.choice((0, 1)))
        if source.part == "order" and random.random() < 0.3:
            tensor = torch.arange(len(tensor), dtype=tensor.dtype)
        found[name] = tensor
    for name, other in equals(recipe).items():
        found[name] = found[other].clone()
    return _with_aliases(recipe, found)


def later(
    recipe: Recipe, before: Mapping[str, Tensor], version: int, fixed: frozenset[str]
) -> dict[str, Tensor]:
    """The next version: some tensors have other bits, some of them in a few elements only."""
    drawn = torch.Generator().manual_seed(recipe.seed * 7 + version)
    random = Random(f"{recipe.seed} {version}")
    sources, found = recipe.sources(), dict(before)
    wild = _wild(recipe)
    for name in sorted(found):
        if name in fixed or random.random() >= recipe.share:
            continue
        tensor = _drawn(sources[name], drawn)
        if name in wild and random.random() < 0.5:
            width = WIDTHS[tensor.element_size()]
            tensor = torch.randint(-(2**15), 2**15, tensor.shape, generator=drawn).to(width)
            tensor = tensor.view(before[name].dtype)
        if random.random() < 0.5 and sources[name].part != "order":
            few = torch.rand(tensor.shape, generator=drawn) < 0.3
            tensor = torch.where(few, tensor, before[name])
        found[name] = tensor
    if random.random() < 0.5:
        for name, base in equals(recipe).items():
            found[name] = found[base].clone()
    return _with_aliases(recipe, found)


def equals(recipe: Recipe) -> dict[str, str]:
    return {
        f"model.{number}.w{at}": f"model.{unit.equal}.w{at}"
        for number, unit in enumerate(recipe.units)
        for at in range(len(unit.rows) if unit.equal >= 0 else 0)
    }


def are_parted(recipe: Recipe, tensors: Mapping[str, Tensor]) -> bool:
    return any(not torch.equal(tensors[n], tensors[o]) for n, o in equals(recipe).items())


def other(recipe: Recipe, name: str, turn: int) -> Tensor:
    drawn = torch.Generator().manual_seed(recipe.seed * 11 + turn)
    return _drawn(recipe.sources()[name], drawn)


def _wild(recipe: Recipe) -> frozenset[str]:
    """Tensors whose bits may be any, NaNs too: nothing is computed from them."""
    related = {at for unit in recipe.units for at in (unit.tie, unit.twin)}
    if any(unit.process == "other" for unit in recipe.units):
        return frozenset()
    return frozenset(
        f"model.{number}.w{at}"
        for number, unit in enumerate(recipe.units)
        if unit.is_pure and not unit.tryable and number not in related and unit.tie < 0
        for at in range(len(unit.rows))
    )


def _drawn(source: Source, drawn: torch.Generator) -> Tensor:
    dtype = DTYPES[source.dtype]
    if source.part == "order":
        return torch.randperm(source.shape[0], generator=drawn).to(dtype)
    if dtype == torch.int8:
        return torch.randint(-100, 100, source.shape, generator=drawn).to(dtype)
    if source.part.startswith("scale"):
        return torch.rand(source.shape, generator=drawn) + 0.5
    return (torch.randn(source.shape, generator=drawn) * 0.5).to(dtype)


def _with_aliases(recipe: Recipe, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for alias, name in recipe.aliases().items():
        tensors[alias] = tensors[name].clone()
    return tensors
