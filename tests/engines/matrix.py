"""One model family against the scatter plan: random bits in, a freshly loaded model as the judge.

The model is what a CPU worker makes of a tiny checkpoint. A random change of every tensor is
spooled, staged and swapped as the leader of a replica would have it, and then every tensor that the
model has must equal those of a model that is loaded from the changed checkpoint; taken back, those
from before.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, distributed, nn

from deltachain.checkpoint import Checkpoint, read_assets
from deltachain.delta import TensorDelta
from deltachain.errors import DeltaChainError
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.classes import Agreement, agree, orphans
from deltachain.replica.rank import Rank
from deltachain.types import Bits, StateDigest, TensorSpec
from tests.engines.families import FAMILIES, checkpoint
from tests.engines.serving import ENGINE
from tests.engines.two_ranks import two_ranks
from tests.support.files import write_weights
from tests.support.spools import spool_of

NOISE: Final[Mapping[str, str]] = {
    "_tensor_constant0": "vLLM traces each module class of transformers once a process; the trace "
    "of phimoe's rotary embedding leaves this copy of its frequencies on the first model only",
}
"""Last parts of names that :func:`differences` leaves out, and why."""

_HELPERS: Final = ("quant_method", "impl")

_DEPTH: Final = 3


def live(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor with elements that a model has, not copied, tied ones under every name."""
    return {
        path: tensor
        for name, module in model.named_modules(remove_duplicate=False)
        for key, value in _parts(module)
        for path, tensor in _tensors(f"{name}.{key}" if name else key, value, _DEPTH)
        if tensor.numel()
    }


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that only one side has, or that differ in shape, dtype or any bit.

    NaNs are equal if their bits are. Left out is :data:`NOISE`, and nothing else.
    """
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name.rpartition(".")[2] not in NOISE
        and not (name in one and name in other and _same(one[name], other[name]))
    ]


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return one.is_meta or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _parts(module: nn.Module) -> Iterator[tuple[str, object]]:
    apart = ("_parameters", "_buffers", "_modules")
    yield from module._parameters.items()
    yield from module._buffers.items()
    for key, value in vars(module).items():
        if key not in apart:
            yield key, value
        if key in _HELPERS and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            yield from ((f"{key}.{inner}", held) for inner, held in vars(value).items())


def _tensors(name: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth and isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in pairs:
            yield from _tensors(f"{name}[{key}]", held, depth - 1)


SHARE: Final = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one rank did with one family."""

    family: str
    tensors: int
    classes: dict[str, int]
    reasons: dict[str, int]
    wrong: list[str]
    undone_wrong: list[str]
    digest: bool
    refused: str
    alike: list[int]

    @property
    def right(self) -> bool:
        return not self.wrong and not self.undone_wrong and self.digest

    def checked(self, *, followed: bool = False) -> "Row":
        """Assert that nothing is silently wrong, and if asked that nothing is refused either."""
        assert (self.wrong, self.undone_wrong, self.digest) == ([], [], True)
        assert self.refused or sum(self.classes.values()) == self.tensors
        assert not followed or (self.refused, "refused" in self.classes) == ("", False)
        return self


def examine(
    rank: int,
    family: str,
    tp: int = 1,
    *,
    plain: bool = True,
    plain_experts: bool = False,
    versions: int = 1,
    **arguments: Any,
) -> dict[str, Any]:
    """The row of one rank, as JSON; every rank of a group must call this."""
    how = {"tp": tp, "rank": rank, "plain_linears": plain, "plain_experts": plain_experts}
    how |= arguments
    with tempfile.TemporaryDirectory() as scratch:
        return asdict(_compare(family, Path(scratch), how, versions))


def examine_two(rank: int, *families: str) -> list[dict[str, Any]]:
    for family in families:  # once there are ranks, only the first can save
        checkpoint(family)
    return [examine(rank, family, 2) for family in families]


def examine_way(rank: int, way: str, family: str) -> dict[str, Any]:
    """The row of one of two ranks, which are stages or shards of experts."""
    checkpoint(family)
    with tempfile.TemporaryDirectory() as scratch:
        how = {"tp": 2, "rank": rank, "way": way}
        return asdict(_compare(family, Path(scratch), how, 1))


def examine_many(rank: int, family: str, tp: str | int, versions: str | int) -> dict[str, Any]:
    return examine(rank, family, int(tp), plain=False, versions=int(versions))


def _compare(family: str, scratch: Path, how: Any, versions: int) -> Row:
    rank, tp = how["rank"], how["tp"]
    folders = [checkpoint(family)]
    specs = dict(Checkpoint(folders[0]).specs)
    engine = engine_fresh()
    with engine.load_in_context(folders[0], **how) as (config, model):
        held = [copied(live(model))]
        try:
            known = engine.known(config, model)
            mine = Rank(known, specs.values(), {})
            refused, report = "", mine.report()
        except DeltaChainError as exc:
            refused, report = str(exc.args[0]), {}
        if not all(gather(report, tp)):
            wrong = differences(held[0], copied(live(model)))
            return _row(family, specs, None, wrong=wrong, refused=refused or "another rank refused")
        agreement = attached(mine, specs, rank, tp)
        digest = True
        for version in range(1, versions + 1):
            before, after = folders[-1], scratch / str(version)
            folders.append(changed(specs, agreement, before, after, version))
            spool = spool_of(scratch / f"spool-{version}", deltas(specs, before, after))
            mine.stage(version, spool.folder, 1 << 30)
            if version == 1:
                held[0] |= computed(known)
            mine.swap(version, version, back=False)
            held.append(copied(live(model)) | computed(known))
            digest &= has_digest(mine, specs, agreement, after, tp)
        mine.swap(versions, versions - 1, back=True)
        undone_wrong = differences(held[-2], copied(live(model)) | computed(known))
        del mine
    wrong = []
    for version in range(1, versions + 1):
        with engine.load_in_context(folders[version], **how) as (config, model):
            fresh = copied(live(model)) | computed(engine.known(config, model))
        wrong += [f"version {version}: {name}" for name in differences(fresh, held[version])]
    pairs = enumerate(pairwise(held[1:]), 2)
    return _row(
        family,
        specs,
        agreement,
        wrong=wrong,
        undone_wrong=undone_wrong,
        digest=digest,
        alike=[version for version, (one, other) in pairs if not differences(one, other)],
    )


def attached(mine: Rank, specs: Mapping[str, TensorSpec], number: int, tp: int) -> Agreement:
    reports = gather(mine.report(), tp)
    lost = orphans(specs, reports)
    if lost:
        more = gather(mine.find_unused(lost), tp)
        reports = [{**one, **other} for one, other in zip(reports, more, strict=True)]
    agreement = agree(specs.values(), reports)
    mine.agree(agreement.classes, {n: who[number] for n, who in agreement.holders.items()})
    return agreement


def computed(known: EngineModel) -> dict[str, Tensor]:
    outputs = known.compute(frozenset(known.modules()))
    return {f"{name}()": output for name, output in copied(outputs).items()}


def engine_fresh() -> ModuleType:
    return import_module(f"tests.engines.{ENGINE}.fresh")


def deltas(specs: Mapping[str, TensorSpec], before: Path, after: Path) -> Iterator[TensorDelta]:
    """Steps, absolute bits and whole tensors by turns."""
    one, other = Checkpoint(before), Checkpoint(after)
    for number, (name, spec) in enumerate(specs.items()):
        old, new = one.bits(name), other.bits(name)
        indices = np.flatnonzero(old != new)
        if not indices.size:
            continue
        if number % 3 == 0:
            yield TensorDelta(spec=spec, indices=indices, values=new[indices] - old[indices])
        elif number % 3 == 1:
            mask = np.arange(indices.size) % 2 == 0
            values = np.where(mask, new[indices], new[indices] - old[indices])
            yield TensorDelta(spec=spec, indices=indices, values=values, absolute=mask)
        else:
            yield TensorDelta.dense(spec, new)


def changed(
    specs: Mapping[str, TensorSpec], agreement: Agreement, before: Path, after: Path, seed: int = 1
) -> Path:
    old = Checkpoint(before)

    def bits(spec: TensorSpec) -> Bits:
        kind = agreement.classes[spec.name]
        was = old.bits(spec.name).copy()
        if kind == "refused":
            return was
        random = np.random.default_rng([seed, spec.numel, *spec.name.encode()])
        at = random.permutation(spec.numel)[: max(1, int(SHARE * spec.numel))]
        patterns = random.integers(0, 1 << 8 * spec.itemsize, at.size, np.uint64)
        was[at] = patterns.astype(was.dtype)
        if kind != "in_place":  # what is computed from them must be numbers
            values = torch.from_numpy(random.normal(0, 0.05, at.size)).to(torch.bfloat16)
            if spec.dtype == "BF16":
                was[at] = values.view(torch.int16).numpy().view(np.uint16)
            else:
                was[at] = old.bits(spec.name)[at[::-1]]
        return was

    after.mkdir(parents=True, exist_ok=True)
    for name, data in read_assets(before).items():
        (after / name).write_bytes(data)
    write_weights(after / "model.safetensors", specs.values(), bits)
    return after


def has_digest(
    rank: Rank, specs: Mapping[str, TensorSpec], agreement: Agreement, after: Path, tp: int
) -> bool:
    """Whether the ranks' state digests add up to that of the changed checkpoint."""
    found = {label: str(digest) for (label, _), digest in rank.state().items()}
    lanes: dict[str, str] = {}
    for one in gather(found, tp):
        lanes.update(one)
    total = sum((StateDigest.parse(digest) for digest in lanes.values()), StateDigest())
    kept = [name for name in specs if agreement.classes[name] not in ("refused", "unused")]
    return total == Checkpoint(after).state(kept)


def gather(mine: Any, tp: int) -> list[Any]:
    if tp == 1:
        return [mine]
    found: list[Any] = [None] * tp
    distributed.all_gather_object(found, mine)
    return found


def _row(
    family: str, specs: Mapping[str, TensorSpec], agreement: Agreement | None, **found: Any
) -> Row:
    usual: dict[str, Any] = {"undone_wrong": [], "digest": True, "refused": "", "alike": []}
    reasons = agreement.reasons if agreement else {}
    return Row(
        family=family,
        tensors=len(specs),
        classes=dict(Counter(agreement.classes.values() if agreement else ())),
        reasons=dict(Counter(reason[:300] for reason in reasons.values())),
        **{**usual, **found},
    )


def examine_two_known(rank: int, *families: str) -> list[dict[str, Any]]:
    found = []
    for family in families:
        with suppress(Exception):  # that of the engine, and the same on both
            found += examine_two(rank, family)
    return found


WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "vllm": {
        "plain linears": {},
        "stock CPU": {"plain": False},
        "plain experts": {"plain_experts": True},
    },
    "sglang": {"TP=1": {}},
}


def main() -> None:
    rows: dict[str, list[Row | None]] = {}
    for family in FAMILIES:
        with suppress(Exception):  # that of the engine, which does not know the model
            rows[family] = [Row(**examine(0, family, **way)) for way in WAYS[ENGINE].values()]
    ranks = two_ranks("tests.engines.matrix:examine_two_known", *rows, deadline_s=1800)
    for both in zip(*ranks, strict=True):
        found = [Row(**one) for one in both]
        rows[found[0].family].append(min(found, key=lambda row: row.right))
    columns = ("family", "tensors", *WAYS[ENGINE], "TP=2")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")  # noqa: T201
    for family, cells in rows.items():
        cells.extend([None] * (len(WAYS[ENGINE]) + 1 - len(cells)))
        first = cells[0]
        texts = (family, str(first.tensors if first else 0), *map(_cell, cells))
        print(f"| {' | '.join(texts)} |")  # noqa: T201
    print("not loaded:", ", ".join(family for family in FAMILIES if family not in rows))  # noqa: T201


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if not row.right:
        return f"WRONG: {row.wrong[:2]}"
    if row.refused:
        return "refused"
    return ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in sorted(row.classes.items()))


if __name__ == "__main__":
    main()
