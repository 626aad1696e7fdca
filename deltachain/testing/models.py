"""Tiny models, training that only moves bits, and the truth about a chain to compare with.

``train_`` stands for optimizer steps: what training does to bits, without the hours. ``recompute``
is the chain's content found without a subscriber: every version from its objects alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import fetch
from deltachain.chain.plan import Plan
from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint
from deltachain.format.digest import digest_key, object_digest
from deltachain.format.documents import EdgeRecord, EdgeSummary, summarise, unseal
from deltachain.kernels import reference
from deltachain.store import Store
from deltachain.types import Bits, StateDigest, TensorSpec, Version

State: TypeAlias = Mapping[str, Bits]
"""Flat unsigned bits of every tensor, by checkpoint name."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TinyModel(nn.Module):
    """Everything that makes weights awkward, in a few thousand elements.

    A bf16 trunk with an fp32 norm, an output layer tied to the embedding, a frozen layer, a buffer
    that a checkpoint keeps and one that it does not.

    Args:
        seed: Two models of the same seed have the same bits.
        width: Of the hidden state.
    """

    def __init__(self, seed: int = 0, *, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, width, dtype=torch.bfloat16)
        self.layer = nn.Linear(width, 2 * width, dtype=torch.bfloat16)
        self.frozen = nn.Linear(2 * width, width, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 48, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        fill_(self, seed)


def fill_(model: nn.Module, seed: int) -> None:
    """Give every weight the normal distribution that trained ones have, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.copy_(drawn.to(parameter.dtype))


def plain_model(seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Two layers in one dtype, and nothing else."""
    model = nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 8, dtype=dtype))
    fill_(model, seed)
    return model


def train_(model: nn.Module, seed: int, *, share: float = 0.01) -> None:
    """Move a share of the bits of every trainable weight, and of kept integer buffers, by one step.

    A step is one unit in the last place of bf16, for fp32 masters as well, so that each is seen on
    the wire. The seed decides everything.
    """
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter.data for parameter in model.parameters() if parameter.requires_grad]
    kept = set(model.state_dict())
    trained += [buffer for name, buffer in model.named_buffers() if name in kept]
    for tensor in trained:
        bits = tensor.view(-1).view(_BITS[tensor.element_size()])
        count = max(1, int(share * bits.numel()))
        at = torch.randperm(bits.numel(), generator=generator)[:count]
        sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
        step = 1 << 16 if tensor.dtype == torch.float32 else 1
        bits[at] += (sign * step).to(bits.dtype)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Zeros under the names of a checkpoint of the model: a target that holds nothing."""
    return {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}


def bits_of(tensors: nn.Module | Mapping[str, Tensor]) -> dict[str, Bits]:
    """A copy of the bits of a model, or of tensors by name, as they are now."""
    named = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    return {name: _unsigned(tensor) for name, tensor in named.items()}


def same(one: State, other: State) -> bool:
    """Whether every tensor that both name has the same bits, and they name any."""
    shared = one.keys() & other.keys()
    return bool(shared) and all(np.array_equal(one[name], other[name]) for name in shared)


def _unsigned(tensor: Tensor) -> Bits:
    array = tensor.detach().cpu().contiguous().view(-1).view(_BITS[tensor.element_size()]).numpy()
    return array.view(f"<u{array.itemsize}").copy()


@dataclass(frozen=True, slots=True)
class Replica:
    """Something to follow a chain with.

    Attributes:
        kind: ``dict``, ``module`` or ``folder``.
        target: What a subscriber takes.
        bits: Reads what it holds, past the subscriber.
    """

    kind: str
    target: nn.Module | dict[str, Tensor] | Path
    bits: Callable[[], State]


def replica_of(model: nn.Module, kind: str, folder: Path) -> Replica:
    """A replica of a model that does not hold its weights yet.

    Args:
        model: Is copied for its shapes alone.
        kind: As in :class:`Replica`.
        folder: Where a folder goes; not there yet.
    """
    if kind == "folder":
        return Replica(kind, folder, lambda: bits_of(load_file(folder / WEIGHTS_FILE)))
    if kind == "dict":
        tensors = tensors_of(model)
        return Replica(kind, tensors, lambda: bits_of(tensors))
    module = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    return Replica(kind, module, lambda: bits_of(module))


def scribble(replica: Replica, *, name: str = "layer.weight") -> None:
    """Somebody else writes to a replica: one bit of the first element of one weight."""
    if isinstance(replica.target, Path):
        file, offset = Checkpoint(replica.target).place(name)
        with file.open("r+b") as opened:
            opened.seek(offset)
            byte = opened.read(1)[0]
            opened.seek(offset)
            opened.write(bytes([byte ^ 1]))
        return
    target = replica.target
    tensor = (target.state_dict() if isinstance(target, nn.Module) else target)[name]
    tensor.detach().view(-1).view(torch.uint8)[0] ^= 1


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One version, from its objects alone.

    Attributes:
        committed: Its manifest.
        state: The bits that its own edge leads to.
        anchored: Whether a recorded anchor was there, and led to the same bits.
    """

    committed: Committed
    state: State
    anchored: bool


def recompute(store: Store) -> dict[Version, Recomputed]:
    """Walk a whole chain, edge by edge, and prove every version in it.

    Manifests must be contiguous, each the parent of the next; epochs must never fall; the bits that
    each edge leads to must have the state digest of the manifest.
    """
    chain = Chain.open(store)
    head = chain.head()
    found: dict[Version, Recomputed] = {}
    state: dict[str, Bits] = {}
    epoch = 0
    for committed in chain.history(0, -1 if head is None else head.version):
        manifest = committed.manifest
        assert manifest.epoch >= epoch, f"version {manifest.version}: epoch {manifest.epoch}"
        epoch = manifest.epoch
        state = _apply(chain, manifest.summary(), state)
        assert state_digest(chain, state) == committed.state, f"version {manifest.version}"
        anchors = [_apply(chain, summary, {}) for summary in _records(chain, committed)]
        assert all(same(state, anchor) for anchor in anchors), f"anchor of {manifest.version}"
        found[manifest.version] = Recomputed(committed, state, bool(anchors))
    return found


def state_digest(chain: Chain, state: State) -> StateDigest:
    """State digest of bits, by the definition of the kernels."""
    specs: dict[str, TensorSpec] = {spec.name: spec for spec in chain.table.specs()}
    digests = (reference.digest(digest_key(spec), state[name]) for name, spec in specs.items())
    return sum(digests, StateDigest())


def _apply(chain: Chain, summary: EdgeSummary, state: State) -> dict[str, Bits]:
    """The bits after one edge."""
    plan = Plan(held=summary.base, target=summary.version, edges=(summary,))
    fetched = fetch(chain, plan)
    after = dict(state)
    for name in fetched.names:
        delta = fetched.read(name)
        if delta.indices is None:
            after[name] = delta.values
        else:
            after[name] = state[name].copy()
            after[name][delta.indices] = delta.new_bits(state[name][delta.indices])
    return after


def _records(chain: Chain, committed: Committed) -> Iterator[EdgeSummary]:
    """Anchors that were recorded for a version after its commit."""
    for info in chain.store.list(f"edges/{committed.version:020d}/"):
        data = chain.store.get(info.key)
        edge = unseal(data, EdgeRecord, key=info.key).edge
        yield summarise(
            committed.version,
            edge,
            committed.manifest.state,
            record=info.key,
            digest=object_digest(data),
        )
