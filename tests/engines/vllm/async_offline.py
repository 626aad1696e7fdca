"""An ``AsyncLLM`` that follows a chain while it generates: ``python -m`` this module.

Prints one line of JSON.
"""

import asyncio
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from deltachain.cli.pull import pull
from deltachain.errors import ConfigError
from tests.engines.vllm.offline import _ENVIRONMENT, LENGTH


async def main(url: str, base: str) -> dict[str, Any]:
    from vllm import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    import deltachain_vllm  # noqa: PLC0415

    arguments = AsyncEngineArgs(
        model=base,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        worker_extension_cls="tests.engines.vllm.offline_plain.WorkerExtension",
    )
    seen: dict[str, Any] = {"wrong": {}}
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        subscriber = deltachain_vllm.subscribe(llm, url)
        try:
            subscriber.update()
        except ConfigError as exc:
            seen["refused"] = str(exc)
        running = asyncio.create_task(_generate(llm, 200))
        for version, step in ((2, subscriber.update), (1, subscriber.rollback)):
            await asyncio.to_thread(step, version)
            with tempfile.TemporaryDirectory() as folder:
                pull(url, out=Path(folder) / "it", version=version)
                asked = (str(Path(folder) / "it"),)
                seen["wrong"][version] = await llm.collective_rpc("tests_wrong", args=asked)
        seen["tokens"] = [await running, await _generate(llm, LENGTH)]
        seen["scrubbed"] = await asyncio.to_thread(subscriber.scrub)
        leader = deltachain_vllm.follow(llm, url)
        while not (status := leader.status()).ready:
            assert not status.fault
            await _generate(llm, LENGTH)
        seen["followed"] = [status.version, await asyncio.to_thread(leader.scrub)]
        await asyncio.to_thread(leader.stop)
        engine = leader.engine
        seen["dead"] = [engine.is_dead()]
        for child in psutil.Process().children(recursive=True):
            if "EngineCore" in " ".join(child.cmdline()):
                child.kill()
        with suppress(Exception):  # of a class of vLLM's, which health is made of too
            await _generate(llm, LENGTH)
        seen["dead"].append(engine.is_dead())
    finally:
        llm.shutdown()
    return seen


async def _generate(llm: Any, length: int) -> int:
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    wanted = SamplingParams(max_tokens=length, temperature=0, detokenize=False, ignore_eos=True)
    prompt, found = TokensPrompt(prompt_token_ids=[5, 6, 7]), 0
    async for part in llm.generate(prompt, wanted, request_id=f"of {length}"):
        found = len(part.outputs[0].token_ids)
    return found


if __name__ == "__main__":
    os.environ.update(_ENVIRONMENT)
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind")
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:3]))) + "\n")
