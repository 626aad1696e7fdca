"""The fuzzer runs for a while against every reader; and it finds what is there to be found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutate import MUTATORS, TARGETS, seeds

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20

BROKEN = """
import time
from tests.fuzz import mutate

def broken(data):
    {fault}

mutate.TARGETS["head"] = broken
from tests.fuzz.run import main
main()
"""
"""Runs the fuzzer on a reader that the sound document does not break."""

FAULTS = {
    "another error": "data[1:2] == b'\"' or data[9]",
    "a finding": "mutate.must(data[1:2] == b'\"', 'a rule')",
    "too long": "data[1:2] == b'\"' or time.sleep(30)",
    "too much memory": "data[1:2] == b'\"' or [bytearray(b'x' * (1 << 20)) for _ in range(900)]",
}


def fuzz(program: list[str], corpus: Path, target: str, seconds: int) -> tuple[int, str]:
    arguments = ["--target", target, "--seconds", str(seconds), "--corpus", str(corpus)]
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_fuzzing_finds_nothing(target: str, tmp_path: Path) -> None:
    status, log = fuzz(["-m", "tests.fuzz.run"], tmp_path / "corpus", target, SECONDS)
    assert status == 0, log[-5000:]
    runs = int(log.split("Done ")[1].split(" runs")[0])
    assert runs > 500
    assert len(list((tmp_path / "corpus").iterdir())) > len(list(seeds(target)))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fuzzing_finds_what_is_broken(fault: str, tmp_path: Path) -> None:
    program = ["-c", BROKEN.format(fault=FAULTS[fault])]
    status, log = fuzz(program, tmp_path / "corpus", "head", 60)
    assert status not in (0, 1, 2), log[-5000:]
    assert list(tmp_path.glob("corpus-*")), log[-5000:]


@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_is_read_or_refused(target: str) -> None:
    for _, data in seeds(target):
        TARGETS[target](data)


def test_every_reader_has_a_mutator() -> None:
    assert TARGETS.keys() == MUTATORS.keys()
