"""Layers packed again from other weights, held against a fresh load of these."""

import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint, read_assets
from deltachain.replica.layout.classes import join_sets
from deltachain.replica.layout.module_members import Members, numbers_in
from deltachain.replica.rank import Rank
from tests.engines.families import checkpoint
from tests.engines.matrix import attached, changed, computed, copied, deltas, differences, live
from tests.engines.vllm.fresh import known, load_in_context
from tests.support.spools import spool_of


@dataclass(frozen=True, slots=True)
class Served:
    rank: Rank
    engine: Any
    model: nn.Module
    before: Checkpoint
    after: Path

    def everything(self) -> dict[str, Tensor]:
        return everything(self.engine, self.model)


def everything(engine: Any, model: nn.Module) -> dict[str, Tensor]:
    found = copied(live(model))
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": torch.tensor(one) for key, one in numbers_in(module)}
    return found | computed(engine)


@contextmanager
def served(family: str, scratch: Path, **arguments: Any) -> Iterator[Served]:
    before = checkpoint(family)
    specs = dict(Checkpoint(before).specs)
    with load_in_context(before, plain_linears=False, **arguments) as (config, model):
        engine = known(config, model)
        rank = Rank(engine, specs.values(), {})
        agreement = attached(rank, specs, 0, 1)
        assert not agreement.refused
        assert not [why for why in agreement.reasons.values() if "is not compared" in why]
        after = changed(specs, agreement, before, scratch / "after")
        spool = spool_of(scratch / "spool", deltas(specs, before, after))
        rank.stage(1, spool.folder, 1 << 30)
        yield Served(rank, engine, model, Checkpoint(before), after)


def fresh(folder: Path, **how: Any) -> dict[str, Tensor]:
    with load_in_context(folder, **{"plain_linears": False, **how}) as (config, model):
        return everything(known(config, model), model)


def examine(rank: int, family: str, tp: int = 1, *, plain: bool = False) -> dict[str, Any]:
    """What differs from a fresh load when layers are packed again; every rank must call this."""
    how: Any = {"tp": tp, "rank": rank, "plain_linears": plain}
    before = checkpoint(family)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        one = load_file(before / WEIGHTS_FILE)
        other = {name: _other(name, tensor) for name, tensor in one.items()}
        wanted = fresh(_write(before, other, Path(scratch) / "after"), **how)
        with load_in_context(before, **how) as (config, model):
            engine = known(config, model)
            at_first = everything(engine, model)
            groups = _groups(engine, one)
            every = sorted(layer for layers, _ in groups for layer in layers)
            _repack(engine, every, other.items())
            found["all"] = differences(wanted, everything(engine, model))
            _repack(engine, every, one.items())
            found["back"] = differences(at_first, everything(engine, model))
            some = groups[::2]
            names = {name for _, those in some for name in those}
            mixed = {n: other[n] if n in names else one[n] for n in one}
            for layers, those in some:
                _repack(engine, layers, [(n, other[n]) for n in one if n in those])
            now = everything(engine, model)
        wanted = fresh(_write(before, mixed, Path(scratch) / "mixed"), **how)
        found["some"] = differences(wanted, now)
        found["tried"] = sum(name.endswith("()") for name in wanted)
    return found


def examine_two(rank: int, *families: str) -> dict[str, Any]:
    for family in families:  # once there are ranks, only the first can save
        checkpoint(family)
    return {
        f"{family} {'plain' if plain else 'packed'}": examine(rank, family, 2, plain=plain)
        for family in families
        for plain in (True, False)
    }


def _repack(engine: Any, layers: Iterable[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
    members = Members(engine.modules().values())
    engine.repack(layers, tensors)
    members.settle()


def _other(name: str, tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"other/{name}".encode()))
    if tensor.is_floating_point():
        return (torch.randn(tensor.shape, generator=generator) * 0.07).to(tensor.dtype)
    return tensor.flip(0)


def _write(before: Path, tensors: Mapping[str, Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, data in read_assets(before).items():
        (folder / name).write_bytes(data)
    save_file(dict(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def _groups(engine: Any, tensors: Mapping[str, Tensor]) -> list[tuple[set[str], set[str]]]:
    """Layers and tensors that are loaded together."""
    into = engine.layers({name: tensor.to("meta") for name, tensor in tensors.items()})
    joined = join_sets([name, *layers] for name, layers in into.items())
    return [({*one} - {*into}, {*one} & {*into}) for one in joined]
