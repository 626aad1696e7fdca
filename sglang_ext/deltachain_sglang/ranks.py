"""The schedulers' side: each is one rank, and all of them answer as one.

Questions travel as checks of weights, which SGLang hands to every scheduler between two of its
steps and which wait for nobody. A swap travels as an update from disk. SGLang returns what its
first rank says and nobody learns what the others did, so all of them tell each other first, and
every one returns the answers of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from deltachain.subscribe.verbs import RankVerbs, Verdict, verbs_of
from deltachain_sglang import SCHEME, compat
from deltachain_sglang.model import SglangModel


def hook_schedulers() -> None:
    """Let every scheduler of this process answer."""
    compat.hook(compat.ASKED, on_question)
    compat.hook(compat.WRITTEN, on_update)


def on_question(original: Callable[..., Any], manager: Any, request: Any) -> Any:  # noqa: ANN401
    """Around ``check_weights``: a question of ours is answered, any other passed on."""
    if not request.action.startswith(SCHEME):
        return original(manager, request)
    runner = manager.tp_worker.model_runner
    return compat.verdicts(_answers(request.action, runner.model, runner.weight_updater))


def on_update(
    original: Callable[..., tuple[bool, str]],
    updater: Any,  # noqa: ANN401 - SGLang's
    model_path: str,
    load_format: str,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> tuple[bool, str]:
    """Around ``update_weights_from_disk``: success only if every rank of the group has written."""
    if not model_path.startswith(SCHEME):
        return original(updater, model_path, load_format, *args, **kwargs)
    text = _answers(model_path, updater.get_model(), updater)
    return all(verdict["ok"] for verdict in json.loads(text)), text


def _answers(asked: str, model: Any, updater: Any) -> str:  # noqa: ANN401
    """The verdicts of all ranks, as JSON. Never raises: that would end the server."""
    verbs = verbs_of(
        model,
        lambda: SglangModel(model, updater.model_config, updater.device),
        compat.rank_of(),
    )
    return json.dumps(compat.gather(_answer(verbs, asked.removeprefix(SCHEME))))


def _answer(verbs: RankVerbs, asked: str) -> Verdict:
    try:
        question = json.loads(asked)
        verb, arguments = str(question["verb"]), dict(question["arguments"])
    except (ValueError, TypeError, KeyError):
        verb, arguments = "", {}  # which is no verb, and refused as such
    return verbs.do(verb, arguments)
