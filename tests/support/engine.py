"""A fake inference engine of a few kilobytes, with layouts, loaders and packing of real ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint
from deltachain.errors import ApplyError, DeltaChainError, EngineVersionError
from deltachain.kernels import host
from deltachain.kernels.arrays import StagedBatch
from deltachain.kernels.segments import PlacementTable
from deltachain.kernels.torch_kernels import bits_of
from deltachain.replica import messages
from deltachain.replica.layout.load_recorder import live_tensors
from deltachain.replica.rank import RankService
from deltachain.replica.settings import RankSettings
from deltachain.subscribe.targets import base as target
from deltachain.subscribe.targets.tensor_patch import LiveElements, Patch, write
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import BITS_DTYPES, Bits, TensorSpec
from tests.support.files import write_weights

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


FUSED: Final = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


class UnmovedExperts:
    """An engine that moves no experts."""

    def slots(self) -> Mapping[str, tuple[int, ...]]:
        return {}


class FakeModel:
    """The model of one rank; implements :class:`deltachain.replica.engine.EngineModel`."""

    def __init__(self, shape: Sharding, rank: int, checkpoint: Path, device: str = "cpu") -> None:
        self.share = RankModel(shape, rank)
        self.checkpoint = checkpoint
        self.root = nn.Module()
        self.failing: Callable[[str], None] = lambda _: None
        self.replaces = False
        self.experts: dict[str, tuple[int, ...]] = {}  # in the slots of layers, once they move
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

    def slots(self) -> Mapping[str, tuple[int, ...]]:
        return dict(self.experts)

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
        for layer, slots in self.experts.items():
            held = [full[f"{layer}.{expert}.weight"] for expert in slots]
            wanted[f"{layer}.weight"] = torch.stack(held).to(wanted[f"{layer}.weight"])
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
        if kind[2] == "experts" and int(kind[3]) not in self._slots_of(int(kind[1])):
            return []
        return [f"layers.{kind[1]}.{FUSED.get(kind[2], kind[2])}"]

    def _slots_of(self, layer: int) -> Sequence[int]:
        return self.experts.get(f"layers.{layer}.experts", self.share.experts)

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
            for slot, expert in enumerate(self._slots_of(int(name.split(".")[1]))):
                if expert == int(name.split(".")[3]):
                    live[slot].copy_(w)
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


@dataclass
class Faults:
    """Injected faults, which last until they are removed.

    Attributes:
        refuses: Error with which a rank refuses a call, by rank and name of the call.
        dies: Calls from which a rank does not return, and whether it handles them first.
        shifted: Calls whose replies arrive in another order.
        fewer: Calls without a reply of the last rank.
        stale: Calls to which the last rank sends its reply to the preceding call.
        mistyped: Calls to which the last rank's reply has the type and fields of another one.
        truncated: Calls to which the last rank's reply is truncated.
        writes: Error of a rank's half-done write, by rank, ``write`` or ``take back``, and its
            number among those of one call; raised once each.
        name: Error of naming a version.
        pause: Error of pausing.
    """

    refuses: dict[tuple[int, str], DeltaChainError] = field(default_factory=dict)
    dies: dict[str, bool] = field(default_factory=dict)
    shifted: set[str] = field(default_factory=set)
    fewer: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    mistyped: dict[str, messages.RankReply] = field(default_factory=dict)
    truncated: set[str] = field(default_factory=set)
    writes: dict[tuple[int, str, int], Exception] = field(default_factory=dict)
    name: DeltaChainError | None = None
    pause: DeltaChainError | None = None


class FakeEngine:
    """A fake :class:`deltachain.replica.engine.Engine`, which refuses writes unless paused."""

    def __init__(self, shape: Sharding, checkpoint: Path, spool: Path, url: str = "") -> None:
        self.models = [FakeModel(shape, rank, checkpoint) for rank in range(shape.ranks)]
        settings = RankSettings(spool=spool, url=url)
        self.services = [
            RankService(lambda model=model: model, number, settings)  # type: ignore[misc]
            for number, model in enumerate(self.models)
        ]
        self.faults = Faults()
        self.draft: FakeEngine | None = None
        self.software = "fake/1.0"
        self.events: list[str] = []
        self.paused = self.dead = False
        self._before: list[str] = []

    def call(self, request: messages.RankRequest) -> Sequence[messages.RankReply]:
        name = messages.name_of(request)
        if request.of_draft and self.draft is not None:
            assert self.paused or not isinstance(request, messages.SwapRequest)
            self.draft.paused = self.paused
            return self.draft.call(request)
        if isinstance(request, messages.SwapRequest):
            assert self.paused, "weights are written while the engine runs"
            self.events.append("take back" if request.back else "write")
        if self.faults.dies.get(name) is False:
            raise ApplyError(f"the engine did not answer {name!r}")
        replies = [self._send(rank, request) for rank in range(len(self.services))]
        if name in self.faults.dies:
            raise ApplyError(f"the engine did not answer {name!r}")
        return self._received(name, replies)

    def _received(self, name: str, replies: list[str]) -> Sequence[messages.RankReply]:
        faults = self.faults
        if name in faults.shifted:
            replies = replies[1:] + replies[:1]
        if name in faults.fewer:
            replies = replies[:-1]
        before, self._before = self._before, replies
        if name in faults.stale:
            replies = [*replies[:-1], before[-1]]
        if name in faults.truncated:
            replies = [*replies[:-1], replies[-1][: len(replies[-1]) // 2]]
        found: list[messages.RankReply] = [messages.decode_reply(text) for text in replies]
        if name in faults.mistyped:
            found[-1] = messages.addressed(faults.mistyped[name], found[-1].rank, found[-1])
        return found

    def _send(self, rank: int, request: messages.RankRequest) -> str:
        refusal = self.faults.refuses.get((rank, messages.name_of(request)))
        if refusal is not None:
            reply = messages.Refusal(error=type(refusal).__name__, message=str(refusal.args[0]))
            return messages.encode(messages.addressed(reply, rank, request))
        with self._failing_writes(rank):
            return self.services[rank].answer(messages.encode(request))

    @contextmanager
    def _failing_writes(self, rank: int) -> Iterator[None]:
        number = 0

        def failure() -> Exception | None:
            nonlocal number
            number += 1
            return self.faults.writes.pop((rank, self.events[-1], number), None)

        def write_or_fail(live: LiveElements, patch: Patch) -> None:
            lost = failure()
            if lost is None:
                write(live, patch)
                return
            if patch.indices is not None and len(patch.indices):
                storage: Any = live.storage
                storage[patch.indices[0]] = patch.new[0]  # half done
            raise lost

        write_batch_ = host.write_batch_

        def write_batch_or_fail(places: PlacementTable, staged: StagedBatch, bits: Bits) -> None:
            for place, first, count in staged.blocks.tolist():
                lost = failure()
                half = np.array([(place, first, count if lost is None else min(count, 1))])
                write_batch_(places, staged._replace(blocks=half), bits)
                if lost is not None:
                    raise lost

        with (
            mock.patch.object(target, "write_patch", write_or_fail),
            mock.patch.object(host, "write_batch_", write_batch_or_fail),
        ):
            yield

    def is_dead(self) -> bool:
        return self.dead

    def is_paused(self) -> bool:
        return self.paused

    def pause(self, *, in_doubt: bool = False) -> None:
        self.events.append("pause in doubt" if in_doubt else "pause")
        if self.faults.pause is not None:
            raise self.faults.pause
        self.paused = True

    def resume(self) -> None:
        self.events.append("resume")
        self.paused = False

    def oldest(self) -> str:
        return ""

    def name_version(self, version: int) -> None:
        self.events.append(f"name {version}")
        if self.faults.name is not None:
            raise self.faults.name

    def holds(self, full: Full) -> bool:
        return all(model.holds(full) for model in self.models)

    def bits(self) -> list[dict[str, bytes]]:
        return [
            {name: bytes_of(tensor).numpy().tobytes() for name, tensor in model.computed().items()}
            for model in self.models
        ]
