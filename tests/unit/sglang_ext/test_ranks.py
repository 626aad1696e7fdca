"""The SGLang side without SGLang: what schedulers answer, and what the server lets through."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn

from deltachain.errors import ConfigError, EngineVersionError
from deltachain_sglang import compat, front, ranks

QUESTION = "deltachain:" + json.dumps({"verb": "status", "arguments": {"turn": "a:1"}})


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """SGLang's, of one of two ranks; the other one answers as it does."""
    monkeypatch.setenv("DELTACHAIN_SPOOL", str(tmp_path))
    monkeypatch.setattr(compat, "gather", lambda mine: [mine, {**mine, "rank": 1}])
    monkeypatch.setattr(compat, "rank_of", lambda: 0)
    monkeypatch.setattr(compat, "verdicts", lambda text: text)
    model = nn.Linear(2, 2)
    updater = SimpleNamespace(get_model=lambda: model, model_config=None, device="cpu")
    runner = SimpleNamespace(model=model, weight_updater=updater)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


def asked(manager: Any, action: str) -> list[dict[str, Any]]:
    request = SimpleNamespace(action=action)
    found: list[dict[str, Any]] = json.loads(ranks.on_question(mock.Mock(), manager, request))
    return found


def test_a_question_is_answered_for_all_ranks(manager: Any) -> None:
    answers = asked(manager, QUESTION)
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


def test_an_update_succeeds_only_if_every_rank_has_written(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = manager.tp_worker.model_runner.weight_updater
    for others, expected in (({"ok": True}, True), ({"ok": False}, False)):
        monkeypatch.setattr(compat, "gather", lambda _, o=others: [{"ok": True}, o])
        done, text = ranks.on_update(mock.Mock(), updater, QUESTION, "auto")
        assert done is expected
        assert len(json.loads(text)) == 2


def test_other_updates_are_sglangs_own(manager: Any) -> None:
    updater = manager.tp_worker.model_runner.weight_updater
    original = mock.Mock(return_value=(True, "loaded"))
    assert ranks.on_update(original, updater, "/a/path", "auto", recapture=True)[1] == "loaded"
    original.assert_called_once_with(updater, "/a/path", "auto", recapture=True)


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


def test_only_the_leader_asks_the_ranks() -> None:
    original = mock.AsyncMock(return_value="checked")
    done, message, *_ = asyncio.run(
        front.on_check(original, None, SimpleNamespace(action=QUESTION))
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
