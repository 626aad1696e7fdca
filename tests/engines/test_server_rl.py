"""Trainers of SkyRL and AReaL, and a vLLM with plain linears that is told their versions."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.expected import holds
from tests.engines.serving import ENGINE, HOST, ROOT, start
from tests.engines.trainer import make_batches, one_thread, pretrain
from tests.unit.integrations.test_verl import trial

PYTHON = ROOT / ".venv-rl" / "bin" / "python"
TRIAL = ROOT / "tests" / "unit" / "integrations" / "example_trial.py"
STEPS = 20

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.venv("rl"),
    pytest.mark.skipif(ENGINE != "vllm", reason="that environment has vLLM's packages"),
]


@pytest.mark.parametrize("framework", ["skyrl", "areal"])
def test_a_server_holds_each_step_once_its_trainer_goes_on(framework: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    with one_thread():
        pretrain("qwen3", base, make_batches(0), 0)
    url = (tmp_path / "chain").as_uri()
    program: dict[str, Any] = {"python": PYTHON, "program": TRIAL}
    with start(base, tmp_path / "server", url, plain=True, dev=True) as server:
        step, held = 0, [server.checksums()]
        given = f"{HOST}:{server.port}", framework
        for step, said in enumerate(trial(tmp_path, *given, **program), 1):
            assert said == [4], said  # tokens that the trainer's own client was given
            assert server.named() == str(step)
            assert holds(server, Path(f"{base}-{step}")), step
            held.append(server.checksums())
            assert held[-1] != held[-2], step
        assert step == STEPS
        assert server.generate([5, 6, 7], 4).spans == ((0, 4, str(STEPS)),)
