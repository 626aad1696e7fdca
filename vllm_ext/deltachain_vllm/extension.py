"""The RPC service of a vLLM worker: ``--worker-extension-cls deltachain_vllm.WorkerExtension``."""

import os
from functools import partial
from importlib import import_module
from typing import Any, Final

import msgspec
from torch import nn

from deltachain.errors import UnsupportedEngineError
from deltachain.replica.messages import StatusReply, call_id, encode_reply
from deltachain.replica.rank import NO_DRAFT, RankService, RankServices
from deltachain.replica.settings import RankSettings, draft_does

from .compat import draft_config, draft_model, draft_of, has_heads, rank_of
from .model import VllmModel

EXTENSION: Final = "deltachain_vllm.WorkerExtension"

_SERVICES: Final = RankServices()
"""Services of this process: a worker and its weight-transfer backend share only the model."""


def worker_service(
    model: nn.Module, config: Any, rank: int, draft: nn.Module | None = None, balancer: Any = None
) -> RankService:
    """Return the RPC service of a worker, shared by its extension and its backend."""
    wrap = partial(VllmModel, model, config, draft, balancer)
    number = rank_of(config.parallel_config, rank)
    return _SERVICES.of(model, wrap, number, RankSettings.of(os.environ))


def _draft_service(draft: nn.Module, model: nn.Module, config: Any, rank: int) -> RankService:
    """Return the RPC service of a worker's draft, which follows a chain of its own."""
    number = rank_of(config.parallel_config, rank)
    settings = RankSettings.of(os.environ, draft=True)
    return _SERVICES.of(
        draft, lambda: VllmModel(draft_of(draft, model), draft_config(config)), number, settings
    )


class WorkerExtension:
    """Methods that vLLM adds to its worker, called by ``collective_rpc``; none of them raises.

    An exception in one worker misaligns every later reply of the others.
    """

    def deltachain_handle(self, request: str) -> str:
        """Handle a request of the leader; see :mod:`deltachain.replica.messages`."""
        worker: Any = self
        runner = worker.model_runner
        draft = draft_model(runner)
        balancer = getattr(runner, "eplb_state", None)
        service = worker_service(
            runner.get_model(), worker.vllm_config, worker.rank, draft, balancer
        )
        asked, follows_model = call_id(request), has_heads(worker.vllm_config)
        if not asked.of_draft:
            reply = service.respond(request)
        elif draft is None or follows_model:
            reply = service.refuse(asked, NO_DRAFT)
        else:
            model, config = runner.get_model(), worker.vllm_config
            reply = _draft_service(draft, model, config, worker.rank).respond(request)
        if isinstance(reply, StatusReply):
            is_open = bool(getattr(self, "_weight_update_active", False))
            reply = msgspec.structs.replace(reply, in_update_session=is_open)
        if draft is not None:
            does = draft_does(os.environ, has_heads=follows_model)
            reply = msgspec.structs.replace(reply, draft=f"{type(draft).__name__} {does}")
        return encode_reply(reply)

    def deltachain_settle(self) -> None:
        """Wait until no deltachain thread reads this rank's weights, before they are released."""
        worker: Any = self
        runner = worker.model_runner
        for model in (runner.get_model(), draft_model(runner)):
            if model is not None:
                _SERVICES.settle(model)


def check_extension(config: Any, option: str) -> None:
    """Refuse an engine whose workers have neither :class:`WorkerExtension` nor a subclass of it."""
    named = config.parallel_config.worker_extension_cls
    module, _, name = named.rpartition(".")
    found = getattr(import_module(module), name, None) if module else None
    if isinstance(found, type) and issubclass(found, WorkerExtension):
        return
    if named:
        raise UnsupportedEngineError(
            f"the worker extension {named} is not deltachain's",
            hint=f"make that class a subclass of {EXTENSION}, and name it as before by {option}",
        )
    raise UnsupportedEngineError(
        "the workers of this engine have no deltachain extension",
        hint=f"start it with {option}, {EXTENSION} or a subclass of it",
    )
