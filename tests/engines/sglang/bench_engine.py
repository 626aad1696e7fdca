"""What of the benchmark only SGLang has: a rank without a server, and a busy engine."""

# ruff: noqa: PLC0415 - SGLang reads its environment when it is imported
import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from tests.engines.bench.figures import CLEARED, KEPT, SALTED, Applied, Drawn, Lost


class Alone:
    software = "sglang"

    def __init__(self, service: Any) -> None:
        self.service = service

    def call(self, request: Any) -> Sequence[Any]:
        return [self.service.handle(request)]

    def is_dead(self) -> bool:
        return False

    def is_paused(self) -> bool:
        return False

    def pause(self, *, in_doubt: bool = False) -> None: ...

    def resume(self) -> None: ...

    def oldest(self) -> str:
        return ""

    def name_version(self, version: int) -> None: ...


def measure_updates(drawn: Drawn, *, plain: bool, warm_up: int) -> Applied:
    os.dup2(2, 1)  # SGLang's lines are no results
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from deltachain.replica.rank import RankService
    from deltachain.replica.settings import RankSettings
    from deltachain.replica.target import ReplicaTarget
    from deltachain.subscribe.subscriber import Subscriber
    from tests.engines.bench.applying import Live, follow
    from tests.engines.sglang.fresh import known, load_in_context

    torch.set_num_threads(1)
    with load_in_context(drawn.base) as (config, model), tempfile.TemporaryDirectory() as scratch:
        engine = known(config, model)
        service = RankService(lambda: engine, 0, RankSettings(spool=Path(scratch), url=drawn.url))
        target = ReplicaTarget(Alone(service), drawn.url, Path(scratch))

        live = Live(
            subscriber=Subscriber(drawn.url, target),
            rank=lambda: service.rank,
            load=engine.load,
            reload=lambda weights: engine.reload(iter(weights)),
        )
        return follow(live, drawn, plain=plain, warm_up=warm_up)


def measure_losses(drawn: Drawn, spool: Path, *, threads: int, times: int) -> Lost:
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
        context_length=512,
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
    from deltachain_sglang.engine import SglangEngine
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
    salting = replace(settings, pause="in_place")

    class Keeping(SglangEngine):
        @override
        def _ask(self, asked: Any) -> Sequence[Any]:
            return super()._ask(msgspec.structs.replace(asked, salt=""))

    ways = {
        CLEARED: SglangEngine(manager, loop, settings),
        SALTED: SglangEngine(manager, loop, salting),
        KEPT: Keeping(manager, loop, salting),
    }
    return await lose(ways, generate, drawn, lost)
