"""SkyRL: its weight-sync backend ``delta`` with a chain, once a policy worker imports this module.

SkyRL keeps a sender of that name which vLLM's registry has already. Its own would write files that
only its own engines read, and pause them for a reload.
"""

from typing import Any, Self

import ray
from skyrl.backends.skyrl_train.weight_sync.delta import trainer as theirs
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from deltachain.errors import ConfigError

from .trainer import DeltaChainTrainer, DeltaChainTrainerInit


class DeltaChainSender(SkyrlTrainerCapabilities, DeltaChainTrainer):  # type: ignore[misc]
    """Publishes to ``delta_weight_sync.sync_dir``, then names the version to SkyRL's servers.

    Ranks of FSDP publish their shards, in the servers' ``model_dtype``; other sources are gathered
    as SkyRL gathers them.
    """

    init_info_cls = theirs.DeltaTrainerInitInfo
    skyrl_handles_prefix_cache_reset = True  # a swap does, by the replica's pause mode

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Self:
        """Create or continue the chain; see :meth:`DeltaChainTrainer.trainer_init`."""
        settings = {}
        if isinstance(source, FsdpWeightSource) and not source.weight_prefix:
            settings, source = {"dtype": source.metadata()[0].dtype}, source.model
        place = DeltaChainTrainerInit(init_info.sync_dir, settings, rank=init_info.rank)
        return super().trainer_init(place, client=client, source=source)

    def send_weights(self) -> None:
        """Commit the current weights; return once every server holds that version.

        Raises:
            ConfigError: The servers have a draft model, which a chain of the policy lacks.
            DeltaChainError: As :meth:`DeltaChainTrainer.send_weights`.
        """
        if self.skyrl_draft_source is not None:
            hint = "remove generator.inference_engine.speculative_config"
            raise ConfigError("the chain has no weights of the draft model", hint=hint)
        super().send_weights()


def publishing(worker: type) -> Any:
    """Return an actor class of Ray, with a GPU each, of a policy worker of SkyRL that publishes."""
    members = {"sender": DeltaChainSender}  # so that each of its processes imports this module
    return ray.remote(num_gpus=1)(type(worker.__name__, (worker,), members))


WeightTransferTrainerFactory.register_engine(theirs.DELTA_BACKEND, DeltaChainSender)
