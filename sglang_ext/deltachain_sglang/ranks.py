"""The schedulers' side: each scheduler is one rank, and one of them replies for all.

Requests are sent as checks of weights, which SGLang passes to every scheduler between two of its
steps, without a wait for running requests. SGLang returns only the reply of an engine's first rank,
so the ranks of an engine gather all replies first, and each returns all of them.

A pipeline stage passes a request on after its own reply. So the replies of later stages are
returned to a second request, ``COLLECT``.
"""

import os
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from torch import nn

from deltachain.errors import ApplyError, PartialApplyError
from deltachain.format.documents import Struct
from deltachain.replica import messages as wire
from deltachain.replica.layout.heads import DraftOnly
from deltachain.replica.layout.runtime_tables import record_loaded_state
from deltachain.replica.rank import NO_DRAFT, RankService, RankServices
from deltachain.replica.settings import RankSettings

from . import SCHEME, cache_salts, compat
from .model import SglangModel

BUSY: Final = "requests are running that the pause did not end"


class SchedulerRequest(Struct, frozen=True, kw_only=True):
    """A request to all ranks; with ``flush``, caches are flushed once all have handled it.

    With a ``salt``, requests that have not started get it before. With ``ask``, nothing is handled:
    stages reply whether they could.
    """

    request: wire.AnyRequest
    flush: bool = False
    salt: str = ""
    ask: bool = False


class SchedulerReply(Struct, frozen=True, kw_only=True):
    """The replies of all ranks of an engine's stage, or of all its stages with one status.

    A busy one refuses. ``oldest`` names the oldest version in the engine's caches.
    """

    status: Literal["answered", "busy", "asleep"] = "answered"
    replies: tuple[wire.AnyReply, ...] = ()
    oldest: str = ""


COLLECT: Final = "collect"  # request for the replies of all stages to the requests before


_REQUESTS: Final = msgspec.json.Decoder(SchedulerRequest)
_REPLIES: Final = msgspec.json.Decoder(SchedulerReply)


def decode_scheduler_request(text: str) -> SchedulerRequest | None:
    try:
        return _REQUESTS.decode(text)
    except wire.UNREADABLE:
        return None


def decode_scheduler_reply(text: str) -> SchedulerReply:
    """Decode the reply of the schedulers, or raise an error of SGLang's own as an ApplyError."""
    try:
        return _REPLIES.decode(text)
    except wire.UNREADABLE as exc:
        raise ApplyError(
            f"cannot read the schedulers' reply: {exc}: {text[:200]!r}", hint=wire.SAME_VERSION
        ) from exc


_SERVICES: Final = RankServices()
"""Services of this process: calls of SGLang's hooks share only the model."""


def hook_schedulers() -> None:
    compat.hook(compat.LOADED, on_load)
    compat.hook(compat.ASKED, on_request)
    compat.hook(compat.RELEASED, on_release)
    compat.hook(compat.PAUSED, on_pause)
    compat.hook(compat.NAMED, on_name)
    cache_salts.salt_requests()


def on_load(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``load_model``: record the members of a model before it runs."""
    found = original(runner, *args, **kwargs)
    record_loaded_state(runner.model)
    return found


def on_request(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap ``check_weights``: handle deltachain's requests, and pass on any other."""
    if not request.action.startswith(SCHEME):
        return original(manager, request)
    reply = _STAGES.reply(request.action.removeprefix(SCHEME), manager)
    return compat.check_reply(wire.encode(reply))


def on_release(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap ``release_memory_occupation``: wait for threads that still read weights."""
    drafting = compat.draft(manager)
    for runner in (manager.tp_worker.model_runner, *([drafting] if drafting else [])):
        _SERVICES.settle(runner.model)
    return original(manager, request)


def on_pause(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Wrap ``pause_generation``: keep the watchdog from ending a scheduler in a long pause."""
    found = original(scheduler, request)
    compat.rest(scheduler)
    return found


def on_name(original: Callable[..., Any], scheduler: Any, new_version: str | None) -> Any:
    """Wrap ``record_weight_version_change``: tokens computed before keep their version."""
    before = compat.named()
    found = original(scheduler, new_version)
    if new_version not in (None, before):
        compat.credit(scheduler, before)
    return found


class _Stages:
    """Replies of this pipeline stage that the leader has not collected."""

    def __init__(self) -> None:
        self._replies: list[SchedulerReply] = []

    def reply(self, text: str, manager: Any) -> SchedulerReply:
        if text != COLLECT:
            reply = _reply(text, manager)
            if compat.stages() > 1 and compat.stage():
                compat.send_back(wire.encode(reply))
            elif compat.stages() > 1:
                self._replies.append(reply)
            return reply
        mine, self._replies = self._replies, []
        if not mine:
            return SchedulerReply()
        found = [mine[-1], *map(decode_scheduler_reply, compat.receive_back(len(mine)))]
        worst = max((one.status for one in found), key=("answered", "busy", "asleep").index)
        replies = [reply for one in found if one.status == worst for reply in one.replies]
        return SchedulerReply(status=worst, replies=tuple(replies))


_STAGES: Final = _Stages()


def _reply(text: str, manager: Any) -> SchedulerReply:
    """Return the replies of all ranks to an encoded request; never raise, to keep the server alive.

    All ranks take the same branches: otherwise one would wait in a collective without the others.
    """
    if not compat.has_weights(manager):
        return SchedulerReply(status="asleep")
    service = _service(manager.tp_worker.model_runner, manager)
    asked = decode_scheduler_request(text)
    if asked is None:
        return _gathered(service.answer(text))  # refused
    if asked.flush and not all(compat.gather(compat.can_flush(manager))):
        refusal = service.refuse(asked.request, PartialApplyError(BUSY))
        return _gathered(wire.encode_reply(refusal), status="busy")
    if asked.ask:
        return SchedulerReply()
    if asked.salt:
        cache_salts.renew(manager.scheduler, asked.salt)
    mine = msgspec.structs.replace(_handled(asked.request, manager), draft=compat.drafts(manager))
    reply = _gathered(wire.encode_reply(mine))
    if isinstance(asked.request, wire.SwapRequest):  # even if it failed: it may have written
        compat.forget_embeddings()
    if asked.flush and not any(isinstance(one, wire.Refusal) for one in reply.replies):
        compat.flush(manager)
    return msgspec.structs.replace(reply, oldest=compat.oldest(manager.scheduler))


def _handled(request: wire.RankRequest, manager: Any) -> wire.RankReply:
    """Let this rank handle a request, or its draft, which follows a chain of its own."""
    runner, draft = manager.tp_worker.model_runner, compat.draft(manager)
    if not request.of_draft:
        return _service(runner, manager).handle(request)
    if draft is None:
        return _service(runner, manager).refuse(request, NO_DRAFT)
    return _service(draft, manager, drafts_for=runner.model).handle(request)


def _service(runner: Any, manager: Any, *, drafts_for: nn.Module | None = None) -> RankService:
    updater = runner.weight_updater
    config, device = updater.model_config, updater.device

    def wrap() -> SglangModel:
        if drafts_for is not None:
            return SglangModel(DraftOnly(runner.model, drafts_for), config, device)
        return SglangModel(runner.model, config, device, compat.heads(manager))

    settings = RankSettings.of(os.environ, draft=drafts_for is not None)
    return _SERVICES.of(runner.model, wrap, compat.rank_of(), settings)


def _gathered(mine: str, status: Literal["answered", "busy"] = "answered") -> SchedulerReply:
    replies = tuple(wire.decode_reply(text) for text in compat.gather(mine))
    return SchedulerReply(status=status, replies=replies)
