"""Many versions, one after another, in one rank: each is what a freshly loaded model holds."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.replica.rank import Rank
from tests.engines.compare import copied, differences, live
from tests.engines.families import checkpoint
from tests.engines.matrix import Change, attached, changed, computed, engine_fresh, has_digest
from tests.support.spools import spool_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank held after each version."""

    classes: dict[str, int]
    versions: int
    proven: int
    wrong: list[str]
    alike: list[int]


def examine_many(rank: int, family: str, tp: str | int, versions: str | int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        return asdict(_examine(rank, family, int(tp), int(versions), Path(scratch)))


def _examine(rank: int, family: str, tp: int, versions: int, scratch: Path) -> Held:
    before = checkpoint(family)
    specs = dict(Checkpoint(before).specs)
    how = {"tp": tp, "rank": rank, "plain_linears": False}
    engine = engine_fresh()
    found: list[dict[str, Tensor]] = []
    folders, proven = [before], 0
    with engine.load_in_context(before, **how) as (config, model):
        known = engine.known(config, model)
        mine = Rank(known, specs.values(), {})
        agreement = attached(mine, specs, rank, tp)
        for version in range(1, versions + 1):
            folder = changed(specs, agreement, folders[-1], scratch / str(version), version)
            change = Change(specs, agreement, folders[-1], folder)
            spool = spool_of(scratch / f"spool-{version}", change.deltas())
            mine.stage(version, spool.folder, 1 << 30)
            mine.swap(version, version, back=False)
            proven += has_digest(mine, specs, agreement, folder, tp)
            found.append(copied(live(model)) | computed(known, model))
            folders.append(folder)
        del mine
    wrong = []
    for version, (folder, held) in enumerate(zip(folders[1:], found, strict=True), 1):
        with engine.load_in_context(folder, **how) as (config, model):
            fresh = copied(live(model)) | computed(engine.known(config, model), model)
        wrong += [f"version {version}: {name}" for name in differences(fresh, held)]
    pairs = enumerate(pairwise(found), 2)
    return Held(
        classes=dict(Counter(agreement.classes.values())),
        versions=versions,
        proven=proven,
        wrong=wrong,
        alike=[version for version, (one, other) in pairs if not differences(one, other)],
    )
