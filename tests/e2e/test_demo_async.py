"""Asynchronous GRPO with a real engine, while its parts are killed one after another."""

import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.online.engine import EngineKind
from examples.demo.online.report import OnlineReport
from examples.demo.online.run import Running, RunOptions, run_online
from examples.demo.report import Display

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
AWAY_S = 5.0


def run(
    folder: Path,
    kind: EngineKind = "vllm",
    *,
    seed: int = 0,
    steps: int = STEPS,
    at_step: Callable[[int, Running], None] = lambda *_: None,
) -> OnlineReport:
    python = ROOT / f".venv-{kind}" / "bin" / "python"
    assert python.exists(), f"make venv-{kind}"
    shown = StringIO()
    plan = RunOptions(
        root=folder,
        kind=kind,
        python=python,
        steps=steps,
        seed=seed,
        display=Display(Console(file=shown)),
        at_step=at_step,
    )
    return run_online(plan)


def store(running: Running) -> None:
    running.store.kill()
    threading.Timer(AWAY_S, running.store.restart).start()


KILLS: dict[str, Callable[[Running], None]] = {
    "replica": lambda running: running.replica.kill(),
    "trainer": lambda running: running.trainer.kill(),
    "store": store,
}


@pytest.mark.parametrize("victim", KILLS)
def test_what_is_killed_in_the_middle_is_started_again_and_nothing_is_lost(
    tmp_path: Path, victim: str
) -> None:
    struck: list[float] = []

    def strike(step: int, running: Running) -> None:
        if step == STEPS // 2 and not struck:
            struck.append(time.monotonic())
            threading.Thread(target=KILLS[victim], args=(running,)).start()

    report = run(tmp_path, at_step=strike)
    assert struck
    assert report.deaths == {
        "environment": 0,
        "replica": int(victim == "replica"),
        "trainer": int(victim == "trainer"),
    }
    assert report.fine, report
    assert report.mismatching_bits == 0
    assert report.unknown_versions == 0
    assert report.verified
    assert report.replica_agrees


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(tmp_path: Path, seed: int) -> None:
    report = run(tmp_path, seed=seed, steps=40)
    assert report.fine
    assert report.reward_last - report.reward_first > report.reward_error


def test_the_reward_rises_with_sglang(tmp_path: Path) -> None:
    assert run(tmp_path, "sglang", steps=40).fine
