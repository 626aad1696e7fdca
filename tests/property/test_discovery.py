"""Random engines: never served wrong, never damaged, refused only where no way exists."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.property.check import KINDS, examine
from tests.property.trial_run import run

COUNTS = {"loaders": 20_000, "modules": 2_000}
"""Engines of each kind in the longest of these tests."""

BLOCK = 25
"""Engines that a process examines at a time."""


SHARE = 500
"""Engines of one case of the many."""

MANY = [(kind, 1000 + at) for kind, count in COUNTS.items() for at in range(0, count, SHARE)]


def faulty(kind: str, first: int) -> list[int]:
    """Seeds of engines that are followed wrong or damaged, by any process."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "engine"
        return [s for s in range(first, first + BLOCK) if run(KINDS[kind](s), folder).is_fault]


def block(kind: str, first: int) -> list[str]:
    """What is wrong with some engines, by any process."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        found = [examine(kind, first + n, Path(scratch) / "engine") for n in range(BLOCK)]
    return [one for one in found if one]


def test_some_random_loaders_are_never_followed_wrong_nor_damaged(tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)
    try:
        recipes = {seed: KINDS["loaders"](seed) for seed in range(60)}
        outcomes = {seed: run(recipe, tmp_path / "engine") for seed, recipe in recipes.items()}
    finally:
        logging.disable(logging.NOTSET)
    assert not {seed for seed, outcome in outcomes.items() if outcome.is_fault}
    assert sum(not outcome.refused for outcome in outcomes.values()) > 20, "most are followed"


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
        found = [one for faults in pool.map(faulty, [kind] * len(blocks), blocks) for one in faults]
    assert not found, f"{len(found)} of {SHARE}; python -m tests.property {kind} SEED tells more"
