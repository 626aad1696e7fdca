"""Engines in a program of one's own, and servers with processes that a leader cannot reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltachain.publish import PublishConfig
from deltachain.publish.push import push
from deltachain.store import open_store
from tests.engines.chains import train
from tests.engines.families import make
from tests.engines.program import run_program

pytestmark = pytest.mark.engine


def test_an_asynchronous_engine_follows_while_it_generates(tmp_path: Path) -> None:
    chain = train("qwen3", tmp_path, 3, rate=1e-2)
    done = run_program("tests.engines.vllm.async_offline", chain.url, str(chain.base))
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["wrong"] == {"2": [[]], "1": [[]]}
    assert seen["tokens"] == [200, 12]
    assert seen["scrubbed"] is True
    assert seen["dead"] == [False, True]
    assert "asyncio.to_thread" in seen["refused"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--data-parallel-size", "2"), "--data-parallel-size"),
        (("--api-server-count", "2"), "--api-server-count 1"),
    ],
)
def test_options_that_no_leader_can_follow_end_a_server_with_2(
    tmp_path: Path, options: tuple[str, ...], named: str
) -> None:
    """Though vLLM starts further processes, and ends with 1 where one of them fails."""
    base, url = make("qwen3", tmp_path / "base"), (tmp_path / "chain").as_uri()
    push(open_store(url), base, PublishConfig(url=url))
    done = run_program(
        *("vllm.entrypoints.cli.main", "serve", str(base), "--host", "127.0.0.1", "--port", "0"),
        *("--worker-extension-cls", "deltachain_vllm.WorkerExtension", *options),
        DELTACHAIN_URL=url,
        VLLM_PLUGINS="deltachain,deltachain_http",
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2, said[-4000:]
    assert named in said
    assert "Traceback" not in said
