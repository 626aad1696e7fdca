"""Nothing hostile gets past a follower: a typed error, soon, in little memory, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
from filelock import FileLock

from deltachain.errors import DeltaChainError, SignatureError
from tests.hostile.corpus import CORPUS
from tests.hostile.follow_cases import CONTROL, KEEPS, KINDS, SIGNED_KINDS
from tests.hostile.scene import ORDERED, SCENES, Case, Category, Level

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0

Outcomes = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What became of every case: all of them met one process, with its memory bounded.

    Processes that share the tests share its answers too.
    """
    return _outcomes(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def signed_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _outcomes(tmp_path_factory.getbasetemp(), "signed")


def _outcomes(folder: Path, *args: str) -> Outcomes:
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    answers = shared / "-".join(["hostile", *args, "answers.jsonl"])
    with FileLock(answers.with_suffix(".lock")):
        if not answers.exists():
            answers.write_text(_present(*args), encoding="utf-8")
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    found = {(line["id"], line["kind"]): line for line in lines}
    assert len(lines) == len(KINDS) * (len(CORPUS) + len(SCENES))
    return found


def _present(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.follow_cases", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_gets_to_the_head_of_a_sound_chain(
    outcomes: Outcomes, scene: str, kind: str
) -> None:
    found = outcomes[f"{CONTROL}: {scene}", kind]
    assert found["error"] == "", found["message"]
    assert found["reached"]
    assert not found["untouched"]
    assert found["held"] == found["remembered"] != 0


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.id)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_object_is_refused_and_nothing_is_written(
    outcomes: Outcomes, case: Case, kind: str
) -> None:
    found = outcomes[case.id, kind]
    assert found["seconds"] < SECONDS
    assert found["stored"]
    if case.error is None:
        assert (found["error"], found["reached"]) == ("", True), found["message"]
        return
    assert found["error"] == case.error.__name__, found["message"]
    assert found["key"] == case.at
    assert found["untouched"]
    assert found["remembered"] == 0
    assert found["held"] == (None if case.poisons or case.opens else 0)


@pytest.mark.parametrize("scene", SCENES)
def test_a_follower_with_trusted_keys_gets_to_the_head_of_a_signed_chain(
    signed_outcomes: Outcomes, scene: str
) -> None:
    for kind in SIGNED_KINDS:
        found = signed_outcomes[f"{CONTROL}: {scene}", kind]
        assert (found["error"], found["reached"]) == ("", True), found["message"]


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.id)
@pytest.mark.parametrize("kind", SIGNED_KINDS)
def test_a_follower_with_trusted_keys_takes_the_signed_bits_or_nothing(
    signed_outcomes: Outcomes, case: Case, kind: str
) -> None:
    found = signed_outcomes[case.id, kind]
    assert found["seconds"] < SECONDS
    assert found["stored"]
    if found["error"] == "":
        assert case.error is None
        assert found["reached"]
        return
    assert found["error"] in {SignatureError.__name__, *names_of(case.error)}, found["message"]
    assert found["untouched"]
    assert found["remembered"] == 0
    assert found["held"] in ({None} if case.opens else {None, 0} if case.poisons else {0})


def names_of(error: type[DeltaChainError] | None) -> set[str]:
    return set() if error is None else {error.__name__}


def test_signatures_are_what_refuses_most_forged_documents(signed_outcomes: Outcomes) -> None:
    refused = Counter(
        case.level
        for case in CORPUS
        if signed_outcomes[case.id, KEEPS]["error"] == SignatureError.__name__
    )
    assert set(refused) == {"part", "record", "table", "manifest", "chain"}
    assert refused.total() > 300


def test_the_corpus_has_every_category_at_every_level() -> None:
    count = Counter((case.level, case.category) for case in CORPUS)
    wanted = {
        (level, category)
        for level in get_args(Level)
        for category in get_args(Category)
        if category != "unsorted" or level in ORDERED
    }
    assert wanted - count.keys() == set()
    assert len({case.id for case in CORPUS}) == len(CORPUS) > 300
    refused = Counter(case.level for case in CORPUS if case.error is not None)
    assert min(refused[level] for level in ("part", "manifest", "record", "table", "chain")) > 30
