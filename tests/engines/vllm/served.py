"""A rank of a stock vLLM that serves one checkpoint, and has staged another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.replica.layout.members import numbers_in
from deltachain.replica.rank import Rank
from tests.engines.families import checkpoint
from tests.engines.matrix import Change, attached, changed, copied, live
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
    outputs = engine.compute(frozenset(engine.modules()))
    return found | {f"{name}()": output for name, output in copied(outputs).items()}


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
        deltas = Change(specs, agreement, before, after).deltas()
        spool = spool_of(scratch / "spool", deltas)
        rank.stage(1, spool.folder, 1 << 30)
        yield Served(rank, engine, model, Checkpoint(before), after)


def fresh(folder: Path, **arguments: Any) -> dict[str, Tensor]:
    with load_in_context(folder, plain_linears=False, **arguments) as (config, model):
        return everything(known(config, model), model)
