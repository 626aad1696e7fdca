"""No check of discovery can be left out: without it, some random engine is followed wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.property.recipe import Recipe, Unit
from tests.property.switches import FEW, MORE, SETTLE, Switch
from tests.property.trial_run import run


def expect_missed(switch: Switch, recipe: Recipe, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        switch(patch)
        assert run(recipe, folder).is_fault, "without the check"
    assert not run(recipe, folder).is_fault, "with it"


@pytest.mark.parametrize("check", FEW)
def test_a_check_that_is_left_out_is_missed(check: str, tmp_path: Path) -> None:
    expect_missed(*FEW[check], tmp_path / "engine")


@pytest.mark.slow
@pytest.mark.parametrize("check", MORE)
def test_each_check_that_is_left_out_is_missed(check: str, tmp_path: Path) -> None:
    expect_missed(*MORE[check], tmp_path / "engine")


def test_engines_that_replace_tensors_are_followed_because_those_are_settled(
    tmp_path: Path,
) -> None:
    unit = Unit(styles=("new parameter",))
    recipe = Recipe(units=(unit,), reload="absent", repack="absent")
    assert not run(recipe, tmp_path / "engine").refused
    with pytest.MonkeyPatch.context() as patch:
        SETTLE(patch)
        assert run(recipe, tmp_path / "engine").refused
