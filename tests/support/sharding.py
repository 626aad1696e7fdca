"""A small model as a trainer holds it, and its expected shards on the ranks of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint, write_weights
from deltachain.kernels.device import bits_of
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import BITS_DTYPES, TensorSpec

HIDDEN: Final = 16
HEAD: Final = 4
"""Elements of an attention head; there are four query, two key and two value heads."""
KV_HEADS: Final = 2
INNER: Final = 24
VOCAB: Final = 50
PADDED: Final = 56
EXPERTS: Final = 4

ODD: Final[dict[str, tuple[int, ...]]] = {
    "conv": (HIDDEN, 8),
    "sliced": (8, 6),
    "cast": (HIDDEN,),
    "decay": (8,),
    "bias": (HIDDEN,),
    "indexed": (8, 6),
    "flipped": (8, 6),
    "packed": (8, HIDDEN),
    "shadow": (8, HIDDEN),
    "stuck": (8, 6),
}
"""Shapes of tensors with special loaders; see :class:`engine.FakeModel`."""

PLAIN: Final = ("conv", "sliced")
"""Special tensors whose live bits equal bits of the checkpoint."""

HOSTED: Final = tuple(name for name in ODD if name != "stuck")
"""Special tensors that the engine can load."""

Full: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sharding of a model over ranks, and its special tensors."""

    tp: int = 1
    pp: int = 1
    layers: int = 2
    odd: tuple[str, ...] = PLAIN
    untied: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class RankModel:
    shape: Sharding
    rank: int

    @property
    def part(self) -> int:
        return self.rank % self.shape.tp

    @property
    def layers(self) -> range:
        each = self.shape.layers // self.shape.pp
        stage = self.rank // self.shape.tp
        return range(stage * each, (stage + 1) * each)

    @property
    def embeds(self) -> bool:
        return 0 in self.layers

    @property
    def ends(self) -> bool:
        return self.shape.layers - 1 in self.layers

    @property
    def has_own_head(self) -> bool:
        return self.ends and (self.shape.untied or not self.embeds)

    @property
    def kv(self) -> slice:
        tp = self.shape.tp
        first = self.part * KV_HEADS // tp
        return slice(first * HEAD, (first + max(KV_HEADS // tp, 1)) * HEAD)

    @property
    def experts(self) -> range:
        tp = self.shape.tp
        return range(self.part * EXPERTS // tp, (self.part + 1) * EXPERTS // tp)


def shapes_of_layer(shape: Sharding) -> dict[str, tuple[int, ...]]:
    return {
        "q": (HIDDEN, HIDDEN),
        "k": (KV_HEADS * HEAD, HIDDEN),
        "v": (KV_HEADS * HEAD, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
        "norm": (HIDDEN,),
        **{f"experts.{number}": (8, HIDDEN) for number in range(EXPERTS)},
        **{name: ODD[name] for name in shape.odd},
    }


def trained(shape: Sharding, seed: int = 0) -> nn.Module:
    root = nn.Module()
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(shape.layers):
        shapes.update({f"layers.{layer}.{n}": s for n, s in shapes_of_layer(shape).items()})
    generator = torch.Generator().manual_seed(seed)
    for name, size in shapes.items():
        drawn = torch.randn(size, generator=generator) * 0.02
        put(root, f"{name}.weight", nn.Parameter(drawn.to(torch.bfloat16)))
    put(root, "head.weight", root.get_parameter("embed.weight"))
    return root


def put(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(leaf, parameter)


def full_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def save(model: nn.Module, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    full = full_of(model)
    specs = [TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in full.items()]
    write_weights(
        folder / WEIGHTS_FILE,
        specs,
        lambda spec: bits_of(full[spec.name]).numpy().view(BITS_DTYPES[2]),
    )
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint(folder)
    return {
        name: torch.from_numpy(checkpoint.bits(name).copy())
        .view(TORCH_DTYPES[spec.dtype])
        .view(spec.shape)
        for name, spec in checkpoint.specs.items()
    }


def expected(share: RankModel, full: Full) -> dict[str, Tensor]:
    embed = torch.zeros(PADDED, HIDDEN, dtype=torch.bfloat16)
    embed[:VOCAB] = full["embed.weight"]
    rows = embed.chunk(share.shape.tp)[share.part]
    found: dict[str, Tensor] = {}
    if share.embeds:
        found["embed.weight"] = rows.clone()
    if share.has_own_head:
        found["head.weight"] = rows.clone()
    if share.ends:
        found["norm.weight"] = full["norm.weight"].clone()
    for layer in share.layers:
        own = {n: full[f"layers.{layer}.{n}.weight"] for n in shapes_of_layer(share.shape)}
        for name, tensor in {**_sharded(share, own), **_odd(share, own)}.items():
            found[f"layers.{layer}.{name}.weight"] = tensor
    return found


def _sharded(share: RankModel, own: Full) -> dict[str, Tensor]:
    tp, part = share.shape.tp, share.part
    q = own["q"].chunk(tp)[part]
    return {
        "qkv": torch.cat([q, own["k"][share.kv], own["v"][share.kv]]),
        "o": own["o"].chunk(tp, 1)[part].clone(),
        "norm": own["norm"].clone(),
        "gate_up": torch.cat([own["gate"].chunk(tp)[part], own["up"].chunk(tp)[part]]),
        "down": own["down"].chunk(tp, 1)[part].clone(),
        "experts": torch.stack([own[f"experts.{number}"] for number in share.experts]),
    }


def _odd(share: RankModel, own: Full) -> dict[str, Tensor]:
    return {name: _made(name, share, own[name]).clone() for name in share.shape.odd}


def _made(name: str, share: RankModel, w: Tensor) -> Tensor:
    if name == "conv":
        return w.t().contiguous()
    if name == "cast":
        return w.float()
    if name == "decay":
        return -torch.exp(w.float())
    if name == "bias" and share.part:
        return torch.zeros_like(w)
    return w.flip(0) if name in ("flipped", "stuck") else w
