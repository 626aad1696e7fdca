"""Small files of a followed or pulled folder: missing ones are written, differing ones named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deltachain import Publisher
from tests.support.models import plain_model
from tests.unit.cli.support import ok

FILES = {"config.json": b'{"a": 1, "use_cache": true}', "tokenizer.json": b"{}"}

KILLED = """
import os, signal, sys
from deltachain.subscribe.targets import folder
folder.write_assets = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
from deltachain.cli import main
main()
"""


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    url = tmp_path / "chain"
    with Publisher(str(url)).attach(plain_model(), assets=FILES) as publisher:
        publisher.flush()
    return url


def small(folder: Path) -> dict[str, bytes]:
    """Contents of the small files that are there."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def test_a_follower_killed_between_swap_and_small_files_writes_them_when_started_again(
    chain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["follow", str(chain), "--out", str(out), "--once"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
    assert (killed.returncode, small(out)) == (-9, {})
    assert list(out.glob("*.safetensors"))
    ok(*words)
    assert small(out) == FILES


def test_files_of_another_meaning_are_kept_and_named(
    chain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for command in ("pull", "follow"):
        out = tmp_path / command
        out.mkdir()
        own = b'{"a": 2, "use_cache": false, "rope_theta": 5, "quantization_config": {"bits": 4}}'
        (out / "config.json").write_bytes(own)
        once = ["--once"] if command == "follow" else []
        caplog.clear()
        ok(command, chain, "--out", out, *once)
        assert small(out) == FILES | {"config.json": own}
        assert "config.json ('a', 'rope_theta', 'quantization_config')" in caplog.text
        assert "tokenizer.json" not in caplog.text
