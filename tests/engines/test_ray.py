"""Engines in Ray actors, whose trainers are elsewhere on the cluster."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.serving import ENGINE, ROOT, said_by

TRAIN, STEPS = "tests.engines.ray_train", 20
CASES: dict[str, list[tuple[str, ...]]] = {
    "vllm": [
        ("tests.engines.vllm.ray_actor", "LLM"),
        ("tests.engines.vllm.ray_actor", "AsyncLLM"),
        (TRAIN, "ddp", "tests.engines.vllm.ray_actor:Replica"),
        (TRAIN, "fsdp2", "tests.engines.vllm.ray_actor:Follower"),
    ],
    "sglang": [(TRAIN, "fsdp2", "tests.engines.sglang.ray_actor:Follower")],
}

VENV = {"vllm": "rl", "sglang": "ray"}.get(ENGINE, "")

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.venv(VENV)]


@pytest.mark.parametrize("case", CASES.get(ENGINE, []), ids=" ".join)
def test_an_actor_of_ray_has_each_of_twenty_steps(case: tuple[str, ...], tmp_path: Path) -> None:
    program, *how = case
    python = str(ROOT / f".venv-{VENV}" / "bin" / "python")
    seen: Any = said_by(program, str(tmp_path), *how, python=python)
    assert seen == [[str(step), True] for step in range(1, STEPS + 1)]
