"""A busy SGLang for :mod:`tests.engines.bench.losing`."""

# ruff: noqa: PLC0415 - SGLang reads its environment when it is imported
from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.engines.bench.figures import Drawn, Lost


def measure(drawn: Drawn, spool: Path, *, threads: int, times: int) -> Lost:
    os.dup2(2, 1)  # SGLang's lines are no results
    os.environ.update(
        {
            "DELTACHAIN_SPOOL": str(spool),
            "DELTACHAIN_URL": drawn.url,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "SGLANG_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}",
            "SGLANG_USE_CPU_ENGINE": "1",
        }
    )
    import sglang

    engine = sglang.Engine(
        model_path=str(drawn.base),
        device="cpu",
        dtype="bfloat16",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        context_length=256,
        max_running_requests=4,
        max_total_tokens=2048,
        mem_fraction_static=0.6,
        disable_cuda_graph=True,
        log_level="error",
    )
    try:
        lost = Lost(plain=True, threads=threads, times=times)
        found: Lost = engine.loop.run_until_complete(_lose(engine, drawn, lost))
        return found
    finally:
        engine.shutdown()


async def _lose(engine: Any, drawn: Drawn, lost: Lost) -> Lost:
    from deltachain.replica.settings import ReplicaSettings
    from deltachain.subscribe.config import SubscribeConfig
    from deltachain_sglang.server import SglangEngine
    from tests.engines.bench.losing import lose

    async def generate(prompt: list[int], length: int) -> AsyncIterator[int]:
        greedy = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        seen = 0
        async for output in await engine.async_generate(
            input_ids=prompt, sampling_params=greedy, stream=True
        ):
            now = output["meta_info"]["completion_tokens"]
            yield now - seen
            seen = now

    settings = ReplicaSettings(subscribe=SubscribeConfig(url=drawn.url))
    loop, manager = asyncio.get_running_loop(), engine.tokenizer_manager
    clearing = SglangEngine(manager, loop, settings)
    keeping = SglangEngine(manager, loop, replace(settings, keep_cache=True))
    return await lose(clearing, keeping, generate, drawn, lost)
