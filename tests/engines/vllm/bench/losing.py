"""A busy vLLM for :mod:`tests.engines.bench.losing`."""

# ruff: noqa: PLC0415 - vLLM reads its environment when it is imported
from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from tests.engines.bench.figures import ENVIRONMENT, EXTENSIONS, Drawn, Lost


def measure(drawn: Drawn, spool: Path, *, threads: int, times: int) -> Lost:
    os.dup2(2, 1)  # vLLM's lines are no results
    os.environ.update(
        {
            **ENVIRONMENT,
            "DELTACHAIN_SPOOL": str(spool),
            "DELTACHAIN_URL": drawn.url,
            "OMP_NUM_THREADS": str(threads),
        }
    )
    return asyncio.run(_measure(drawn, Lost(plain=True, threads=threads, times=times)))


async def _measure(drawn: Drawn, lost: Lost) -> Lost:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(drawn.base),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        worker_extension_cls=EXTENSIONS[lost.plain],
        weight_transfer_config=WeightTransferConfig(backend="deltachain"),
    )
    client = AsyncLLM.from_engine_args(arguments)
    try:
        return await _lose(client, drawn, lost)
    finally:
        client.shutdown()


async def _lose(client: Any, drawn: Drawn, lost: Lost) -> Lost:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from deltachain.replica.settings import ReplicaSettings
    from deltachain.subscribe.config import SubscribeConfig
    from deltachain_vllm.server import VllmEngine
    from tests.engines.bench.losing import lose

    numbers = count()

    async def generate(prompt: list[int], length: int) -> AsyncIterator[int]:
        greedy = SamplingParams(
            max_tokens=length,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        asked = {"prompt_token_ids": prompt}
        async for output in client.generate(asked, greedy, str(next(numbers))):
            yield len(output.outputs[0].token_ids)

    settings = ReplicaSettings(subscribe=SubscribeConfig(url=drawn.url))
    loop = asyncio.get_running_loop()
    clearing = VllmEngine(client, loop, settings)
    keeping = VllmEngine(client, loop, replace(settings, keep_cache=True))
    return await lose(clearing, keeping, generate, drawn, lost)
