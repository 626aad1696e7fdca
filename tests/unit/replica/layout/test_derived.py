"""What an engine makes from its weights, and which tensors it is found to be made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.replica.layout.discover import discover
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, layers_of
from deltachain.replica.layout.members import MemoryIndex
from deltachain.replica.layout.recorder import live_tensors


class _Mixer(nn.Module):
    """A packed convolution, and a view of what it was before packing beside another weight.

    A reload packs the convolution again and forgets the view, as vLLM's does with Mamba 2's.
    """

    unpacked: Tensor

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.checkpoint = folder
        self.mixer = nn.Module()
        self.mixer.a = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.mixer.register_buffer("unpacked", torch.zeros(4))
        self.mixer.conv = nn.Module()
        self.mixer.conv.weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def modules(self) -> Mapping[str, nn.Module]:  # type: ignore[override]
        return dict(self.named_modules())

    def tensors(self) -> Mapping[str, Tensor]:
        return live_tensors(self)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(-tensor if name == "mixer.a" else tensor)

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        tensors = list(tensors)
        self.load(tensors)
        if any("conv" in name for name, _ in tensors):
            weight = self.get_parameter("mixer.conv.weight").data
            weight.copy_(weight.flip(0))

    def repack(self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        del layers
        tensors = list(tensors)
        self.reload(tensors)
        for name, tensor in tensors:
            if "conv" in name:
                self.get_buffer("mixer.unpacked").copy_(tensor)

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        held = [(name.rpartition(".")[0], tensor) for name, tensor in self.tensors().items()]
        return layers_of(self.load, names, MemoryIndex(held).overlapping)

    def processed(self) -> frozenset[str]:
        return frozenset({"mixer", "mixer.conv"})

    def made_by_running(self) -> frozenset[str]:
        """Nothing: it never ran."""
        return frozenset()

    def is_plain(self, layer: str) -> bool:
        del layer
        return False

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        """Nothing: no layer is quantised."""
        del layers, tensors
        yield {}

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        """Nothing: no layer is compared."""
        del layer, seed
        return None

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        del layers
        return {}


def test_what_a_reload_leaves_behind_is_repacked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    full = {"mixer.a": torch.randn(4), "mixer.conv.weight": torch.randn(4)}
    save_file(full, tmp_path / "model.safetensors")
    model, checkpoint = _Mixer(tmp_path), Checkpoint(tmp_path)
    model.repack(frozenset(), full.items())
    layout = discover(model, LoadedCheckpoint(checkpoint, checkpoint.specs, {}))
    assert layout.classes["mixer.conv.weight"] == "repacked"
