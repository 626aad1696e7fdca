"""verl's manager, with a server that follows the chain of its actors."""

from pathlib import Path

import pytest

from tests.engines.expected import holds
from tests.engines.serving import HOST, start
from tests.engines.trainer import make_batches, one_thread, pretrain
from tests.unit.integrations.test_verl import STEPS, trial

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.venv("verl")]


def test_a_server_holds_each_step_once_verl_goes_on(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with one_thread():
        pretrain("qwen3", base, make_batches(0), 0)
    url = (tmp_path / "chain").as_uri()
    with start(base, tmp_path / "server", url, plain=True, dev=True) as server:
        step = 0
        for step, labelled in enumerate(trial(tmp_path, f"{HOST}:{server.port}"), 1):
            assert labelled == [step]
            assert holds(server, Path(f"{base}-{step}")), step
            assert server.generate([5, 6, 7], 4).spans == ((0, 4, str(step)),)
        assert step == STEPS
