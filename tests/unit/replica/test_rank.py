"""One rank by itself: what it keeps, what it defers, and what it does when told twice."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltachain.errors import (
    BaseMismatchError,
    EngineDamagedError,
    PartialApplyError,
    PoisonedError,
    TensorMismatchError,
)
from deltachain.replica import rank as rank_module
from deltachain.replica import staged as staged_module
from deltachain.replica.layout.model_state import LoadGroup
from deltachain.replica.rank import Rank
from deltachain.replica.staged import RankStaged
from deltachain.subscribe.targets import base as target
from deltachain.subscribe.targets.patch import Patch, write
from deltachain.types import TensorSpec
from tests.gpu.ranks import Bench
from tests.support.engine import Sharding

ALIASES = {"head.weight": "embed.weight"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A rank that holds one version, and the plan to the next."""
    return Bench("cpu", "step", tmp_path)


def test_what_fits_the_budget_is_kept_and_the_rest_is_deferred(bench: Bench) -> None:
    bench.stage(1)
    whole = bench.rank.staged[1]
    assert whole.deferred == ()
    bench.stage(2, budget=whole.nbytes // 2)
    staged = bench.rank.staged[2]
    assert 0 < staged.nbytes <= whole.nbytes // 2
    assert staged.deferred
    assert staged.placed
    assert (staged.names, staged.effects) == (whole.names, whole.effects)
    bench.rank.swap(2, 1, back=False)
    assert bench.model.holds(bench.new)


def test_telling_it_twice_changes_nothing(bench: Bench) -> None:
    bench.stage(1)
    assert bench.rank.swap(1, 0, back=True) == 0.0
    assert bench.model.holds(bench.old)
    for _ in range(2):
        bench.rank.swap(1, 1, back=False)
        assert bench.model.holds(bench.new)
    for _ in range(2):
        bench.rank.swap(1, 0, back=True)
        assert bench.model.holds(bench.old)


def test_a_ticket_that_is_given_again_is_written_again(bench: Bench) -> None:
    """As by another leader, that counts from one as well."""
    bench.stage(1)
    bench.rank.swap(1, 1, back=False)
    with torch.no_grad():
        bench.model.load((name, tensor.clone()) for name, tensor in bench.old.items())
    assert bench.rank.loads_the_same()
    bench.stage(1)
    bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.new)


def test_only_tickets_that_are_kept_can_be_swapped(bench: Bench) -> None:
    bench.stage(1)
    bench.stage(2)
    bench.rank.keep([2])
    with pytest.raises(PartialApplyError, match="nothing is staged under ticket 1"):
        bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.old)
    bench.rank.swap(2, 1, back=False)
    assert bench.model.holds(bench.new)


def test_a_plan_for_a_refused_tensor_is_refused(bench: Bench) -> None:
    report = bench.rank.report()
    classes = {name: one.kind for name, one in report.items()}
    classes["norm.weight"] = "refused"
    holders = {name: ("0",) * len(one.windows) for name, one in report.items()}
    bench.rank.agree(classes, holders)
    with pytest.raises(TensorMismatchError, match=r"'norm\.weight' cannot be written"):
        bench.stage(1)
    assert bench.rank.staged == {}
    assert bench.model.holds(bench.old)


def test_replaced_tensors_void_what_was_staged(bench: Bench) -> None:
    bench.stage(1)
    live = bench.model.root.get_parameter("norm.weight")
    live.data = live.data.clone()
    with pytest.raises(BaseMismatchError, match="what they hold is not"):
        bench.rank.swap(1, 1, back=False)
    assert bench.rank.staged == {}
    assert bench.model.holds(bench.old)
    bench.stage(2)  # where they are now
    bench.rank.swap(2, 1, back=False)
    assert bench.model.holds(bench.new)


def test_experts_that_others_moved_void_what_was_staged(bench: Bench) -> None:
    bench.stage(1)
    live = bench.model.root.get_parameter("layers.0.experts.weight")
    live.data.copy_(live.data.flip(0).clone())
    with pytest.raises(BaseMismatchError, match=r"'layers\.0\.experts\.weight' holds other bits"):
        bench.rank.swap(1, 1, back=False)
    assert bench.rank.staged == {}
    bench.rank.check_addresses()  # it is told once: what comes next is planned from nothing


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_an_engine_that_arranged_its_experts_anew_is_written_to_no_more(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the experts themselves were loaded again since, as by a repack."""
    tensors, maps = bench.model.tensors, {"expert_map": torch.arange(4)}
    monkeypatch.setattr(bench.model, "tensors", lambda: {**tensors(), **maps})
    rank = Rank(bench.model, bench.rank._specs.values(), bench.rank._aliases)
    rank.check_addresses()
    if how == "in place":
        maps["expert_map"].copy_(maps["expert_map"].flip(0).clone())
    else:
        maps["expert_map"] = torch.arange(4).flip(0)
    assert rank.loads_the_same()
    for _ in range(2):
        with pytest.raises(EngineDamagedError, match="arranged its experts anew: 'expert_map'"):
            rank.check_addresses()


def test_a_stage_that_began_before_tensors_were_replaced_is_void(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs beside the engine's own thread, and knows only where they were."""
    rank, stage = bench.rank, staged_module.stage

    def overtaken(*arguments: Any) -> RankStaged:
        staged = stage(*arguments)
        live = bench.model.root.get_parameter("norm.weight")
        live.data = live.data.clone()
        with suppress(BaseMismatchError):
            rank.check_addresses()
        return staged

    monkeypatch.setattr(rank_module, "stage", overtaken)
    with pytest.raises(BaseMismatchError, match="what they hold is not"):
        bench.stage(1)
    assert rank.staged == {}


def test_a_stage_never_looks_where_tensors_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload beside it puts them elsewhere for a while."""

    def moving(_: object) -> str:
        raise AssertionError("asked in the thread that stages")

    monkeypatch.setattr(bench.rank._record, "difference", moving)
    bench.stage(1)
    bench.rank.state()


def test_what_is_computed_may_be_no_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    output = {"layers.0": torch.tensor([float("nan"), 1.0])}
    monkeypatch.setattr(bench.model, "compute", lambda layers: dict(output) if layers else {})
    group = LoadGroup((), frozenset({"layers.0"}))
    attached = replace(bench.rank._attached, groups=(("reloaded", group),))
    monkeypatch.setattr(bench.rank, "_attached", attached)
    assert bench.rank.loads_the_same()


@pytest.mark.parametrize(("budget", "error"), [(1 << 30, PartialApplyError), (0, PoisonedError)])
def test_a_failed_write_is_taken_back_if_the_old_bits_are_there(
    bench: Bench, budget: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.stage(1, budget=budget)
    written: list[str] = []

    def fail_third(live: object, patch: Patch) -> None:
        written.append(patch.spec.name)
        if len(written) == 3:
            raise OSError("device lost")
        write(live, patch)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(target, "write_patch", fail_third)
        with pytest.raises(error):
            bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.old) == (error is PartialApplyError)


def test_what_the_engine_did_not_load_after_all_is_read_back_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench("cpu", "step", tmp_path, Sharding(odd=("shadow",)))
    bench.stage(1)
    readable = {name.split(".")[2] for name in bench.rank._attached.readable}
    assert readable == {"shadow"}, "its weight is beside what it computes from"
    reload = bench.model.reload
    monkeypatch.setattr(bench.model, "reload", lambda _: None)
    with pytest.raises(PartialApplyError, match=r"shadow\.weight' is not what was loaded"):
        bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.old)
    monkeypatch.setattr(bench.model, "reload", reload)
    bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.new)


def test_it_knows_whom_it_was_attached_for(bench: Bench) -> None:
    specs = list(bench.before.specs.values())
    assert bench.rank.is_for(specs, ALIASES)
    assert not bench.rank.is_for(specs, {})
    assert not bench.rank.is_for(specs[1:], ALIASES)
    assert not bench.rank.is_for([TensorSpec("w", "BF16", (3,)), *specs[1:]], ALIASES)


def test_a_rank_is_made_of_a_model_that_holds_its_checkpoint(bench: Bench) -> None:
    bench.stage(1)
    bench.rank.swap(1, 1, back=False)
    again = Rank(bench.model, bench.before.specs.values(), ALIASES)
    kinds = {one.kind for one in again.report().values()}
    assert kinds == {"refused"}, "it holds something else"
    assert bench.model.holds(bench.new), "and holds it still"
