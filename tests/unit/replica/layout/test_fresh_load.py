"""Quantised layers are compared with a fresh load after each swap, and refused if they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.delta import TensorDelta
from deltachain.errors import PartialApplyError, PoisonedError, UnfinishedSwapError
from deltachain.replica import rank
from deltachain.replica.layout import fresh_load
from deltachain.replica.layout.classes import agree
from deltachain.replica.layout.model_state import COLUMNS, probing_rows
from deltachain.replica.rank import Rank
from tests.support.spools import spool_of
from tests.unit.replica.layout.coded import LAYERS, SHAPE, Coded, CodedEngine, Quantise, quantise

BUDGET: Final = 1 << 30


class Bench:
    """A rank of an engine that quantises, with a staged version in which some layers change."""

    def __init__(
        self,
        folder: Path,
        *,
        hides: bool = False,
        fails: bool = False,
        changed: tuple[str, ...] = LAYERS,
    ) -> None:
        torch.manual_seed(0)
        old = {f"{name}.weight": torch.randn(SHAPE).to(torch.bfloat16) for name in LAYERS}
        other = {name: torch.randn(SHAPE).to(torch.bfloat16) for name in old}
        new = old | {f"{name}.weight": other[f"{name}.weight"] for name in changed}
        (folder / "old").mkdir()
        save_file(old, folder / "old" / "model.safetensors")
        self.before = Checkpoint(folder / "old")
        self.model = CodedEngine(folder / "old", old, hides=hides)
        self.model.fails = fails
        self.fresh = CodedEngine(folder / "old", new, hides=hides)
        self.old = self.state()
        self.rank = Rank(self.model, self.before.specs.values(), {})
        self.agreement = agree(self.before.specs.values(), [self.rank.report()])
        holders = {name: labels[0] for name, labels in self.agreement.holders.items()}
        self.rank.agree(self.agreement.classes, holders)
        names = [f"{name}.weight" for name in changed]
        self.spool = spool_of(folder / "spool", [self._delta(n, new[n]) for n in names])
        self.restage()

    def restage(self) -> None:
        """Stage the version."""
        self.rank.stage(1, self.spool.folder, BUDGET)
        self.model.apart.clear()

    def _delta(self, name: str, tensor: Tensor) -> TensorDelta:
        was = self.before.bits(name)
        bits = tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        at = np.flatnonzero(was != bits)
        return TensorDelta(spec=self.before.specs[name], indices=at, values=bits[at] - was[at])

    def state(self, engine: CodedEngine | None = None) -> dict[str, Tensor]:
        """What an engine holds and computes; that of the rank by default."""
        engine = engine or self.model
        outputs = engine.compute(frozenset(LAYERS))
        numbers = {f"{n}.largest": torch.tensor(engine.get_submodule(n).largest) for n in "ab"}
        held = {name: tensor.detach().clone() for name, tensor in engine.tensors().items()}
        return held | numbers | {f"{name}()": output for name, output in outputs.items()}

    def holds(self, wanted: dict[str, Tensor]) -> bool:
        """Whether the rank's engine is in a state."""
        found = self.state()
        return found.keys() == wanted.keys() and all(
            torch.equal(found[name], tensor) for name, tensor in wanted.items()
        )


def stale_scale(layer: Coded, raw: Tensor) -> None:
    old = layer.scale.data.clone()
    quantise(layer, raw)
    layer.scale.data.copy_(old)


def stale_row(layer: Coded, raw: Tensor) -> None:
    old = (layer.kernel.codes if layer.kernel else layer.weight.data)[3].clone()
    quantise(layer, raw)
    layer.weight.data[3] = old


def stale_number(layer: Coded, raw: Tensor) -> None:
    old = layer.largest
    quantise(layer, raw)
    layer.largest = old


def wrong(layer: Coded, raw: Tensor) -> None:
    quantise(layer, raw)
    layer.weight.data[3, 0] ^= 1


def only(model: CodedEngine, name: str, how: Quantise) -> Quantise:
    """That of one layer wrong, and that of all others right."""
    layer = model.get_submodule(name)
    return lambda one, raw: (how if one is layer else quantise)(one, raw)


@pytest.mark.parametrize(
    ("stale", "hides", "why"),
    [
        (stale_scale, False, "scale differs"),
        (stale_row, False, "weight differs"),
        (stale_number, False, r"largest is \d.*, not \d"),
        (stale_row, True, "it computes something else"),
    ],
)
def test_what_a_reload_left_stale_is_refused_and_taken_back(
    tmp_path: Path, stale: Quantise, hides: bool, why: str
) -> None:
    bench = Bench(tmp_path, hides=hides)
    assert set(bench.agreement.classes.values()) == {"reloaded"}
    bench.model.quantise = only(bench.model, "b", stale)
    with pytest.raises(PartialApplyError, match=f"b is not what a fresh load .* gives: {why}"):
        bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.old)
    bench.model.quantise = quantise
    bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.state(bench.fresh))


@pytest.mark.parametrize("fails", [True, False])
def test_beside_other_ranks_the_old_bits_are_loaded_when_all_load(
    tmp_path: Path, *, fails: bool
) -> None:
    bench = Bench(tmp_path)
    bench.rank.agree(bench.agreement.classes, bench.rank._holders, alone=False)
    bench.restage()
    bench.model.quantise = only(bench.model, "b", stale_scale)
    with pytest.raises(UnfinishedSwapError, match="could not load version 1: b is not"):
        bench.rank.swap(1, 1, back=False)
    loaded = len(bench.model.apart)
    if fails:
        bench.model.quantise = only(bench.model, "b", wrong)
        with pytest.raises(PoisonedError, match="neither version 1 nor the old bits"):
            bench.rank.swap(1, 1, back=True)
        return
    bench.model.quantise = quantise
    assert bench.rank.swap(1, 0, back=True) > 0
    assert len(bench.model.apart) == loaded + 2, "it is proven"
    assert bench.holds(bench.old)
    assert bench.rank.swap(1, 0, back=True) == 0
    bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.state(bench.fresh))


def test_a_rank_that_cannot_write_loads_as_often_as_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.rank.agree(bench.agreement.classes, bench.rank._holders, alone=False)
    bench.restage()

    def lost(*_: object) -> None:
        raise PartialApplyError("device lost", version=1)

    with monkeypatch.context() as patched:
        patched.setattr(rank, "write_all", lost)
        with pytest.raises(UnfinishedSwapError, match="device lost"):
            bench.rank.swap(1, 1, back=False)
    assert bench.model.apart == ["a", "b"]
    bench.rank.swap(1, 1, back=True)
    assert bench.model.apart == ["a", "b"] * 2
    assert bench.holds(bench.old)
    bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.state(bench.fresh))


def test_layers_that_another_rank_cannot_compare_are_not_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.agreement.compared == {"a.weight", "b.weight"}
    bench.rank.agree(bench.agreement.classes, bench.rank._holders, compared={"b.weight"})
    bench.restage()
    bench.rank.swap(1, 1, back=False)
    assert bench.model.apart == ["b"]
    assert bench.holds(bench.state(bench.fresh))


def test_layers_that_nobody_can_look_into_are_not_called_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodedEngine, "probe", lambda *_: None)
    bench = Bench(tmp_path, hides=True)
    assert not bench.agreement.compared
    assert "cannot be tried by itself" in bench.agreement.reasons["a.weight"]


def test_old_bits_that_cannot_be_proven_are_not_called_old_bits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.model.quantise = only(bench.model, "b", wrong)
    with pytest.raises(PoisonedError, match="neither version 1 nor the old bits"):
        bench.rank.swap(1, 1, back=False)


def test_only_quantised_layers_that_changed_are_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path, changed=("b", "plain"))
    bench.rank.swap(1, 1, back=False)
    assert bench.model.apart == ["b"]
    assert bench.holds(bench.state(bench.fresh))


def test_every_group_is_loaded_even_after_one_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may wait for what this one exchanges with them while it quantises."""
    bench = Bench(tmp_path)
    monkeypatch.setattr(fresh_load, "TOGETHER", 1)
    bench.model.quantise = only(bench.model, "a", stale_scale)
    with pytest.raises(PartialApplyError, match="a is not what"):
        bench.rank.swap(1, 1, back=False)
    assert bench.model.apart == ["a", "b"] * 2, "the new bits, and the old ones"


@pytest.mark.parametrize(("limit", "loads"), [(1, [1, 1]), (1 << 20, [2])])
def test_groups_are_loaded_together_up_to_a_limit(
    tmp_path: Path, limit: int, loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    apart, seen = bench.model.loaded_apart, list[int]()

    def counted(layers: frozenset[str], tensors: Any) -> Any:
        seen.append(len(layers))
        return apart(layers, tensors)

    monkeypatch.setattr(bench.model, "loaded_apart", counted)
    monkeypatch.setattr(fresh_load, "TOGETHER", limit)
    bench.rank.swap(1, 1, back=False)
    assert seen == loads


def test_copies_that_are_quantised_wrongly_are_loaded_no_more(tmp_path: Path) -> None:
    """A scrub loads what is held again, and finds that a layer does not become what it was."""
    bench = Bench(tmp_path)
    assert bench.rank.loads_the_same()
    bench.model.quantise = only(bench.model, "b", wrong)
    bench.rank._copies.load(bench.rank._attached, set(bench.before.specs))
    assert not bench.rank.loads_the_same()


def test_an_engine_that_loads_nothing_apart_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fails=True)
    assert set(bench.agreement.classes.values()) == {"reloaded"}
    assert "not compared with a fresh load after a swap" in bench.agreement.reasons["a.weight"]
    assert "gives no way to do that" in bench.agreement.reasons["a.weight"]
    bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.state(bench.fresh))


def test_probing_rows_show_columns() -> None:
    weight = torch.randn(SHAPE)
    row = torch.ones(1, SHAPE[1])
    rows = probing_rows(row, 7)
    assert rows.shape == (1 + COLUMNS, SHAPE[1])
    assert torch.equal(rows[:1], row)
    assert torch.equal(rows[1:].sum(1), torch.ones(COLUMNS))
    chosen = rows[1:].argmax(1)
    assert len(set(chosen.tolist())) == COLUMNS
    assert torch.equal(rows[1:] @ weight.t(), weight[:, chosen].t())
    assert torch.equal(rows, probing_rows(row, 7))
    assert not torch.equal(rows, probing_rows(row, 8))
    assert probing_rows(torch.ones(1, 3), 0).shape == (4, 3)
