"""What a rank answers: whatever it is asked, it never raises."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from deltachain import errors
from deltachain.checkpoint import Checkpoint
from deltachain.errors import (
    ApplyError,
    ConfigError,
    EngineDamagedError,
    EngineVersionError,
    PartialApplyError,
    PoisonedError,
    TensorMismatchError,
)
from deltachain.replica.engine import EngineModel
from deltachain.replica.rpc import REMEMBERED, VERBS, RankVerbs, error_of, raise_refusal
from deltachain.testing.engine import FakeModel
from deltachain.testing.sharding import Sharding, save, trained

URL = "s3://bucket/run"


@pytest.fixture
def model(tmp_path: Path) -> FakeModel:
    shape = Sharding(layers=1)
    return FakeModel(shape, 0, save(trained(shape), tmp_path / "model"))


@pytest.fixture
def bare(model: FakeModel, tmp_path: Path) -> RankVerbs:
    """A rank that nobody has attached yet."""
    return RankVerbs(lambda: model, 0, tmp_path / "spool", URL)


@pytest.fixture
def rank(bare: RankVerbs, model: FakeModel) -> RankVerbs:
    """A rank that is attached, and agreed with itself."""
    specs = [[s.name, s.dtype, list(s.shape)] for s in Checkpoint(model.checkpoint).specs.values()]
    found = bare.do("attach", {"url": URL, "specs": specs, "aliases": {}})
    assert found["ok"], found
    json.dumps(found)
    classes = {name: one["kind"] for name, one in found["tensors"].items()}
    labels = {name: ["0"] * len(one["windows"]) for name, one in found["tensors"].items()}
    assert bare.do("agree", {"classes": classes, "holders": [labels]}) == {"ok": True, "rank": 0}
    return bare


def settled(rank: RankVerbs, ticket: int) -> dict[str, Any]:
    """What a rank answers in the end."""
    for _ in range(1000):
        verdict = rank.do("poll", {"ticket": ticket})
        if verdict.get("done") or not verdict["ok"]:
            return verdict
        time.sleep(0.005)
    raise AssertionError("it is never done")


@pytest.mark.parametrize("verb", ["", "no such", "_swap", "do", "__init__", "rank", "Attach"])
def test_only_verbs_are_done(rank: RankVerbs, verb: str) -> None:
    verdict = rank.do(verb, {})
    assert verdict == {
        "ok": False,
        "rank": 0,
        "error": "ConfigError",
        "message": f"no verb {verb!r}",
    }


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"attach", "poll", "verdict"}))
def test_nothing_is_done_before_it_is_attached(bare: RankVerbs, verb: str) -> None:
    arguments: dict[str, Any] = {
        "agree": {"classes": {}, "holders": [{}]},
        "unused": {"names": []},
        "unused_state": {"names": []},
        "check": {},
        "state": {"ticket": 1},
        "stage": {"ticket": 1, "spool": "a", "budget": 0, "keep": []},
        "swap": {"ticket": 1, "version": 1, "back": False},
        "status": {},
    }
    verdict = bare.do(verb, arguments[verb])
    assert not verdict["ok"]
    assert verdict["message"] == "rank 0 is not attached"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("arguments", [{"what": 1}, {"ticket": "x"}, {"ticket": None, "keep": 3}])
def test_wrong_arguments_are_answered(
    rank: RankVerbs, verb: str, arguments: dict[str, Any]
) -> None:
    verdict = rank.do(verb, arguments)
    json.dumps(verdict)
    if verb not in ("state", "poll"):
        assert verdict["ok"] is False
        assert (verdict["rank"], verdict["error"]) == (0, "ApplyError")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a/", ".hidden", "./a"])
def test_plans_are_read_from_the_one_folder_alone(rank: RankVerbs, name: str) -> None:
    verdict = rank.do("stage", {"ticket": 1, "spool": name, "budget": 0, "keep": []})
    assert not verdict["ok"]
    assert verdict["error"] == "ConfigError"
    assert verdict["message"] == f"{name!r} is not a spool"


@pytest.mark.parametrize("name", ["gone", "nul\0", "x" * 300, "~", "*"])
def test_a_spool_that_is_not_there_is_answered_when_asked(rank: RankVerbs, name: str) -> None:
    assert rank.do("stage", {"ticket": 1, "spool": name, "budget": 0, "keep": []})["ok"]
    verdict = settled(rank, 1)
    assert verdict["done"]
    assert (verdict["ok"], verdict["error"]) == (False, "ApplyError")


@pytest.mark.parametrize("index", [b"", b"{", b"[]", b'{"from_nothing":1,"tensors":[]}'])
def test_a_spool_that_is_none_is_answered_when_asked(
    rank: RankVerbs, tmp_path: Path, index: bytes
) -> None:
    folder = tmp_path / "spool" / "a"
    folder.mkdir(parents=True)
    (folder / "index.json").write_bytes(index)
    (folder / "data").write_bytes(b"")
    assert rank.do("stage", {"ticket": 1, "spool": "a", "budget": 0, "keep": []})["ok"]
    assert not settled(rank, 1)["ok"]


def test_another_chain_is_refused(bare: RankVerbs) -> None:
    verdict = bare.do("attach", {"url": "s3://bucket/other", "specs": [], "aliases": {}})
    assert verdict["error"] == "ConfigError"
    assert f"follow {URL}, not s3://bucket/other" in verdict["message"]


def test_a_ticket_that_nobody_began_is_answered(rank: RankVerbs) -> None:
    verdict = rank.do("poll", {"ticket": 7})
    assert (verdict["ok"], verdict["error"]) == (False, "ApplyError")
    assert verdict["message"] == "rank 0 knows nothing of ticket 7"


def test_answers_are_remembered_for_a_while(rank: RankVerbs) -> None:
    for ticket in range(1, REMEMBERED + 3):
        rank.do("state", {"ticket": ticket})
        assert settled(rank, ticket)["ok"]
    assert not rank.do("poll", {"ticket": 1})["ok"]
    again = [rank.do("poll", {"ticket": REMEMBERED}) for _ in range(2)]
    assert again[0] == again[1]
    assert again[0]["done"]


def test_a_swap_of_nothing_writes_nothing_and_is_told_once(
    rank: RankVerbs, model: FakeModel
) -> None:
    before = {name: tensor.clone() for name, tensor in model.tensors().items()}
    verdict = rank.do("swap", {"ticket": 3, "version": 9, "back": False})
    assert verdict["error"] == "PartialApplyError"
    assert all((tensor == before[name]).all() for name, tensor in model.tensors().items())
    told = [rank.do("verdict", {}) for _ in range(2)]
    assert told[0] == verdict
    assert told[1] == {"ok": False, "rank": 0, "error": "ApplyError", "message": "no swap"}


class Strange(Exception):  # noqa: N818
    """Has no words, and is of nobody's tree."""


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (Strange(), "ApplyError", "Strange: "),
        (ZeroDivisionError("by zero"), "ApplyError", "ZeroDivisionError: by zero"),
        (MemoryError(), "ApplyError", "MemoryError: "),
        (EngineVersionError("vllm 9"), "EngineVersionError", "vllm 9"),
        (PoisonedError("gone", hint="heal it"), "PoisonedError", "gone"),
    ],
)
def test_whatever_an_engine_raises_is_a_verdict(
    tmp_path: Path, raised: Exception, error: str, message: str
) -> None:
    def fail() -> EngineModel:
        raise raised

    rank = RankVerbs(fail, 2, tmp_path, "")
    verdict = rank.do("attach", {"url": URL, "specs": [], "aliases": {}})
    hint = {"hint": raised.hint} if isinstance(raised, PoisonedError) else {}
    assert verdict == {"ok": False, "rank": 2, "error": error, "message": message} | hint


def test_status_says_what_is_held(rank: RankVerbs) -> None:
    status = rank.do("status", {})
    assert (status["ok"], status["version"], status["staged"]) == (True, None, 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("PartialApplyError", PartialApplyError),
        ("PoisonedError", PoisonedError),
        ("ConfigError", ConfigError),
        ("EngineVersionError", EngineVersionError),
        ("KeyError", ApplyError),
        ("TypeVar", ApplyError),
        ("Any", ApplyError),
        ("", ApplyError),
        (None, ApplyError),
    ],
)
def test_a_refusal_becomes_the_error_that_it_stands_for(
    kind: str | None, expected: type[Exception]
) -> None:
    error = error_of({"ok": False, "rank": 3, "error": kind, "message": "no"}, version=5)
    assert type(error) is expected
    assert error.args == ("rank 3: no",)
    if isinstance(error, ApplyError):
        assert error.version == 5


def of_every_kind() -> list[str]:
    return [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.DeltaChainError)
    ]


@pytest.mark.parametrize("kind", of_every_kind())
def test_every_error_of_the_tree_can_be_told(kind: str) -> None:
    error = error_of({"ok": False, "rank": 0, "error": kind, "message": "no"})
    assert isinstance(error, errors.DeltaChainError)


def test_a_damaged_rank_speaks_before_others() -> None:
    kinds = ["TensorMismatchError", "EngineDamagedError", "PoisonedError"]
    refusals = [
        {"ok": False, "rank": rank, "error": kind, "message": "no"}
        for rank, kind in enumerate(kinds, 1)
    ]
    with pytest.raises(EngineDamagedError, match="rank 2"):
        raise_refusal([{"ok": True, "rank": 0}, *refusals])
    with pytest.raises(TensorMismatchError, match="rank 1"):
        raise_refusal([refusals[0], refusals[2]])
    raise_refusal([{"ok": True, "rank": 0}])


def test_only_the_leader_that_attached_last_is_obeyed(rank: RankVerbs, model: FakeModel) -> None:
    specs = [[s.name, s.dtype, list(s.shape)] for s in Checkpoint(model.checkpoint).specs.values()]
    asked = {"url": URL, "specs": specs, "aliases": {}}
    assert rank.do("attach", {**asked, "turn": "one:1"})["ok"]
    assert rank.do("attach", {**asked, "turn": "two:1"})["ok"]
    for verb in sorted(set(VERBS) - {"attach"}):
        refused = rank.do(verb, {"turn": "one:2"})
        assert (refused["ok"], refused["error"]) == (False, "LeaderReplacedError"), verb
        assert "another leader has attached this rank since" in refused["message"]
        assert refused["turn"] == "one:2"
    assert rank.do("status", {"turn": "two:2"})["ok"]
