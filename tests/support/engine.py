"""A fake inference engine of a few kilobytes, with layouts, loaders and packing of real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError
from deltachain.replica.layout.recorder import live_tensors
from tests.support.sharding import (
    HIDDEN,
    Full,
    RankModel,
    Sharding,
    expected,
    put,
    read,
)

FUSED: Final = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


class FakeModel:
    """The model of one rank; implements :class:`deltachain.replica.engine.EngineModel`."""

    def __init__(self, shape: Sharding, rank: int, checkpoint: Path, device: str = "cpu") -> None:
        self.share = RankModel(shape, rank)
        self.checkpoint = checkpoint
        self.root = nn.Module()
        self.failing: Callable[[str], None] = lambda _: None
        self.replaces = False
        full = read(checkpoint)
        for name, tensor in expected(self.share, full).items():
            live = torch.full_like(tensor, 7).to(device)
            put(self.root, name, nn.Parameter(live, requires_grad=False))
        if self.share.embeds and self.share.ends and not shape.untied:
            put(self.root, "head.weight", self.root.get_parameter("embed.weight"))
        for name in sorted(self.load(full.items())):
            self._pack(name, again=False)

    @property
    def hidden(self) -> dict[str, Tensor]:
        modules = self.root.named_modules()
        return {f"{n}.weight": m.handle.packed for n, m in modules if hasattr(m, "handle")}

    def modules(self) -> Mapping[str, nn.Module]:
        return dict(self.root.named_modules())

    def tensors(self) -> Mapping[str, Tensor]:
        return live_tensors(self.root)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        done: set[str] = set()
        with torch.no_grad():
            for name, tensor in tensors:
                self.failing(name)
                for layer in self._layers_of(name):
                    self._load_one(name, layer, tensor)
                    done.add(f"{layer}.weight")
        return done

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        kept = {name: self._unpack(name) for name in self.hidden}
        try:
            for name in sorted(self.load(tensors)):
                if self.replaces:
                    live = self.root.get_parameter(name)
                    live.data = live.data.clone()
                self._pack(name, again=True)
        finally:
            for name, parameter in kept.items():
                put(self.root, name, parameter)

    def layers(self, names: Full) -> Mapping[str, frozenset[str]]:
        found = {name: frozenset(self._layers_of(name)) for name in names}
        return {name: layers for name, layers in found.items() if layers}

    def processed(self) -> frozenset[str]:
        kinds = ("flipped", "stuck", "packed", "shadow")
        layers = {name.rpartition(".")[0] for name in self.tensors()}
        return frozenset(layer for layer in layers if layer.rpartition(".")[2] in kinds)

    def made_by_running(self) -> frozenset[str]:
        return frozenset()

    def is_plain(self, layer: str) -> bool:
        del layer
        return False

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

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        hidden = {name.removesuffix(".weight"): tensor for name, tensor in self.hidden.items()}
        return {name: tensor.clone() for name, tensor in hidden.items() if name in layers}

    def computed(self) -> dict[str, Tensor]:
        return {n: t.detach().cpu() for n, t in {**self.tensors(), **self.hidden}.items()}

    def holds(self, full: Full) -> bool:
        wanted, found = expected(self.share, full), self.computed()
        if self.share.embeds and self.share.ends and not self.share.has_own_head:
            wanted["head.weight"] = wanted["embed.weight"]
        return found.keys() == wanted.keys() and all(
            torch.equal(bytes_of(found[name]), bytes_of(tensor)) for name, tensor in wanted.items()
        )

    def forward(self, tokens: Tensor) -> Tensor:
        live = {**self.tensors(), **self.hidden}
        hidden = live["embed.weight"][tokens]
        for layer in self.share.layers:
            own = {n.split(".")[2]: t for n, t in live.items() if n.startswith(f"layers.{layer}.")}
            qkv = hidden @ own["qkv"].t()
            hidden = hidden + qkv[:, :HIDDEN] * qkv[:, HIDDEN:].repeat(1, 1) @ own["o"].t()
            gate, up = (hidden @ own["gate_up"].t()).chunk(2, -1)
            hidden = hidden + (gate * up) @ own["down"].t() + own["norm"]
            hidden = hidden + (hidden @ own["experts"].flatten(0, 1).t()).sum(-1, keepdim=True)
            for name in self.share.shape.odd:
                hidden = hidden + own[name].to(hidden.dtype).sum()
        return (hidden * live["norm.weight"]) @ live["head.weight"].t()

    # Loading

    def _layers_of(self, name: str) -> list[str]:
        kind = name.split(".")
        if kind[0] == "embed":
            return ["embed"] * self.share.embeds + ["head"] * self.share.has_own_head
        if kind[0] == "norm":
            return ["norm"] * self.share.ends
        if kind[0] != "layers" or int(kind[1]) not in self.share.layers:
            return []
        if kind[2] == "experts" and int(kind[3]) not in self.share.experts:
            return []
        return [f"layers.{kind[1]}.{FUSED.get(kind[2], kind[2])}"]

    def _load_one(self, name: str, layer: str, w: Tensor) -> None:
        live = self.root.get_parameter(f"{layer}.weight").data
        part, kind = self.share.part, layer.rpartition(".")[2]
        if kind in ("embed", "head"):
            here = w[part * len(live) : min((part + 1) * len(live), len(w))]
            live[: len(here)].copy_(here)
            live[len(here) :].fill_(0)
        elif kind in ("qkv", "gate_up"):
            self._load_fused(name.split(".")[2], live, w)
        elif kind in ("o", "down"):
            live.copy_(w.narrow(1, part * live.shape[1], live.shape[1]))
        elif kind == "experts":
            live[int(name.split(".")[3]) - self.share.experts[0]].copy_(w)
        else:
            self._load_odd(kind, live, w)

    def _load_fused(self, kind: str, live: Tensor, w: Tensor) -> None:
        part, kv = self.share.part, self.share.kv
        q = len(live) - 2 * (kv.stop - kv.start)
        half = len(live) // 2
        if kind in ("gate", "up"):
            start = half if kind == "up" else 0
            live.narrow(0, start, half).copy_(w.narrow(0, part * half, half))
        elif kind == "q":
            live[:q].copy_(w[part * q : (part + 1) * q])
        else:
            start = q if kind == "k" else q + kv.stop - kv.start
            live.narrow(0, start, kv.stop - kv.start).copy_(w[kv])

    def _load_odd(self, kind: str, live: Tensor, w: Tensor) -> None:
        if kind == "conv":
            live.copy_(w.t())
        elif kind == "sliced":
            live[:5], live[5:] = w[:5], w[5:]
        elif kind == "decay":
            live.copy_(-torch.exp(w.float()))
        elif kind == "bias":
            live.copy_(w.zero_() if self.share.part else w)
        elif kind == "indexed":
            live[torch.arange(len(w), device=live.device)] = w
        else:
            live.copy_(w)

    # Packing

    def _pack(self, name: str, *, again: bool) -> None:
        live = self.root.get_parameter(name)
        kind = name.split(".")[-2]
        if kind == "flipped" or (kind == "stuck" and not again):
            live.data.copy_(live.data.flip(0))
        if kind in ("packed", "shadow"):
            self.root.get_submodule(name.rpartition(".")[0]).handle = _Handle(live.data.clone())  # type: ignore[assignment]
        if kind == "packed" and not again:
            put(self.root, name, nn.Parameter(live.data.new_empty(0), requires_grad=False))

    def _unpack(self, name: str) -> nn.Parameter:
        before = self.root.get_parameter(name)
        if not before.numel():
            room = torch.empty_like(self.hidden[name])
            put(self.root, name, nn.Parameter(room, requires_grad=False))
        return before


class _Handle:
    __slots__ = ("packed",)

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
