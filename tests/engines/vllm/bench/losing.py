"""Generation lost to updates: a vLLM that is kept busy, with nothing, staging or updates beside it.

The engine is the one of a server, in a process of its own with its scheduler and its worker, driven
by its own asynchronous client; only HTTP is left out. A fixed number of greedy requests is always
running, and every token is counted when it arrives. Quiet windows of a few seconds alternate with
others: in one versions are staged again and again, in one there are as many updates, in one there
are updates after which requests go on with what they had cached. What a window lost is the time
that its missing tokens would have taken at the rate of the two quiet windows next to it.
"""

# ruff: noqa: PLC0415 - vLLM reads its environment when it is imported
from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from tests.engines.bench.figures import ENVIRONMENT, EXTENSIONS, Drawn, Lost

REQUESTS: Final = 4
PROMPT: Final = 16
LENGTH: Final = 192
"""Tokens that each request asks for, whatever the model says."""

WINDOW_S: Final = 3.0


def measure(drawn: Drawn, spool: Path, *, plain: bool, threads: int, times: int) -> Lost:
    """Follow a chain while generating.

    Args:
        drawn: The chain; its length decides how long this takes.
        spool: Where plans are decoded.
        plain: Whether linear layers keep their weights.
        threads: That the engine computes in.
        times: Updates a window.
    """
    os.dup2(2, 1)  # vLLM's lines are no results
    os.environ.update(
        {
            **ENVIRONMENT,
            "DELTACHAIN_SPOOL": str(spool),
            "DELTACHAIN_URL": drawn.url,
            "OMP_NUM_THREADS": str(threads),
        }
    )
    return asyncio.run(_measure(drawn, Lost(plain=plain, threads=threads, times=times)))


async def _measure(drawn: Drawn, lost: Lost) -> Lost:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(drawn.base),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=REQUESTS,
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        worker_extension_cls=EXTENSIONS[lost.plain],
        weight_transfer_config=WeightTransferConfig(backend="deltachain"),
    )
    client = AsyncLLM.from_engine_args(arguments)
    try:
        return await _with_clients(client, drawn, lost)
    finally:
        client.shutdown()


async def _with_clients(client: Any, drawn: Drawn, lost: Lost) -> Lost:
    from deltachain.bench.timing import say
    from deltachain.subscribe.config import SubscribeConfig
    from deltachain.subscribe.leader import Leader
    from deltachain.subscribe.settings import ReplicaSettings
    from deltachain_vllm.server import ServerEngine

    loop = asyncio.get_running_loop()
    settings = ReplicaSettings(subscribe=SubscribeConfig(url=drawn.url, base=drawn.base))
    clearing = ServerEngine(client, loop, settings)
    keeping = ServerEngine(client, loop, replace(settings, keep_cache=True))
    leader = Leader(settings, clearing)
    await asyncio.to_thread(leader.subscriber.open)
    load = _Load(client, lost.times)
    load.start()

    def stage() -> None:
        leader.subscriber.stage((leader.subscriber.version or 0) + 1)

    def update() -> None:
        receipt = leader.update((leader.subscriber.version or 0) + 1)
        if receipt is not None:
            lost.stage_s.append(receipt.stage_s)
            lost.swap_s.append(receipt.swap_s)
            lost.pause_s.append(receipt.pause_s)

    def update_keeping() -> None:
        leader.target.engine = keeping
        update()
        leader.target.engine = clearing

    kinds = (
        (stage, lost.staging_s),
        (update, lost.updating_s),
        (update_keeping, lost.keeping_s),
    )
    await asyncio.to_thread(update)  # the first of everything
    await load.window(None)
    quiet = await load.window(None)
    for number in range((len(drawn.densities) - 1) // (2 * lost.times)):
        say(f"{drawn.size} in {lost.threads} threads: window {number}")
        for action, seconds in kinds:
            busy = await load.window(action)
            after = await load.window(None)
            rate = (quiet.rate + after.rate) / 2
            seconds.append((busy.seconds - busy.tokens / rate) / lost.times)
            quiet = after
            lost.rates.append(after.rate)
    await load.stop()
    lost.proven = await asyncio.to_thread(leader.subscriber.scrub)
    await asyncio.to_thread(leader.stop)
    return lost


@dataclass(frozen=True, slots=True)
class _Window:
    """Tokens that arrived in some seconds."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class _Load:
    """Requests that follow one another, a fixed number of them at any time."""

    def __init__(self, client: Any, times: int) -> None:
        self._client = client
        self._times = times
        self._tokens = 0
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask(seed)) for seed in range(REQUESTS)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def window(self, action: Callable[[], None] | None) -> _Window:
        """Count for a while, with something done at even intervals from its beginning on."""
        start, before = time.perf_counter(), self._tokens
        for number in range(self._times):
            if action is not None:
                await asyncio.to_thread(action)
            until = start + WINDOW_S * (number + 1) / self._times
            await asyncio.sleep(max(0.0, until - time.perf_counter()))
        for task in self._tasks:
            if task.done():
                task.result()
        return _Window(self._tokens - before, time.perf_counter() - start)

    async def _ask(self, seed: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        dice = random.Random(seed)
        greedy = SamplingParams(
            max_tokens=LENGTH,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        length = LENGTH * (seed + 1) // REQUESTS  # they end one after another
        while True:
            greedy.max_tokens, length = length, LENGTH
            prompt = {"prompt_token_ids": dice.choices(range(3, 2000), k=PROMPT)}
            async for output in self._client.generate(prompt, greedy, str(next(self._numbers))):
                self._tokens += len(output.outputs[0].token_ids)
