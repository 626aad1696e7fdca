"""Folders on a disk that is really full: an error with the bytes that are missing, never SIGBUS."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltachain.checkpoint import write_weights
from deltachain.types import TensorSpec
from tests.small_disk import run_on_small_disk
from tests.unit.cli.support import ok

NBYTES = 4 << 20
"""Of the model."""

ROOM = NBYTES * 3 // 2
"""Of the disk."""

PULLS = """
import json, os, resource, sys
from pathlib import Path
from deltachain.subscribe.targets import folder
from tests.unit.cli.support import invoke, ok

chain, disk = sys.argv[1], Path(sys.argv[2])
out, other, original = disk / "out", disk / "other", folder.check_room

def pull(case):
    before = set(disk.rglob("*"))
    done = invoke("pull", chain, "--out", out)
    left = sorted(path.name for path in set(disk.rglob("*")) - before)
    print(json.dumps({"case": case, "code": done.code, "left": left, "said": done.stderr}))

def fill(but):
    if not disk.is_mount():  # nobody may mount here: files can at least be limited
        resource.setrlimit(resource.RLIMIT_FSIZE, (but, resource.RLIM_INFINITY))
        return
    status = os.statvfs(disk)
    with other.open("wb") as file:
        file.write(bytes(status.f_bavail * status.f_frsize - but))

def empty():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    other.unlink(missing_ok=True)

fill(but=2 << 20)
pull("too small")
folder.check_room = lambda *_: None
pull("filled since")
folder.check_room = original
empty()
ok("pull", chain, "--version", 0, "--out", out)
weights = out / "model.safetensors"
whole = weights.stat().st_size
os.truncate(weights, 4096), os.truncate(weights, whole)  # as a copy that keeps no zeros
if disk.is_mount():  # a limit lets holes be filled
    fill(but=1 << 20)
    pull("holes")
empty()
pull("room again")
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of one tensor: zeros, and then a change of a few."""
    root = tmp_path_factory.mktemp("chain")
    spec = TensorSpec("w", "U8", (NBYTES,))
    bits = np.zeros(NBYTES, np.uint8)
    for version in (0, 1):
        checkpoint = root / f"checkpoint-{version}"
        checkpoint.mkdir()
        bits[:: NBYTES // 99] = version
        write_weights(checkpoint / "model.safetensors", [spec], lambda _: bits)
        ok("push", checkpoint, root / "chain")
    return root / "chain"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_without_room_is_refused_by_what_is_missing_and_nothing_is_left(
    kind: str, chain: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    done = run_on_small_disk(kind, disk, ROOM, PULLS, chain, disk)
    assert done.returncode == 0, (done.returncode, done.stderr)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= {json.loads(line)["case"]: json.loads(line)}
    again = found.pop("room again")
    assert {"too small", "filled since"} <= found.keys()
    for case in found:
        assert (found[case]["code"], found[case]["left"]) == (6, []), found[case]
        missing = re.search(r"([0-9,]+) bytes are missing", found[case]["said"])
        assert missing is not None, found[case]
        assert 1 <= int(missing[1].replace(",", "")) <= NBYTES
    assert "the weights are as they were" in found["filled since"]["said"]
    assert again["code"] == 0, again
