"""Generation lost to updates: an engine that is busy, with nothing, staging or updates beside it.

The engine is the one of a server, with its scheduler in a process of its own, driven by its own
asynchronous client; only HTTP is left out. A fixed number of greedy requests is always
running, and every token is counted when it arrives. Quiet windows of a few seconds alternate with
others: in one versions are staged again and again, in the rest there are as many updates, each of
one way with caches: all dropped, told apart by version, or all kept. All prompts begin alike, so
that a cache is worth something. What a window lost is the time that its missing tokens would have
taken at the rate of the two quiet windows next to it.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from deltachain.replica.engine import Engine
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings, spool_folder
from deltachain.subscribe.config import SubscribeConfig
from tests.bench.report import say
from tests.engines.bench.figures import CLEARED, WAYS, Drawn, Lost

Generate: TypeAlias = "Callable[[list[int], int], AsyncIterator[int]]"

REQUESTS: Final = 4
SHARED: Final = 128  # tokens that all prompts begin with: a block of vLLM's on a CPU
PROMPT: Final = 16
LENGTH: Final = 192

WINDOW_S: Final = 3.0


async def lose(ways: Mapping[str, Engine], generate: Generate, drawn: Drawn, lost: Lost) -> Lost:
    """Follow a chain while generating, by each way with caches in turn."""
    subscribe = SubscribeConfig(url=drawn.url, base=drawn.base)
    settings = ReplicaSettings(subscribe=subscribe, spool=spool_folder(os.environ))
    leader = Leader(settings, ways[CLEARED])
    await asyncio.to_thread(leader.subscriber.open)
    load = _Load(generate, lost.times)
    load.start()

    def stage() -> None:
        leader.subscriber.stage((leader.subscriber.version or 0) + 1)

    def update(way: str) -> None:
        leader.target.engine = ways[way]
        receipt = leader.update((leader.subscriber.version or 0) + 1)
        if receipt is not None and way == CLEARED:
            lost.stage_s.append(receipt.stage_s)
            lost.swap_s.append(receipt.swap_s)
            lost.pause_s.append(receipt.pause_s)

    kinds = [(stage, lost.staging_s)] + [
        (partial(update, way), lost.updates_s[way]) for way in WAYS
    ]
    for way in WAYS:
        await asyncio.to_thread(update, way)  # the first of everything
    await load.window(None)
    quiet = await load.window(None)
    for number in range(len(drawn.densities) // (len(WAYS) * lost.times) - 1):
        say(f"{drawn.size} in {lost.threads} threads: window {number}")
        for action, seconds in kinds if number % 2 else reversed(kinds):
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
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class _Load:
    def __init__(self, generate: Generate, times: int) -> None:
        self._generate = generate
        self._times = times
        self._tokens = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask(seed)) for seed in range(REQUESTS)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def window(self, action: Callable[[], None] | None) -> _Window:
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
        dice, shared = random.Random(seed), random.Random(7).choices(range(3, 2000), k=SHARED)
        length = LENGTH * (seed + 1) // REQUESTS  # they end one after another
        while True:
            prompt = shared + dice.choices(range(3, 2000), k=PROMPT)
            async for count in self._generate(prompt, length):
                self._tokens += count
            length = LENGTH
