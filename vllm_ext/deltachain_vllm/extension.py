"""The verbs of a vLLM worker: ``--worker-extension-cls deltachain_vllm.WorkerExtension``."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, Final

from torch import nn

from deltachain.replica.rpc import RankReply, RankVerbs, settle, verbs_of
from deltachain_vllm.model import VllmModel

EXTENSION: Final = "deltachain_vllm.WorkerExtension"


def worker_verbs(
    model: nn.Module,
    config: Any,  # noqa: ANN401 - vLLM's
    rank: int,
    draft: nn.Module | None = None,
) -> RankVerbs:
    """The verbs of a worker; the same for its extension and its backend."""
    return verbs_of(model, partial(VllmModel, model, config, draft), rank)


class WorkerExtension:
    """What vLLM adds to its worker, to be called by ``collective_rpc``.

    Every verb takes keyword arguments and answers with a verdict; none of them ever raises, because
    a worker that raises misaligns every later answer of its neighbours.
    """

    def deltachain_attach(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """Find the ways into this rank's weights. Blocks the engine."""
        return self._deltachain_do("attach", arguments)

    def deltachain_agree(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """Take what all ranks agreed on."""
        return self._deltachain_do("agree", arguments)

    def deltachain_unused(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """Find out which tensors that no rank holds change nothing. Blocks the engine."""
        return self._deltachain_do("unused", arguments)

    def deltachain_unused_state(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """The digests of unused tensors, out of the files that the engine loaded."""
        return self._deltachain_do("unused_state", arguments)

    def deltachain_state(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """Begin to recompute the state digest of the live weights."""
        return self._deltachain_do("state", arguments)

    def deltachain_check(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """Load what is on the host again, and say whether that changed anything."""
        return self._deltachain_do("check", arguments)

    def deltachain_stage(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """Begin to stage a spooled plan."""
        return self._deltachain_do("stage", arguments)

    def deltachain_poll(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """Say whether what was begun is done, and how it ended."""
        return self._deltachain_do("poll", arguments)

    def deltachain_swap(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """Write what was staged, or take it back. The engine must be paused."""
        return self._deltachain_do("swap", arguments)

    def deltachain_verdict(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """The verdict of the last swap that came through the weight-transfer backend."""
        return self._deltachain_do("verdict", arguments)

    def deltachain_status(self, *_: Any, **arguments: Any) -> RankReply:  # noqa: ANN401
        """What this rank holds, and whether an update session of vLLM's own is open."""
        found = self._deltachain_do("status", arguments)
        return {**found, "busy": bool(getattr(self, "_weight_update_active", False))}

    def deltachain_settle(self) -> RankReply:
        """Wait until nothing reads this rank's weights beside the engine: they are released."""
        worker: Any = self
        settle(worker.model_runner.get_model())
        return {"ok": True}

    def _deltachain_do(self, verb: str, arguments: dict[str, Any]) -> RankReply:
        worker: Any = self
        runner = worker.model_runner
        draft = getattr(getattr(runner, "drafter", None), "model", None)
        draft = draft if isinstance(draft, nn.Module) else None
        verbs = worker_verbs(runner.get_model(), worker.vllm_config, worker.rank, draft)
        return verbs.do(verb, arguments)


def knows_us(named: str) -> bool:
    """Whether a worker extension is ours, or built upon it."""
    module, _, name = named.rpartition(".")
    found = getattr(import_module(module), name, None) if module else None
    return isinstance(found, type) and issubclass(found, WorkerExtension)
