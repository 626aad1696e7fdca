import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from deltachain_vllm.front_ends import answer
from deltachain_vllm.routes import EndpointPlugin


def told(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


def leading() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/deltachain/{rest}", status_code=409)
    async def echo(rest: str, request: Request) -> dict[str, Any]:
        body = (await request.body()).decode()
        return {
            "rest": rest,
            "query": request.url.query,
            "body": body,
            "host": request.url.hostname,
        }

    return app


def test_other_front_ends_answer_as_the_first_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DELTACHAIN_SPOOL", str(tmp_path / ("long" * 30)))
    monkeypatch.setenv("DELTACHAIN_URL", "x")

    async def run() -> None:
        other = FastAPI()
        plugin = EndpointPlugin()
        plugin.attach_router(other)
        client: Any = type("Client", (), {})()
        client.engine_core = type("Core", (), {"client_index": 1, "client_count": 2})()
        joining = asyncio.create_task(plugin.init_state(client, other.state, Namespace()))
        await asyncio.sleep(0.3)
        assert not joining.done(), "it takes requests only once there is a leader"
        kept, server, serving = await answer(leading())
        await asyncio.wait_for(joining, 10)
        async with told(other) as mine:
            found = await mine.post("/v1/deltachain/update?a=1", json={"version": 7})
            assert found.status_code == 409
            assert found.json() == {
                "rest": "update",
                "query": "a=1",
                "body": '{"version":7}',
                "host": "localhost",
            }
            server.should_exit = True
            await serving
            assert (await mine.get("/readyz/deltachain")).status_code == 503
        kept.close()

    asyncio.run(run())
