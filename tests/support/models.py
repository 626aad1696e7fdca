"""Tiny models, simulated training, and an independent recomputation of a chain.

``train_`` changes bits like an optimizer step. ``recompute`` rebuilds every version of a chain from
its objects, without a subscriber.
"""

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
from deltachain.chain.plan import Plan
from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint
from deltachain.format.documents import EdgeRecord, EdgeSummary, summarise, unseal
from deltachain.format.keys import digest_key, object_digest
from deltachain.store import Store
from deltachain.types import Bits, StateDigest, TensorSpec, Version
from tests.contract import reference
from tests.support.fetch import fetch

State: TypeAlias = Mapping[str, Bits]
"""Flat unsigned bits of every tensor, by checkpoint name."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TinyModel(nn.Module):
    """Model with all special cases of weights, in a few thousand elements."""

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
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.copy_(drawn.to(parameter.dtype))


def plain_model(seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model = nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 8, dtype=dtype))
    fill_(model, seed)
    return model


def train_(model: nn.Module, seed: int, *, share: float = 0.01) -> None:
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
    return {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}


def bits_of(tensors: nn.Module | Mapping[str, Tensor]) -> dict[str, Bits]:
    named = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    return {name: _unsigned(tensor) for name, tensor in named.items()}


def same(one: State, other: State) -> bool:
    shared = one.keys() & other.keys()
    return bool(shared) and all(np.array_equal(one[name], other[name]) for name in shared)


def _unsigned(tensor: Tensor) -> Bits:
    array = tensor.detach().cpu().contiguous().view(-1).view(_BITS[tensor.element_size()]).numpy()
    return array.view(f"<u{array.itemsize}").copy()


@dataclass(frozen=True, slots=True)
class Replica:
    """A target for tests."""

    kind: str
    target: nn.Module | dict[str, Tensor] | Path
    bits: Callable[[], State]


def replica_of(model: nn.Module, kind: str, folder: Path) -> Replica:
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
    """Flip one bit of the first element of a weight, as others do whom torch does not count."""
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
    tensor.data.view(-1).view(torch.uint8)[0] ^= 1


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One version, rebuilt from its objects."""

    committed: Committed
    state: State
    anchored: bool


def recompute(store: Store) -> dict[Version, Recomputed]:
    """Rebuild and verify every version of a chain, edge by edge."""
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
    specs: dict[str, TensorSpec] = {spec.name: spec for spec in chain.table.specs()}
    digests = (reference.digest(digest_key(spec), state[name]) for name, spec in specs.items())
    return sum(digests, StateDigest())


def _apply(chain: Chain, summary: EdgeSummary, state: State) -> dict[str, Bits]:
    plan = Plan(held=summary.base, target=summary.version, edges=(summary,))
    reference = chain.edge(summary).reference
    base = Path(reference.path) if reference else None  # a test trusts the store that it made
    fetched = fetch(chain, plan, base=base)
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
