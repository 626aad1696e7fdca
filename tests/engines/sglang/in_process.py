"""A program that holds an ``Engine`` and follows a chain with it, with the arguments of a server.

It generates for others by a route like SGLang's own, as a framework with a trainer elsewhere does.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def main(url: str, port: int, arguments: list[str]) -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        import sglang  # noqa: PLC0415 - as slow as a server
        from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

        import deltachain_sglang  # noqa: PLC0415
        from deltachain.control.server import Control  # noqa: PLC0415
        from deltachain.subscribe import SubscribeConfig  # noqa: PLC0415

        app.state.engine = engine = sglang.Engine(server_args=prepare_server_args(arguments))
        leader = await asyncio.to_thread(
            deltachain_sglang.follow, engine, SubscribeConfig(url=url, poll_s=0.1)
        )
        app.state.deltachain = Control(leader, "", token="", is_open=True)
        while not leader.status().ready:  # until then, SGLang labels tokens with no version
            if leader.ended:
                raise RuntimeError(leader.ended)
            await asyncio.sleep(0.1)
        yield
        await asyncio.to_thread(leader.stop)
        engine.shutdown()

    from deltachain.control.routes import probes, router  # noqa: PLC0415

    app = FastAPI(lifespan=lifespan)
    app.include_router(router, prefix="/deltachain")
    app.include_router(probes)
    app.add_api_route("/generate", generate, methods=["POST"])
    app.add_api_route("/health", lambda: "up")
    uvicorn.run(app, port=port)


async def generate(request: Request) -> Any:
    asked = await request.json()
    made = await request.app.state.engine.async_generate(**asked)
    if not asked.get("stream"):
        return made

    async def events() -> AsyncIterator[str]:
        async for found in made:
            yield f"data: {json.dumps(found)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events())


if __name__ == "__main__":
    given = sys.argv[1:]
    main(os.environ.pop("DELTACHAIN_URL"), int(given[given.index("--port") + 1]), given)
