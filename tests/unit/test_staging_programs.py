"""Triton programs without a card: run by Triton's interpreter, and compiled for three cards.

Triton decides when it is imported whether it interprets or compiles, so that each has a process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.compiled_diff import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("decode_segment", "count_block", "stage_block", "write_block", "digest_blocks")

pytestmark = pytest.mark.triton


def run(module: str, *arguments: str, **variables: str) -> str:
    """Output of a module of the tests, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", f"tests.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("contract.interpreted", ()), ("gpu.run", ("test", "cpu")), ("gpu.run", ("test", "cpu:0"))],
    ids=["guarded", "without an index", "with an index"],
)
def test_the_interpreter_keeps_the_contract(module: str, arguments: tuple[str, ...]) -> None:
    """Torch takes ``cpu:0`` too, and tells tensors' device without its index."""
    assert "check_launches" in run(module, *arguments, TRITON_INTERPRET="1")


def test_programs_compile_without_spills(tmp_path: Path) -> None:
    arches = ("80", "90", "100")
    said = run("contract.compiled", *arches, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert said.count("registers") == 38 * len(arches)
    for arch in arches:
        for program in PROGRAMS:
            assert f"sm_{arch} {program} " in said


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fused_kernels_compile_without_spills(arch: int, tmp_path: Path) -> None:
    said = run(
        "contract.compiled_diff", str(arch), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"
    )
    lines = said.splitlines()
    assert len(lines) == 22
    for line in lines:
        assert line.endswith(" 0 bytes spilled"), line
