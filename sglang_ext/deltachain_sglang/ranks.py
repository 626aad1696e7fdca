"""The schedulers' side: each is one rank, and all of them answer as one.

Questions travel as checks of weights, which SGLang hands to every scheduler between two of its
steps and which wait for nobody. SGLang returns what its first rank says and nobody learns what the
others did, so all of them tell each other first, and every one returns the answers of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from deltachain.replica.layout.runtime_tables import record_loaded_state
from deltachain.replica.rpc import RankReply, settle, verbs_of
from deltachain_sglang import SCHEME, compat
from deltachain_sglang.model import SglangModel

BUSY: Final[RankReply] = {"ok": False, "busy": True}
"""Requests are running whose cache cannot be flushed: nothing was done."""


ASLEEP: Final[RankReply] = {"ok": False, "asleep": True}
"""The weights were released: nothing was read or written."""


def hook_schedulers() -> None:
    """Let every scheduler of this process answer."""
    compat.hook(compat.LOADED, on_load)
    compat.hook(compat.ASKED, on_question)
    compat.hook(compat.RELEASED, on_release)
    compat.hook(compat.PAUSED, on_pause)
    compat.hook(compat.NAMED, on_name)


def on_load(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Around ``load_model``: what a model holds before it runs is recorded."""
    found = original(runner, *args, **kwargs)
    record_loaded_state(runner.model)
    return found


def on_question(original: Callable[..., Any], manager: Any, request: Any) -> Any:  # noqa: ANN401
    """Around ``check_weights``: a question of ours is answered, any other passed on."""
    if not request.action.startswith(SCHEME):
        return original(manager, request)
    return compat.verdicts(json.dumps(_answers(request.action.removeprefix(SCHEME), manager)))


def on_release(original: Callable[..., Any], manager: Any, request: Any) -> Any:  # noqa: ANN401
    """Around ``release_memory_occupation``: who reads weights beside the scheduler ends first."""
    settle(manager.tp_worker.model_runner.model)
    return original(manager, request)


def on_pause(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:  # noqa: ANN401
    """Around ``pause_generation``: a pause may last."""
    found = original(scheduler, request)
    compat.rest(scheduler)
    return found


def on_name(
    original: Callable[..., Any],
    scheduler: Any,  # noqa: ANN401 - SGLang's
    new_version: str | None,
) -> Any:  # noqa: ANN401
    """Around ``record_weight_version_change``: what was computed before keeps its label."""
    before = compat.named()
    found = original(scheduler, new_version)
    if new_version not in (None, before):
        compat.credit(scheduler, before)
    return found


def _answers(asked: str, manager: Any) -> Sequence[RankReply]:  # noqa: ANN401
    """The verdicts of all ranks. Never raises: that would end the server.

    All ranks take the same way through this, or one would wait for another for ever.
    """
    if not compat.has_weights(manager):
        return [ASLEEP]
    runner = manager.tp_worker.model_runner
    updater, number = runner.weight_updater, compat.rank_of()
    verbs = verbs_of(
        runner.model,
        lambda: SglangModel(runner.model, updater.model_config, updater.device),
        number,
    )
    verb, arguments, flush = _parse(asked)
    if flush and not all(compat.gather(compat.can_flush(manager))):
        return [BUSY]
    verdicts = compat.gather(verbs.do(verb, arguments))
    if verb == "swap":  # also one that failed: it may have written
        compat.forget_embeddings()
    if flush and all(verdict["ok"] for verdict in verdicts):
        compat.flush(manager)
    return verdicts


def _parse(asked: str) -> tuple[str, dict[str, Any], bool]:
    try:
        question = json.loads(asked)
        return str(question["verb"]), dict(question["arguments"]), bool(question["flush"])
    except (ValueError, TypeError, KeyError):
        return "", {}, False  # which is no verb, and refused as such
