"""Random engines: never served wrong, never damaged, refused only where no way exists."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.property.check import KINDS, examine
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


COUNTS = {"loaders": 20_000, "modules": 2_000, "shares": 1_000}

SOME = 300

BLOCK = 25
"""Engines that a process examines at a time."""

SHARE = 1000
"""Engines of one case of the many."""

MANY = [(kind, 1000 + at) for kind, count in COUNTS.items() for at in range(0, count, SHARE)]


LEAST: Final = {"loaders": 0.6, "modules": 0.2, "shares": 0.2}
"""Share of the engines that is followed, at least: who refuses everything is never wrong either."""


TELLS: Final = "python -m tests.property loaders|modules|shares SEED tells more"


class Tally(NamedTuple):
    faults: tuple[int, ...]
    followed: int


@contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def tally(kind: str, first: int) -> Tally:
    with quiet(), tempfile.TemporaryDirectory() as scratch:
        seeds = range(first, first + BLOCK)
        found = {seed: run(KINDS[kind](seed), Path(scratch) / "engine") for seed in seeds}
    return Tally(
        faults=tuple(seed for seed, outcome in found.items() if outcome.is_fault),
        followed=sum(not outcome.refused for outcome in found.values()),
    )


def block(kind: str, first: int) -> list[str]:
    with quiet(), tempfile.TemporaryDirectory() as scratch:
        found = [examine(kind, first + n, Path(scratch) / "engine") for n in range(BLOCK)]
    return [one for one in found if one]


@pytest.mark.parametrize("first", range(0, SOME, BLOCK))
def test_some_random_loaders_are_never_followed_wrong_nor_damaged(first: int) -> None:
    found = tally("loaders", first)
    assert not found.faults, TELLS
    assert found.followed >= LEAST["loaders"] * BLOCK


@pytest.mark.parametrize("first", range(0, 50, BLOCK))
def test_engines_that_share_or_move_weights_are_never_followed_wrong(first: int) -> None:
    found = tally("shares", first)
    assert not found.faults, TELLS
    assert found.followed >= LEAST["shares"] * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, BLOCK))
def test_random_loaders_are_followed_right_or_refused(first: int) -> None:
    assert not "\n\n".join(block("loaders", first))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, BLOCK))
def test_random_modules_are_followed_right_or_refused(first: int) -> None:
    assert not "\n\n".join(block("modules", first))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), MANY)
def test_many_random_engines_are_never_followed_wrong_nor_damaged(kind: str, first: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    blocks = range(first, first + SHARE, BLOCK)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        found = list(pool.map(tally, [kind] * len(blocks), blocks))
    faults = [seed for one in found for seed in one.faults]
    assert not faults, TELLS
    assert sum(one.followed for one in found) > LEAST[kind] * SHARE
