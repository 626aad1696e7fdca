"""What of the benchmark only vLLM has: an offline ``LLM``, and a busy engine."""

# ruff: noqa: PLC0415 - vLLM reads its environment when it is imported
import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.engines.bench.figures import (
    CLEARED,
    ENVIRONMENT,
    EXTENSIONS,
    KEPT,
    SALTED,
    Applied,
    Drawn,
    Lost,
)

if TYPE_CHECKING:
    from deltachain.delta import TensorDelta
    from tests.engines.bench.applying import Dense, Live


def measure_updates(drawn: Drawn, *, plain: bool, warm_up: int) -> Applied:
    os.dup2(2, 1)  # vLLM's lines are no results
    # One core a candidate: two threads that wait for each other would measure who else is here.
    one = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.update({**ENVIRONMENT, **one})
    llm = loaded(drawn, plain=plain)
    from tests.engines.bench.applying import follow

    return follow(_live(llm, drawn), drawn, plain=plain, warm_up=warm_up)


def loaded(drawn: Drawn, *, plain: bool) -> Any:
    """Return a stock vLLM with a drawn model, in this process."""
    from vllm import LLM

    return LLM(
        model=str(drawn.base),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=2,
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        worker_extension_cls=EXTENSIONS[plain],
    )


def _live(llm: Any, drawn: Drawn) -> "Live":
    import torch
    from vllm.config import set_current_vllm_config

    import deltachain_vllm
    from deltachain_vllm.extension import worker_service
    from tests.engines.bench.applying import Live, Weights

    (model,) = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    config = llm.llm_engine.vllm_config

    def load(weights: Weights) -> None:
        with set_current_vllm_config(config), torch.no_grad():
            model.load_weights(weights)

    return Live(
        subscriber=deltachain_vllm.subscribe(llm, drawn.url),
        rank=lambda: worker_service(model, config, 0).rank,
        load=load,
        reload=lambda weights: llm.collective_rpc("reload_weights", args=(weights,)),
        patches=lambda deltas, dense: _patches(model, config, deltas, dense),
    )


def _patches(model: Any, config: Any, deltas: "Mapping[str, TensorDelta]", dense: "Dense") -> float:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    from tests.engines.bench.applying import seconds_of, torch_of

    patches = [
        CheckpointWeightPatch(
            name,
            delta.spec.shape,
            torch.bfloat16,
            torch_of(dense[name][delta.indices]).view(torch.bfloat16),
            torch_of(delta.indices),
        )
        for name, delta in deltas.items()
    ]
    with set_current_vllm_config(config):
        return seconds_of(
            lambda: load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)
        )


def measure_losses(drawn: Drawn, spool: Path, *, threads: int, times: int) -> Lost:
    os.dup2(2, 1)  # vLLM's lines are no results
    os.environ.update(
        {
            **ENVIRONMENT,
            "DELTACHAIN_SPOOL": str(spool),
            "DELTACHAIN_URL": drawn.url,
            "DELTACHAIN_PAUSE": "in_place",  # salts for the engine that keeps its cache
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
        max_model_len=512,
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
    from deltachain_vllm.engine import VllmEngine
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
    salting = replace(settings, pause="in_place")

    class Keeping(VllmEngine):
        @override
        def pause(self, *, in_doubt: bool = False) -> None:
            self._wait(client.collective_rpc("tests_salt", args=(False,)))
            super().pause(in_doubt=in_doubt)
            self._wait(client.collective_rpc("tests_salt", args=(True,)))

    ways = {
        CLEARED: VllmEngine(client, loop, settings),
        SALTED: VllmEngine(client, loop, salting),
        KEPT: Keeping(client, loop, salting),
    }
    return await lose(ways, generate, drawn, lost)
