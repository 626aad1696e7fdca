"""Memory of commands is bounded by windows and threads, however large a tensor is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from deltachain.chain import upload
from deltachain.checkpoint import Checkpoint
from deltachain.maintain import added_edges
from deltachain.publish import revert, session
from deltachain.subscribe import Subscriber
from deltachain.subscribe.targets import folder
from deltachain.types import Bits, TensorSpec
from tests.support.files import write_weights
from tests.unit.cli.support import ok

NBYTES: Final = 512 << 20  # of the tensor
BOUND: Final = NBYTES // 2

COMMANDS: Final = {
    "first push": "push {model}/base {model}/chain",
    "pull": "pull {model}/chain --out {model}/out",
    "push": "push {model}/next {model}/chain",
    "pull of an update": "pull {model}/chain --out {model}/out",
    "verify": "verify {model}/chain",
    "mirror": "mirror {model}/chain {model}/mirror",
    "inspect": "inspect {model}/chain --version 0",
    "anchor": "anchor {model}/chain",
    "revert": "revert {model}/chain --version 0",
}

CHILD: Final = """
import contextlib, ctypes, io, json, os, sys, threading
from pathlib import Path

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from deltachain.chain import upload
from deltachain.cli.app import app
from deltachain.maintain import added_edges
from deltachain.publish import revert, session
from deltachain.subscribe.targets import folder

upload.SMALL_PART_NBYTES = 8 << 20
for module in (added_edges, revert, session, folder):
    module.PART_NBYTES = 8 << 20
session.KEPT_NBYTES = folder.BUDGET = 1 << 20

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def run(command):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app(command.split(), standalone_mode=False)

def growth(command):
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run(command)
    done.set()
    watcher.join()
    return peak[0] - before

found = {}
for name, command in json.loads(sys.argv[1]).items():
    run(command.format(model="small"))
    found[name] = growth(command.format(model="large"))
print(json.dumps(found))
"""


def save(file: Path, spec: TensorSpec, bits: Bits) -> None:
    file.parent.mkdir(parents=True)
    write_weights(file, [spec], lambda _: bits)


@pytest.fixture(scope="module")
def growths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    root, rng = tmp_path_factory.mktemp("memory"), np.random.default_rng(1)
    for model, rows in (("small", 1 << 10), ("large", NBYTES >> 11)):
        spec = TensorSpec("embed.weight", "BF16", (rows, 1 << 10))
        bits = np.resize(rng.integers(0, 1 << 16, 1 << 20, np.uint16), spec.numel)
        for version in ("base", "next"):
            save(root / model / version / "model.safetensors", spec, bits)
            bits[::50] += 1
    arguments = [sys.executable, "-c", CHILD, json.dumps(COMMANDS)]
    done = subprocess.run(arguments, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_needs_no_memory_for_a_tensor(growths: dict[str, int], name: str) -> None:
    assert growths[name] < BOUND, growths


@pytest.mark.parametrize("encoding", ["step", "max", "overwrite", "raw"])
def test_windows_and_parts_of_a_tensor_add_up(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder, in memory, in a proof of the chain and in a revert."""
    monkeypatch.setattr(upload, "SMALL_PART_NBYTES", 3 << 20)
    for module in (session, folder, revert, added_edges):
        monkeypatch.setattr(module, "PART_NBYTES", 1 << 20)
    spec, rng = TensorSpec("layer.weight", "BF16", (6000, 1024)), np.random.default_rng(1)
    old = rng.integers(0x3C00, 0x3E00, spec.numel, np.uint16)
    new = old + np.uint16(rng.random(spec.numel) < 0.05)
    chain, out = tmp_path / "chain", tmp_path / "out"
    for number, bits in enumerate((old, new)):
        file = tmp_path / str(number) / "model.safetensors"
        save(file, spec, bits)
        ok("push", file.parent, chain, "--encoding", encoding)
        ok("pull", chain, "--out", out)
        assert np.array_equal(Checkpoint(out).bits(spec.name), bits)
    assert ok("verify", chain, "--json").document["edges"]["delta"]["proven"] == 1
    ok("anchor", chain)
    live = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16)}
    Subscriber(str(chain), live).update()
    assert np.array_equal(live[spec.name].view(torch.uint16).numpy().reshape(-1), new)
    ok("revert", chain, "--version", 0, "--encoding", encoding)
    ok("pull", chain, "--out", out)
    assert np.array_equal(Checkpoint(out).bits(spec.name), old)
    assert ok("verify", chain, "--json").document["last"] == 2
