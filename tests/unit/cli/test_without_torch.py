"""Commands that need no torch run where it is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.cli.support import ok, random_state, read_checkpoint, same, train, write_checkpoint

HIDDEN = """
import json, sys
sys.modules["torch"] = None
from typer.main import get_command
from deltachain.cli.app import app
import deltachain.control
for command in json.loads(sys.argv[1]):
    try:
        get_command(app).main(command, prog_name="deltachain")
    except SystemExit as done:
        assert not done.code, command
"""


def test_reading_commands_run_where_torch_is_not_installed(tmp_path: Path) -> None:
    first = random_state()
    chain, state = tmp_path / "chain", train(first, 1)
    ok("push", write_checkpoint(tmp_path / "first", first), chain)
    ok("push", write_checkpoint(tmp_path / "second", state), chain)
    pulled, followed, patched, change = (
        str(tmp_path / name) for name in ("pulled", "followed", "patched", "change")
    )
    commands = [
        ["log", str(chain)],
        ["verify", str(chain)],
        ["inspect", str(chain)],
        ["pull", str(chain), "--out", pulled],
        ["follow", "--once", str(chain), "--out", followed],
        ["diff", str(tmp_path / "first"), pulled, "--out", change],
        ["patch", str(tmp_path / "first"), change, "--out", patched],
        ["fleet", "--help"],
        ["agent", "--help"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in (pulled, followed, patched):
        assert same(read_checkpoint(Path(folder)), state)
