from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from deltachain.errors import ConfigError
from deltachain.types import TensorSpec
from tests.bench.chains import U16
from tests.bench.changes import changes_of
from tests.bench.cross_region import network
from tests.bench.cross_region.__main__ import main
from tests.bench.cross_region.layouts import (
    Changes,
    Layout,
    SlimeDeltasZstd,
    TensorChange,
    TrlGaps,
    full_file,
    load_full,
)
from tests.bench.layouts.trl import TRL_GAPS


def some_changes(*, gap: int = 100) -> Changes:
    rng = np.random.default_rng(0)
    at = np.cumsum(rng.integers(1, gap, 500))
    bits = rng.integers(0, 1 << 16, 500, dtype=np.uint16)
    nothing = np.empty(0, np.int64)
    return {
        "one.weight": TensorChange((int(at[-1]) + 1,), at, bits),
        "none.weight": TensorChange((7,), nothing, np.empty(0, np.uint16)),
        "two.weight": TensorChange((int(at[-1]) + 1, 1), at[::2].copy(), bits[::2].copy()),
    }


@pytest.mark.parametrize("layout", [TrlGaps(), SlimeDeltasZstd()], ids=["trl", "slime"])
@pytest.mark.parametrize("gap", [100, 200_000], ids=["narrow", "wide"])
def test_layouts_give_back_what_went_in(layout: Layout, gap: int) -> None:
    changes = some_changes(gap=gap)
    data = layout.encode(changes, version=1, numel=10**9)
    found = {name: (indices, bits) for name, indices, bits in layout.decode(data)}
    for name, change in changes.items():
        if change.indices.size:
            indices, bits = found[name]
            assert np.array_equal(indices, change.indices)
            assert np.array_equal(bits, change.bits)
    assert found.keys() <= changes.keys()


def test_trl_files_have_the_size_that_its_branches_write() -> None:
    rng = np.random.default_rng(0)
    old = {name: rng.integers(0, 1 << 16, 50_000, dtype=np.uint16) for name in ("a", "b.c")}
    step: dict[str, tuple[U16, U16]] = {}
    for name, bits in old.items():
        step[name] = (bits, bits ^ (rng.random(bits.size) < 0.01).astype(np.uint16))
    specs = [TensorSpec(name, "BF16", (bits.size,)) for name, bits in old.items()]
    counted = changes_of(step, specs)
    changes = {
        name: TensorChange((change.numel,), change.indices, change.new)
        for name, change in counted.items()
    }
    data = TrlGaps().encode(changes, version=1, numel=100_000)
    assert len(data) == TRL_GAPS.nbytes(counted)


def test_a_full_checkpoint_keeps_every_bit() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    weights = {"all": bits.view(torch.bfloat16)}
    live = {"all": torch.zeros_like(weights["all"])}
    load_full(full_file(weights), live)
    assert torch.equal(live["all"].view(torch.int16), bits)


def why_not() -> str:
    try:
        network.check_host()
    except ConfigError as exc:
        return str(exc)
    name = f"deltachain-probe-{os.getpid()}"
    added = ip("netns", "add", name)
    if added.returncode:
        return f"ip netns add: {added.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("ip") or "ip"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_way_brings_every_bit_to_every_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    before = ip("netns", "list").stdout.split()
    plot = tmp_path / "latency.svg"
    arguments = ["--parameters", "1", "--versions", "2", "--json", "--plot", str(plot)]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert len(rows) == 2 * len(found["samples"]) == 8
    assert all(row["mismatches"] == 0 for row in rows)
    far = [row for row in rows if row["replica"] == "a"]
    assert all(
        row["median_s"] > 0.1 for row in far
    )  # a look and a get: a round trip each, and half
    assert all(row["received_nbytes"] > 10_000 for row in rows)
    assert plot.exists()
    assert {*ip("netns", "list").stdout.split()} <= {*before}
