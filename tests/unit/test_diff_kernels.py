"""The diff on a device: many tensors at a time, in Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deltachain.kernels import device as pinned
from deltachain.kernels.device_diff import BLOCK, DeviceDiff, compares_on, spans_of
from tests.contract.compiled_diff import ARCHITECTURES
from tests.contract.many_tensors import Weights, settle

ROOT = Path(__file__).resolve().parents[2]


def run_module(*arguments: str) -> str:
    """Standard output of a module of the tests in a process of its own."""
    command = [sys.executable, "-m", *arguments]
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.triton
def test_fused_kernels_keep_the_contract_under_the_interpreter() -> None:
    said = run_module("tests.contract.interpreted_diff")
    assert "check_launches" in said


@pytest.mark.triton
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fused_kernels_compile_without_spills(arch: int) -> None:
    lines = run_module("tests.contract.compiled_diff", str(arch)).splitlines()
    assert len(lines) == 52
    for line in lines:
        assert line.endswith(" 0 bytes spilled"), line


def test_a_span_begins_at_a_block_and_ends_where_a_batch_is_full() -> None:
    cut = spans_of(3 * BLOCK + 5, used=1, limit=3)
    assert [(span.start, span.numel, span.blocks) for span in cut] == [
        (0, 2 * BLOCK, 2),
        (2 * BLOCK, BLOCK + 5, 2),
    ]
    assert list(spans_of(0, used=2, limit=3)) == []


def test_a_snapshot_that_was_replaced_between_diffs_is_compared() -> None:
    diff = DeviceDiff(torch.device("cpu"))
    for seed_of_size in (3, 90):
        weights = Weights("cpu", (seed_of_size,) * 40, resident=False)
        weights.add_to(diff)
        weights.check(settle(diff))


@pytest.mark.parametrize("code", [0, 2])
def test_memory_is_pinned_until_its_tensor_goes(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    class Runtime:
        def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802 - as CUDA has it
            calls.append(arguments)
            return code

        def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
            calls.append(address)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    tensor = torch.zeros(8, dtype=torch.int16)
    address = tensor.data_ptr()
    assert pinned.pin_(tensor) == (code == 0)
    del tensor
    assert calls == [(address, 16, 0), *([address] if code == 0 else [])]
    assert ("CUDA error 2" in caplog.text) == (code == 2)


def test_weights_on_the_host_are_compared_by_its_kernels() -> None:
    assert not compares_on(torch.device("cpu"))
