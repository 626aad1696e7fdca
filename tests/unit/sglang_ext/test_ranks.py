"""The SGLang side without SGLang: what schedulers answer, and what the server lets through."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import nn

from deltachain.errors import ApplyError, ConfigError, EngineVersionError
from deltachain_sglang import compat, front, ranks


def question(verb: str = "status", *, flush: bool = False) -> str:
    """As a leader asks it."""
    body = {"verb": verb, "arguments": {"turn": "a:1"}, "flush": flush}
    return "deltachain:" + json.dumps(body)


class Scheduler:
    """What of SGLang's is asked whether it may flush, and to."""

    def __init__(self) -> None:
        self._engine_paused = True
        self.grammar_manager = SimpleNamespace(grammar_queue=["compiling"])
        self.running = 0
        self.flushed: list[bool] = []

    def is_fully_idle(self, *, ignore_waiting: bool) -> bool:
        return ignore_waiting and not self.running and not self.grammar_manager.grammar_queue

    def flush_cache(self, *, empty_cache: bool) -> bool:
        done = self.is_fully_idle(ignore_waiting=self._engine_paused)
        if done:
            self.flushed.append(empty_cache)
        return done


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """SGLang's, of one of two ranks; the other one answers as it does."""
    monkeypatch.setenv("DELTACHAIN_SPOOL", str(tmp_path))
    monkeypatch.setattr(
        compat,
        "gather",
        lambda mine: [mine, {**mine, "rank": 1} if isinstance(mine, dict) else mine],
    )
    monkeypatch.setattr(compat, "rank_of", lambda: 0)
    monkeypatch.setattr(compat, "verdicts", lambda text: text)
    forgotten: list[bool] = []
    monkeypatch.setattr(compat, "forget_embeddings", lambda: forgotten.append(True))
    model = nn.Linear(2, 2)
    updater = SimpleNamespace(model_config=None, device="cpu")
    runner = SimpleNamespace(model=model, weight_updater=updater)
    scheduler = Scheduler()
    return SimpleNamespace(
        offload_tags=set(),
        tp_worker=SimpleNamespace(model_runner=runner),
        scheduler=scheduler,
        is_fully_idle=scheduler.is_fully_idle,
        flush_cache=scheduler.flush_cache,
        forgotten=forgotten,
    )


def asked(manager: Any, action: str) -> list[dict[str, Any]]:
    request = SimpleNamespace(action=action)
    found: list[dict[str, Any]] = json.loads(ranks.on_question(mock.Mock(), manager, request))
    return found


def test_a_question_is_answered_for_all_ranks(manager: Any) -> None:
    answers = asked(manager, question())
    assert [answer["rank"] for answer in answers] == [0, 1]
    assert "another leader" in answers[0]["message"]  # nobody has attached


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "1", '{"verb": 1}', '{"verb": "x", "arguments": 3}', '"\\ud800"']
)
def test_no_question_raises(manager: Any, text: str) -> None:
    for answer in asked(manager, f"deltachain:{text}"):
        assert not answer["ok"]


def test_other_checks_are_sglangs_own(manager: Any) -> None:
    original = mock.Mock(return_value="checked")
    request = SimpleNamespace(action="checksum")
    assert ranks.on_question(original, manager, request) == "checked"
    original.assert_called_once_with(manager, request)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What a swap answers."""
    do = mock.Mock(return_value={"ok": True})
    monkeypatch.setattr(ranks, "verbs_of", lambda *_: SimpleNamespace(do=do))
    return do


@pytest.mark.parametrize("flush", [True, False])
def test_a_swap_forgets_what_older_weights_made_of_images(manager: Any, *, flush: bool) -> None:
    asked(manager, question())
    assert not manager.forgotten
    asked(manager, question("swap", flush=flush))
    assert manager.forgotten


def test_caches_go_with_a_swap_and_requests_that_wait_for_a_grammar_stay(
    manager: Any, writes: mock.Mock
) -> None:
    assert all(answer["ok"] for answer in asked(manager, question("swap", flush=True)))
    assert manager.scheduler.flushed == [False]
    assert manager.scheduler.grammar_manager.grammar_queue == ["compiling"]
    asked(manager, question("swap"))
    assert manager.scheduler.flushed == [False], "it was not asked for"
    assert writes.call_count == 2


def test_nothing_is_written_while_a_request_keeps_the_cache(
    manager: Any, writes: mock.Mock
) -> None:
    manager.scheduler.running = 1
    assert asked(manager, question("swap", flush=True)) == [{"ok": False, "busy": True}]
    writes.assert_not_called()


def test_nothing_is_written_while_a_request_keeps_another_ranks_cache(
    manager: Any, writes: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "gather", lambda mine: [mine, False])
    assert asked(manager, question("swap", flush=True)) == [{"ok": False, "busy": True}]
    writes.assert_not_called()


def test_no_rank_flushes_unless_all_have_written(
    manager: Any, writes: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"ok": False, "rank": 1}
    monkeypatch.setattr(
        compat, "gather", lambda mine: [mine, other if isinstance(mine, dict) else mine]
    )
    asked(manager, question("swap", flush=True))
    assert manager.scheduler.flushed == []
    writes.assert_called_once()


def request_of(tokens: int, *events: tuple[str, int], done: bool = False) -> Any:
    """One that a scheduler runs."""
    return SimpleNamespace(
        output_ids=[0] * tokens,
        weight_version_events=[Event(*event) for event in events],
        finished=lambda: done,
    )


class Event(NamedTuple):
    """SGLang's: until which token the version before counts."""

    old_version: str
    num_output_tokens: int


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A scheduler that goes from version 6 to another, with a step that is not handed out yet."""
    module = SimpleNamespace(WeightVersionEvent=Event)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.weight_versions", module)
    monkeypatch.setattr(compat, "named", lambda: "6")

    def rename(*requests: Any, chunked: Any = None, version: str | None = "7") -> None:
        def record(scheduler: Any, new_version: str | None) -> None:
            del scheduler, new_version
            for request in requests:
                if request.output_ids:
                    event = Event("6", len(request.output_ids))
                    request.weight_version_events.append(event)

        queue = [(SimpleNamespace(reqs=list(requests)), None)]
        scheduler = SimpleNamespace(result_queue=queue, chunked_req=chunked)
        ranks.on_name(record, scheduler, version)

    return rename


def test_a_step_that_is_not_handed_out_keeps_its_label(renamed: Callable[..., None]) -> None:
    running, first = request_of(4), request_of(0)
    renamed(running, first)
    assert running.weight_version_events == [("6", 5)]
    assert first.weight_version_events == [("6", 1)], "its prompt was computed by version 6"


def test_what_makes_no_token_gets_no_label(renamed: Callable[..., None]) -> None:
    ended, part = request_of(4, done=True), request_of(0)
    renamed(ended, part, chunked=part)
    assert ended.weight_version_events == [("6", 4)]
    assert part.weight_version_events == []


def test_a_step_between_two_updates_keeps_its_first_label(renamed: Callable[..., None]) -> None:
    waiting = request_of(4, ("5", 5))
    renamed(waiting)
    assert waiting.weight_version_events == [("5", 5), ("6", 5)]


def test_a_name_that_does_not_change_labels_nothing(renamed: Callable[..., None]) -> None:
    running = request_of(0)
    for version in ("6", None):
        renamed(running, version=version)
    assert running.weight_version_events == []


def test_a_paused_scheduler_is_not_taken_for_one_that_hangs() -> None:
    scheduler = SimpleNamespace(cur_batch_for_debug="running")
    original = mock.Mock(return_value="paused")
    assert ranks.on_pause(original, scheduler, "in_place") == "paused"
    assert scheduler.cur_batch_for_debug is None


@pytest.mark.parametrize("path", ["deltachain:x", "deltachain:-1", "deltachain:s3://elsewhere"])
def test_a_path_of_ours_names_a_version_or_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = SimpleNamespace(leader=object(), refusal="", run=mock.AsyncMock())
    app = SimpleNamespace(state=SimpleNamespace(deltachain=control))
    monkeypatch.setattr(compat, "app", lambda: app)
    request = SimpleNamespace(model_path=path)
    done, message, _ = asyncio.run(front.on_update(mock.AsyncMock(), None, request))
    assert not done
    assert "is no version" in message
    control.run.assert_not_called()


def test_a_server_that_follows_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    control = SimpleNamespace(leader=None, refusal="DELTACHAIN_URL is not set")
    app = SimpleNamespace(state=SimpleNamespace(deltachain=control))
    monkeypatch.setattr(compat, "app", lambda: app)
    request = SimpleNamespace(model_path="deltachain:")
    assert asyncio.run(front.on_update(mock.AsyncMock(), None, request)) == (
        False,
        "DELTACHAIN_URL is not set",
        0,
    )


@pytest.mark.parametrize("done", [True, False])
def test_a_checkpoint_that_was_loaded_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    control = SimpleNamespace(leader=object(), run=mock.AsyncMock(side_effect=ApplyError("no")))
    app = SimpleNamespace(state=SimpleNamespace(deltachain=control))
    monkeypatch.setattr(compat, "app", lambda: app)
    original = mock.AsyncMock(return_value=(done, "loaded", 0))
    request = SimpleNamespace(model_path="/elsewhere")
    assert asyncio.run(front.on_update(original, None, request)) == (done, "loaded", 0)
    assert control.run.await_count == int(done)


def test_only_the_leader_asks_the_ranks() -> None:
    original = mock.AsyncMock(return_value="checked")
    done, message, *_ = asyncio.run(
        front.on_check(original, None, SimpleNamespace(action=question()))
    )
    assert (done, message) == (False, "only this server's leader asks that")
    original.assert_not_called()
    assert asyncio.run(front.on_check(original, None, SimpleNamespace(action="checksum")))


@pytest.mark.parametrize(
    ("version", "fine"),
    [
        ("0.5.23", True),
        ("0.5.23.post1", True),
        ("0.5.22", False),
        ("0.5.24", False),
        ("1.0", False),
        ("?", False),
    ],
)
def test_only_tested_versions_are_supported(version: str, fine: bool) -> None:
    with mock.patch.dict("sys.modules", sglang=SimpleNamespace(__version__=version)):
        if fine:
            assert compat.check_version() == version
            return
        with pytest.raises(EngineVersionError, match=r"0\.5\.23 up to, not including, 0\.5\.24"):
            compat.check_version()


def test_pause_modes() -> None:
    assert compat.pause_mode("") == "retract"
    assert compat.pause_mode("in_place") == "in_place"
    with pytest.raises(ConfigError, match="none of retract, in_place, abort"):
        compat.pause_mode("keep")
