"""A rank of SGLang in a process of its own, asked without a server in between."""

# ruff: noqa: PLC0415 - SGLang reads its environment when it is imported
from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.bench.figures import Applied, Drawn


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

    def name_version(self, version: int) -> None: ...


def measure(drawn: Drawn, *, plain: bool, warm_up: int) -> Applied:
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
