"""Commands that read, follow and control chains run where torch is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.unit.cli.support import Pushed, random_state, write_checkpoint

ROOT: Final = Path(__file__).parents[3]

HIDE: Final = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""

RUN: Final = "from deltachain.cli import main; main()"


def environment() -> dict[str, str]:
    """The environment of such a process."""
    paths = (ROOT, ROOT / "vllm_ext", ROOT / "sglang_ext")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def without_torch(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own that cannot import torch."""
    command = [sys.executable, "-c", HIDE + code, *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment(), check=False
    )


LIGHT_COMMANDS: Final = {
    "log": ("log", "{chain}"),
    "verify": ("verify", "{chain}"),
    "inspect": ("inspect", "{chain}", "--table"),
    "pull": ("pull", "{chain}", "--out", "{out}/pulled"),
    "revert": ("revert", "{chain}", "--to", "1"),
    "follow": ("follow", "{chain}", "--out", "{out}/followed", "--once"),
    "doctor": ("doctor", "{chain}"),
    "fleet": ("fleet", "--help"),
    "agent": ("agent", "--help"),
}


@pytest.mark.parametrize("name", LIGHT_COMMANDS)
def test_a_command_needs_no_torch(pushed: Pushed, tmp_path: Path, name: str) -> None:
    places = {"chain": pushed.url, "out": tmp_path}
    done = without_torch(RUN, *(part.format(**places) for part in LIGHT_COMMANDS[name]))
    assert done.returncode == 0, done.stderr


AWAY: Final = "http://127.0.0.1:9"


def test_a_fleet_that_is_away_is_not_a_lack_of_torch() -> None:
    done = without_torch(RUN, "fleet", "status", AWAY, "--json")
    assert done.returncode not in (0, 1)
    assert "torch" not in done.stderr
    assert "127.0.0.1:9" in done.stdout + done.stderr


def test_an_agent_pulls_and_waits_for_its_server(pushed: Pushed, tmp_path: Path) -> None:
    command = ("agent", pushed.url, "--engine", AWAY, "--out", tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-c", HIDE + RUN, *map(str, command)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(),
    ) as agent:
        assert agent.stderr is not None
        line = agent.stderr.readline()
        agent.terminate()
    assert "did not answer" in line


def test_a_package_needs_no_torch() -> None:
    done = without_torch("import deltachain.control")
    assert done.returncode == 0, done.stderr


def test_torch_is_hidden() -> None:
    assert without_torch("import torch").returncode == 1


BROKEN: Final = {
    "missing library": 'raise ImportError("libcudart.so.12: cannot open shared object file")',
    "loader": 'raise OSError("libcudnn.so.9: cannot open shared object file")',
    "other numpy": 'raise AttributeError("_ARRAY_API not found")',
    "missing package": "import no_such_package_of_torch",
}


def with_torch(folder: Path, body: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process with another torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(body)
    there = {**environment(), "PYTHONPATH": f"{folder}{os.pathsep}{environment()['PYTHONPATH']}"}
    command = [sys.executable, "-c", RUN, *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=there, check=False
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "one", random_state())
    done = with_torch(tmp_path, BROKEN[name], "push", checkpoint, tmp_path / "chain")
    assert done.returncode == 2, done.stderr
    assert "torch is installed, and cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_torch_that_cannot_be_imported_is_a_fault_of_a_publisher(tmp_path: Path) -> None:
    body = BROKEN["missing library"]
    done = with_torch(tmp_path, body, "doctor", tmp_path / "chain", "--as", "publisher")
    assert done.returncode == 1
    assert "cannot be imported: ImportError: libcudart.so.12" in done.stdout.replace("\n", " ")


def test_a_torch_that_is_too_old_is_named() -> None:
    code = "import torch\ndel torch.float8_e8m0fnu\ntorch.__version__ = '2.5.1'\n"
    code += "import deltachain\ntry:\n    deltachain.attach\n"
    code += "except deltachain.DeltaChainError as error:\n    print(error)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert "torch 2.5.1 is older than 2.7" in done.stdout, done.stderr
    assert 'pip install "torch>=2.7"' in done.stdout
