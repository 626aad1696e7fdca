from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from deltachain.errors import ConfigError
from tests.bench.cross_region import network
from tests.bench.cross_region.__main__ import main


def why_not() -> str:
    """What keeps this machine from running it; empty if nothing does."""
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
def test_every_way_brings_every_bit_to_every_replica(capsys: pytest.CaptureFixture[str]) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    before = ip("netns", "list").stdout.split()
    assert main(["--parameters", "1", "--versions", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert len(rows) == 2 * len(found["samples"]) == 8
    assert all(row["mismatches"] == 0 for row in rows)
    # A look and a get: a round trip each, and half.
    assert all(row["median_s"] > 0.1 for row in rows if row["replica"] == "a")
    assert all(row["received_nbytes"] > 10_000 for row in rows)
    assert {*ip("netns", "list").stdout.split()} <= {*before}
