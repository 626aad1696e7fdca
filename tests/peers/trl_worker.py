"""The engine of TRL's first draft in vLLM 0.32, with methods that this vLLM asks for."""

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import reload

from tests.engines.vllm.plain import WorkerExtension as Plain
from tests.peers import sources

_THEIRS: Any = sources.trl(1)


class Engine(_THEIRS.DeltaWeightTransferEngine):
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        WeightTransferEngine.__init__(self, config, vllm_config, device, model)
        self._bf16_snapshot = None  # as theirs, whose signature is of another vLLM

    def start_weight_update(self) -> None:
        reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: Any) -> None:
        super().receive_weights(update_info, self.model.load_weights)


class WorkerExtension(Plain, _THEIRS.DeltaWorkerExtension):
    pass


WeightTransferEngineFactory.register_engine("trl-draft", Engine)
