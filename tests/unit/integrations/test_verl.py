"""A trainer and rollouts of verl's own classes, in verl's environment."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Final

import pytest

from tests.engines.trainer import make_batches, one_thread, pretrain

ROOT: Final = Path(__file__).resolve().parents[3]
VERL: Final = ROOT / ".venv-verl" / "bin" / "python"
TRIAL: Final = Path(__file__).with_name("verl_trial.py")
STEPS: Final = 20

pytestmark = [pytest.mark.slow, pytest.mark.venv("verl")]


def trial(
    folder: Path, *address: str, python: Path = VERL, program: Path = TRIAL
) -> Iterator[list[Any]]:
    """Train from the checkpoint in a folder; yield what each step brought."""
    url = (folder / "chain").as_uri()
    command = [str(python), str(program), str(folder / "base"), url, *address]
    # What Ray starts imports from there as well: not our tests, in place of verl's.
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    where: Any = {"cwd": folder, "env": variables}
    with (
        (folder / "log").open("w+") as log,
        Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, text=True, **where) as trial,
    ):
        assert trial.stdin
        assert trial.stdout
        for line in trial.stdout:
            yield json.loads(line)
            trial.stdin.write("\n")
            trial.stdin.flush()
        assert trial.wait() == 0, (folder / "log").read_text()[-5000:]


def test_rollouts_get_the_bits_of_every_step(tmp_path: Path) -> None:
    with one_thread():
        pretrain("qwen3", tmp_path / "base", make_batches(0), 0)
    sent = []
    for step, actors, rollouts in trial(tmp_path):
        assert len(actors) == len(rollouts) == 2
        assert [actors[0]] * 4 == [*actors, *rollouts]
        sent.append(tuple(actors[0].items()))
        assert step == len({*sent})
    assert len(sent) == STEPS


def test_a_restarted_actor_repeats_a_step_and_a_late_one_is_not_waited_for(tmp_path: Path) -> None:
    (late,), (adapter,) = trial(tmp_path, "faults")
    assert late.endswith("got no version of step 8 after version 100 in 0.5 s")
    assert adapter == "verl sends 'layers.0.q_proj.base_layer.weight' without its adapter"
