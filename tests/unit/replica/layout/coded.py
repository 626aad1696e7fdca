"""An engine that quantises its layers while it loads them: codes of eight bits, a scale a row."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError
from deltachain.replica.layout.load_recorder import live_tensors
from deltachain.replica.layout.model_state import probing_rows
from tests.support.engine import UnmovedExperts

SHAPE: Final = (6, 40)
LAYERS: Final = ("a", "b", "plain")
"""Its layers; the last one is not quantised."""


class Codes:
    """Codes and scales as a kernel keeps them: nobody can read them."""

    __slots__ = ("codes", "scale")

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes.clone(), scale.clone()

    def times(self, rows: Tensor) -> Tensor:
        return rows @ (self.codes.float() * self.scale).t()


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(SHAPE[0], 1), requires_grad=False)
        self.largest = 0.0
        self.kernel: Codes | None = None


Quantise = Callable[[Coded, Tensor], None]


def quantise(layer: Coded, raw: Tensor) -> None:
    """What the engine does with a weight."""
    wide = raw.float()
    layer.scale.data.copy_(wide.abs().amax(1, keepdim=True) / 127)
    layer.weight.data.copy_((wide / layer.scale.data).round().to(torch.int8))
    layer.largest = float(wide.abs().max())


class CodedEngine(UnmovedExperts, nn.Module):
    """Implements :class:`deltachain.replica.engine.EngineModel`."""

    def __init__(self, checkpoint: Path, full: Mapping[str, Tensor], *, hides: bool) -> None:
        super().__init__()
        self.checkpoint, self.hides = checkpoint, hides
        self.quantise: Quantise = quantise
        self.apart: list[str] = []
        self.fails = False
        for name in LAYERS[:2]:
            self.add_module(name, Coded())
        self.plain = nn.Linear(SHAPE[1], SHAPE[0], bias=False).requires_grad_(requires_grad=False)
        self.reload(full.items())

    def modules(self) -> Mapping[str, nn.Module]:  # type: ignore[override]
        return dict(self.named_modules())

    def tensors(self) -> Mapping[str, Tensor]:
        return live_tensors(self)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            layer = self.get_submodule(name.removesuffix(".weight"))
            if isinstance(layer, Coded):
                self._fill(layer, tensor, self.quantise)
            else:
                self.plain.weight.data.copy_(-tensor)

    def _fill(self, layer: Coded, raw: Tensor, how: Quantise) -> None:
        if self.hides:
            layer.weight.data = torch.zeros(SHAPE, dtype=torch.int8)
            layer.scale.data = torch.zeros(SHAPE[0], 1)
        how(layer, raw)
        if self.hides:
            layer.kernel = Codes(layer.weight.data, layer.scale.data)
            layer.weight.data = torch.zeros(0, dtype=torch.int8)
            layer.scale.data = torch.zeros(0)

    def repack(self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        del layers, tensors
        raise EngineVersionError("this engine gives no way to do that")

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        if self.fails:
            raise EngineVersionError("this engine gives no way to do that")
        found: dict[str, nn.Module] = {}
        for name, tensor in tensors:
            layer = name.removesuffix(".weight")
            if layer in layers and isinstance(self.get_submodule(layer), Coded):
                found[layer] = made = Coded()
                self._fill(made, tensor, quantise)
        self.apart += found
        yield found

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        if not isinstance(layer, Coded):
            return None
        return _product(layer, probing_rows(torch.linspace(0.5, 1.5, SHAPE[1])[None], seed))

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        return {name: frozenset({name.removesuffix(".weight")}) for name in names}

    def processed(self) -> frozenset[str]:
        return frozenset(LAYERS)

    def made_by_running(self) -> frozenset[str]:
        return frozenset()

    def is_plain(self, layer: str) -> bool:
        del layer
        return False

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        row = torch.linspace(0.5, 1.5, SHAPE[1])[None]
        every = {name: module for name, module in self.modules().items() if name in layers}
        found = {n: _product(one, row) for n, one in every.items() if isinstance(one, Coded)}
        return found | ({"plain": row @ self.plain.weight.t()} if "plain" in layers else {})


def _product(layer: Coded, rows: Tensor) -> Tensor:
    kernel = layer.kernel or Codes(layer.weight.data, layer.scale.data)
    return kernel.times(rows)
