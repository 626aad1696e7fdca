"""A program that holds an ``AsyncLLM`` and follows a chain with it, with the arguments of a server.

It generates for others by routes like vLLM's own, as a framework with a trainer elsewhere does.
"""

import asyncio
import json
import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def main(url: str, port: int, arguments: list[str]) -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        from vllm import AsyncEngineArgs  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        import deltachain_vllm  # noqa: PLC0415
        from deltachain.control.server import Control  # noqa: PLC0415
        from deltachain.subscribe import SubscribeConfig  # noqa: PLC0415

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        known, _ = parser.parse_known_args(["--model", *arguments])  # others are of a server
        app.state.engine = engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(known))
        leader = deltachain_vllm.follow(engine, SubscribeConfig(url=url, poll_s=0.1))
        app.state.deltachain = Control(leader, "", token="", is_open=True)
        while not leader.status().ready:  # until then, vLLM labels tokens with no version
            if leader.ended:
                raise RuntimeError(leader.ended)
            await asyncio.sleep(0.1)
        yield
        await asyncio.to_thread(leader.stop)
        engine.shutdown()

    from deltachain.control.routes import probes, router  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] deltachain: %(message)s")
    app = FastAPI(lifespan=lifespan)
    app.include_router(router, prefix="/v1/deltachain")
    app.include_router(probes)
    app.add_api_route("/inference/v1/generate", generate, methods=["POST"])
    app.add_api_route("/v1/completions", stream, methods=["POST"])
    app.add_api_route("/health", lambda: "up")
    uvicorn.run(app, port=port)


def made(engine: Any, asked: list[int], **sampling: Any) -> AsyncIterator[Any]:
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    wanted = SamplingParams(**sampling, temperature=0, ignore_eos=True, detokenize=False)
    found: AsyncIterator[Any] = engine.generate(
        TokensPrompt(prompt_token_ids=asked), wanted, request_id=uuid.uuid4().hex
    )
    return found


async def generate(request: Request) -> Any:
    asked = await request.json()
    most = asked["sampling_params"]["max_tokens"]
    async for part in made(request.app.state.engine, asked["token_ids"], max_tokens=most):
        (output,) = part.outputs
    spans = [asdict(span) for span in output.weight_versions or ()]
    choice = {"token_ids": list(output.token_ids), "finish_reason": output.finish_reason}
    return {"choices": [{**choice, "weight_versions": spans}]}


async def stream(request: Request) -> StreamingResponse:
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    asked = await request.json()
    parts = made(
        request.app.state.engine,
        asked["prompt"],
        max_tokens=asked["max_tokens"],
        output_kind=RequestOutputKind.DELTA,
    )

    async def events() -> AsyncIterator[str]:
        async for part in parts:
            (output,) = part.outputs
            choice = {"token_ids": list(output.token_ids), "finish_reason": output.finish_reason}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events())


if __name__ == "__main__":
    given = sys.argv[2:]  # without "serve"
    main(os.environ.pop("DELTACHAIN_URL"), int(given[given.index("--port") + 1]), given)
