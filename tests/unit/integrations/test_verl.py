"""A trainer and rollouts of verl's own classes, in verl's environment."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.engines.trainer import make_batches, one_thread, pretrain

ROOT: Final = Path(__file__).resolve().parents[3]
VERL: Final = ROOT / ".venv-verl" / "bin" / "python"
STEPS: Final = 20

pytestmark = pytest.mark.slow


def trial(folder: Path, *address: str) -> list[Any]:
    """Train from the checkpoint in a folder; return what each step brought."""
    if not VERL.exists():
        pytest.skip("verl is missing: make venv-verl")
    url = (folder / "chain").as_uri()
    command = [VERL, Path(__file__).with_name("verl_trial.py"), folder / "base", url, *address]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr.decode()[-5000:]
    seen: list[Any] = json.loads(done.stdout)
    assert [step for step, *_ in seen] == [*range(1, STEPS + 1)]
    return seen


def test_rollouts_get_the_bits_of_every_step(tmp_path: Path) -> None:
    with one_thread():
        pretrain("qwen3", tmp_path / "base", make_batches(0), 0)
    sent = []
    for _, actors, rollouts in trial(tmp_path):
        assert len(actors) == len(rollouts) == 2
        assert [actors[0]] * 4 == [*actors, *rollouts]
        sent.append(tuple(actors[0].items()))
    assert len({*sent}) == STEPS
