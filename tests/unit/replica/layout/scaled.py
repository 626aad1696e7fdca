"""An engine whose attention has a scale of keys, modelled on vLLM's layers and backends.

The scale is loaded into a parameter that exists for as long as weights are loaded. Processing keeps
it in a buffer and as a number. Backends take the number, and some keep a product of it from their
first run on: FlashInfer's ``bmm1_scale``, for one.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError
from deltachain.replica.layout.load_recorder import live_tensors
from deltachain.replica.layout.runtime_tables import made_by_running
from tests.support.engine import UnmovedExperts


class Backend:
    """An implementation of attention, which is no module."""

    def __init__(self) -> None:
        self.scale = 0.125
        self.bmm1_scale: float | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Nothing here; others cast sinks."""

    def forward(self, layer: "Attention", query: Tensor) -> Tensor:
        """What depends on the scale, as in FlashInfer's ``forward``."""
        if self.bmm1_scale is None:
            self.bmm1_scale = self.scale
            self.bmm1_scale *= layer._k_scale_float
        return query * self.bmm1_scale


class Attention(nn.Module):
    """A layer without parameters, once it is loaded."""

    _k_scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self._k_scale_float = 1.0
        self.impl = Backend()

    def forward(self, query: Tensor) -> Tensor:
        return self.impl.forward(self, query)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.impl.process_weights_after_loading(act_dtype)


class ScaledEngine(UnmovedExperts, nn.Module):
    """Implements :class:`deltachain.replica.engine.EngineModel`."""

    def __init__(self, checkpoint: Path, full: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.proj = nn.Linear(4, 4, bias=False).requires_grad_(requires_grad=False)
        self.attn = Attention()
        self.reload(full.items())

    def run(self) -> Tensor:
        found: Tensor = self.attn(self.proj(torch.ones(1, 4)))
        return found

    def modules(self) -> Mapping[str, nn.Module]:  # type: ignore[override]
        return dict(self.named_modules())

    def tensors(self) -> Mapping[str, Tensor]:
        return live_tensors(self)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "attn.k_scale":
                self.attn._k_scale.copy_(tensor.reshape(()))
                self.attn._k_scale_float = float(tensor)
            else:
                self.load([(name, tensor)])

    def repack(self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        del layers, tensors
        raise EngineVersionError("this engine gives no way to do that")

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        del layers, tensors
        yield {}

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        del layer, seed
        return None

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        return {name: frozenset({name.rpartition(".")[0]}) for name in names}

    def processed(self) -> frozenset[str]:
        return frozenset({"attn"})

    def made_by_running(self) -> frozenset[str]:
        return made_by_running(self)

    def is_plain(self, layer: str) -> bool:
        return layer == "proj"

    def compute(self, layers: frozenset[str]) -> Mapping[str, Any]:
        return {"proj": self.proj(torch.ones(1, 4))} if "proj" in layers else {}
