"""Workers of an offline ``LLM`` that can be asked what a fresh load of a checkpoint would hold."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import deltachain_vllm.extension
from tests.engines.vllm.fresh import sharded_experts

_KEPT: Final = ExitStack()
_KEPT.enter_context(sharded_experts())


def fresh_digests(worker: Any, checkpoint: str) -> dict[str, str]:
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415

    ours = worker.vllm_config
    config = EngineArgs(
        model=checkpoint,
        dtype="bfloat16",
        max_model_len=ours.model_config.max_model_len,
        enforce_eager=True,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        tensor_parallel_size=ours.parallel_config.tensor_parallel_size,
        pipeline_parallel_size=ours.parallel_config.pipeline_parallel_size,
        enable_expert_parallel=ours.parallel_config.enable_expert_parallel,
    ).create_engine_config()
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    return digests(model)


def digests(model: Any) -> dict[str, str]:
    from vllm.v1.worker.gpu_worker import compute_tensor_digests  # noqa: PLC0415

    found: dict[str, str] = compute_tensor_digests(model)
    return found


class WorkerExtension(deltachain_vllm.extension.WorkerExtension):
    def tests_wrong(self, checkpoint: str) -> list[str]:
        worker: Any = self
        live = digests(worker.model_runner.get_model())
        fresh = fresh_digests(worker, str(Path(checkpoint)))
        return sorted(n for n in live.keys() | fresh.keys() if live.get(n) != fresh.get(n))
