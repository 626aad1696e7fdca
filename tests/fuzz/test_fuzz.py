"""The fuzzer runs for a while against every reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutate import MUTATORS, TARGETS, seeds

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_fuzzing_finds_nothing(target: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    arguments = ["--target", target, "--seconds", str(SECONDS), "--corpus", str(corpus)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-5000:]
    runs = int(log.split("Done ")[1].split(" runs")[0])
    assert runs > 500
    assert len(list(corpus.iterdir())) > len(list(seeds(target)))


@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_is_read_or_refused(target: str) -> None:
    for _, data in seeds(target):
        TARGETS[target](data)


def test_every_reader_has_a_mutator() -> None:
    assert TARGETS.keys() == MUTATORS.keys()
