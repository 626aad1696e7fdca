"""What a start makes of a folder that an earlier one left, with the real ``deltachain pull``."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.unit.cli.support import (
    State,
    ok,
    random_state,
    read_checkpoint,
    same,
    train,
    write_checkpoint,
)

ROOT: Final = Path(__file__).resolve().parents[3]
ENTRYPOINT: Final = Path(__file__).resolve().parents[3] / "spaces" / "rollout" / "entrypoint.sh"
BASH: Final = "/usr/bin/bash"

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for folder in ("bin", "home"):
        (tmp_path / folder).mkdir()
    engine = tmp_path / "bin" / "vllm"
    engine.write_text('#!/usr/bin/bash\necho "serving $2"\n', encoding="utf-8")
    engine.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{sysconfig.get_path('scripts')}:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "vllm_ext", ROOT / "sglang_ext"))),
        "ENGINE": "vllm",
        "HOME": str(tmp_path / "home"),
        "DELTACHAIN_URL": str(tmp_path / "chain"),
        "DELTACHAIN_TOKEN": "only-for-this-test",
        "RETRY_S": "0",
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Start:
    def starting(**given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, str(ENTRYPOINT)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=environment | given,
        )

    return starting


def push(root: Path, chain: str, state: State) -> State:
    ok("push", write_checkpoint(root / "trained", state), root / chain)
    return state


def test_each_start_serves_the_head(tmp_path: Path, start: Start) -> None:
    policy = tmp_path / "home" / "policy"
    first = push(tmp_path, "chain", random_state())
    done = start()
    assert done.stdout.endswith(f"serving {policy}\n"), done.stderr
    assert same(read_checkpoint(policy), first)
    assert (policy / "config.json").is_file()

    head = push(tmp_path, "chain", train(first, 1))
    weights = policy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    done = start()
    assert done.returncode == 0, done.stderr
    assert "written anew" in done.stderr
    assert same(read_checkpoint(policy), head)


def test_another_chain_takes_the_folder_over(tmp_path: Path, start: Start) -> None:
    push(tmp_path, "chain", random_state())
    assert start().returncode == 0
    other = push(tmp_path, "other", random_state(1))
    done = start(DELTACHAIN_URL=str(tmp_path / "other"))
    assert done.returncode == 0, done.stderr
    assert same(read_checkpoint(tmp_path / "home" / "policy"), other)


def test_a_start_that_was_killed_costs_nothing(
    tmp_path: Path, environment: dict[str, str], start: Start
) -> None:
    head = push(tmp_path, "chain", random_state())
    policy = tmp_path / "home" / "policy"
    killed = subprocess.Popen(
        [BASH, str(ENTRYPOINT)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (policy / ".deltachain-lock").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    os.killpg(killed.pid, 9)
    killed.wait()
    done = start()
    assert done.returncode == 0, done.stderr
    assert same(read_checkpoint(policy), head)


def test_a_base_that_the_chain_refers_to_is_given_by_name(tmp_path: Path, start: Start) -> None:
    state = random_state()
    base = write_checkpoint(tmp_path / "base", state)
    head = train(state, 1)
    trained = write_checkpoint(tmp_path / "trained", head)
    ok("push", trained, tmp_path / "chain", "--base", base)
    moved = base.rename(tmp_path / "moved")
    assert start(WAIT_S="0").returncode != 0
    done = start(MODEL=str(moved))
    assert done.returncode == 0, done.stderr
    assert same(read_checkpoint(tmp_path / "home" / "policy"), head)
