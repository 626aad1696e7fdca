"""Engines in a program of one's own, and servers with processes that a leader cannot reach."""

import asyncio
import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from torch import nn
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient

from deltachain.control.server import Control
from deltachain.publish import PublishConfig
from deltachain.publish.push import push
from deltachain.store import open_store
from deltachain_vllm.compat import draft_model, has_heads, pause
from deltachain_vllm.routes import EndpointPlugin
from tests.engines.families import make
from tests.engines.serving import run_program, said_by
from tests.engines.trainer import train


def test_probes_need_no_key_where_routes_do() -> None:
    from vllm.entrypoints.serve.middleware.authenticate import (  # noqa: PLC0415
        AuthenticationMiddleware,
    )

    app = FastAPI()
    EndpointPlugin().attach_router(app)
    app.state.deltachain = Control(None, "nothing", token="", is_open=False, is_guarded=True)
    app.add_middleware(AuthenticationMiddleware, tokens=["key"])
    with TestClient(app) as client:
        assert client.get("/healthz/deltachain").status_code == 200
        assert client.get("/readyz/deltachain").status_code == 503
        assert client.get("/v1/deltachain/healthz").status_code == 401
        key = {"Authorization": "Bearer key"}
        assert client.get("/v1/deltachain/healthz", headers=key).status_code == 200


class Client:
    def __init__(self, *, known: bool) -> None:
        self.asked: list[Any] = []
        if known:
            self.engine_core = SimpleNamespace(pause_scheduler_async=self._scheduler)
            self.renderer = SimpleNamespace(clear_mm_cache_async=self._clear)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.asked.append(("pause_generation", mode, clear_cache))

    async def _scheduler(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(("scheduler", mode, clear_cache))

    async def _clear(self) -> None:
        self.asked.append("clear")


def test_this_vllm_has_what_a_pause_asks_for() -> None:
    assert inspect.iscoroutinefunction(BaseRenderer.clear_mm_cache_async)
    asked = list(inspect.signature(AsyncMPClient.pause_scheduler_async).parameters)
    assert asked == ["self", "mode", "clear_cache"]
    body = inspect.getsource(AsyncLLM.pause_generation)
    assert body.count("await ") == 3  # these two and the sleep: nothing that we would miss
    assert "await asyncio.sleep(0.02)" in body


@pytest.mark.parametrize(
    ("known", "mode", "clear", "asked"),
    [
        (True, "keep", True, ["clear", ("scheduler", "keep", True)]),
        (True, "wait", False, [("scheduler", "wait", False)]),
        (False, "abort", True, [("pause_generation", "abort", True)]),
    ],
)
def test_the_scheduler_is_paused_after_a_clear_or_an_unknown_client_in_its_own_way(
    known: bool, mode: str, clear: bool, asked: list[Any]
) -> None:
    client = Client(known=known)
    asyncio.run(pause(client, mode, clear=clear))
    assert client.asked == asked


@pytest.mark.parametrize(
    ("method", "drafts", "moves", "follow"),
    [
        ("mtp", "base", False, True),
        ("mtp", "base", True, False),
        ("mtp", "other", False, False),
        ("draft_model", "base", False, False),
    ],
)
def test_heads_of_the_models_checkpoint_follow_unless_their_experts_move(
    method: str, drafts: str, moves: bool, follow: bool
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="base"),
        parallel_config=SimpleNamespace(enable_eplb=moves),
        speculative_config=SimpleNamespace(
            method=method, draft_model_config=SimpleNamespace(model=drafts)
        ),
    )
    assert has_heads(config) is follow
    config.speculative_config = None
    assert not has_heads(config)


@pytest.mark.parametrize("runner", ["gpu.model_runner", "gpu_model_runner"])
def test_both_model_runners_tell_their_draft(runner: str) -> None:
    module = import_module(f"vllm.v1.worker.{runner}")
    assert callable(module.GPUModelRunner.get_draft_model)
    draft = nn.Linear(1, 1)
    assert draft_model(SimpleNamespace(get_draft_model=lambda: draft)) is draft
    assert draft_model(SimpleNamespace(drafter=SimpleNamespace(model=draft))) is draft
    assert draft_model(SimpleNamespace(drafter=object())) is None


pytestmark = pytest.mark.engine


def test_an_asynchronous_engine_follows_while_it_generates(tmp_path: Path) -> None:
    chain = train("qwen3", tmp_path, 3, rate=1e-2)
    seen = said_by("tests.engines.vllm.async_offline", chain.url, str(chain.base))
    assert seen["wrong"] == {"2": [[]], "1": [[]]}
    assert seen["tokens"] == [200, 12]
    assert seen["scrubbed"] is True
    assert seen["followed"] == [3, True]
    assert seen["dead"] == [False, True]
    assert "asyncio.to_thread" in seen["refused"]


def test_options_that_no_leader_can_follow_end_a_server_with_2(tmp_path: Path) -> None:
    """Though vLLM starts further processes, and ends with 1 where one of them fails."""
    options = ("--load-format", "dummy")
    base, url = make("qwen3_moe", tmp_path / "base"), (tmp_path / "chain").as_uri()
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
    assert " ".join(options) in said
    assert "Traceback" not in said
