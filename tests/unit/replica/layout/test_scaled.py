from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.delta import TensorDelta
from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.classes import agree
from deltachain.replica.layout.discover import discover
from deltachain.replica.layout.load_recorder import live_tensors
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, layers_of
from deltachain.replica.layout.module_members import MemoryIndex
from deltachain.replica.layout.runtime_tables import record_loaded_state
from deltachain.replica.rank import Rank
from tests.support.engine import UnmovedExperts
from tests.support.spools import spool_of
from tests.unit.replica.layout.scaled import ScaledEngine


class _Mixer(UnmovedExperts, nn.Module):
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
        return frozenset()

    def is_plain(self, layer: str) -> bool:
        del layer
        return False

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        del layers, tensors
        yield {}

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
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


OLD, NEW = 0.5, 0.25
"""Scales of keys."""


@pytest.fixture
def engine(tmp_path: Path) -> ScaledEngine:
    full = {"proj.weight": torch.randn(4, 4), "attn.k_scale": torch.tensor([OLD])}
    save_file(full, tmp_path / "model.safetensors")
    made = ScaledEngine(tmp_path, full)
    record_loaded_state(made)
    return made


def attached(engine: ScaledEngine) -> Rank:
    specs = Checkpoint(engine.checkpoint).specs
    rank = Rank(engine, specs.values(), {})
    agreement = agree(specs.values(), [rank.report()])
    assert agreement.classes == {"proj.weight": "in_place", "attn.k_scale": "reloaded"}
    rank.agree(agreement.classes, {n: labels[0] for n, labels in agreement.holders.items()})
    return rank


def swap(rank: Rank, folder: Path) -> None:
    spec = Checkpoint(folder).specs["attn.k_scale"]
    delta = TensorDelta.dense(spec, np.array([NEW], np.float32).view(np.uint32))
    spool = spool_of(folder / "spool", [delta])
    rank.stage(1, spool.folder, 1 << 20)
    rank.swap(1, 1, back=False)


def test_a_number_that_attention_made_of_a_scale_is_refused(engine: ScaledEngine) -> None:
    """It would stay as it is, in captured graphs too."""
    engine.run()
    with pytest.raises(TensorMismatchError, match=r"computed attn\.impl\.bmm1_scale at run time"):
        Rank(engine, Checkpoint(engine.checkpoint).specs.values(), {})
    assert engine.attn._k_scale_float == OLD


def test_a_number_that_attention_makes_later_is_made_again(
    engine: ScaledEngine, tmp_path: Path
) -> None:
    rank = attached(engine)
    engine.run()
    assert engine.attn.impl.bmm1_scale == 0.125 * OLD
    swap(rank, tmp_path)
    assert engine.attn._k_scale_float == NEW
    assert torch.equal(engine.run(), engine.proj(torch.ones(1, 4)) * (0.125 * NEW))
    assert engine.attn.impl.bmm1_scale == 0.125 * NEW


def test_numbers_of_attention_without_scales_in_the_chain_refuse_nothing(tmp_path: Path) -> None:
    full = {"proj.weight": torch.randn(4, 4)}
    save_file(full, tmp_path / "model.safetensors")
    engine = ScaledEngine(tmp_path, full)
    record_loaded_state(engine)
    engine.run()
    rank = Rank(engine, Checkpoint(tmp_path).specs.values(), {})
    assert {one.kind for one in rank.report().values()} == {"in_place"}
