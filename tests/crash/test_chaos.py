"""The parts of chaos that decide, and three minutes of it: `make chaos` runs for two hours."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from tests.crash.chaos.load import Record, unjudged
from tests.crash.chaos.report import Diary, totals_of
from tests.crash.chaos.scene import KINDS, ROOT
from tests.crash.chaos.trainer import BEGIN, SESSION, file_of, keep
from tests.engines.trainer import (
    RATE,
    make_batches,
    masters_of,
    one_thread,
    optimizer_steps,
    pretrain,
)
from tests.small_disk import may_mount, run_on_small_disk

pytestmark = pytest.mark.full

PROMPT = [5, 6, 7, 8]
LENGTH = 48


def test_no_process_outlives_a_run_that_was_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = ["sh", "-c", f"exec 3> '{fifo}'; echo begun >&3; sleep 600 & wait"]
    code = (
        "import subprocess\n"
        "from tests.crash.chaos.scene import leash\n"
        f"with leash({str(tmp_path)!r}):\n"
        f"    subprocess.Popen({child!r}, start_new_session=True).wait()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as run, fifo.open() as end:
        assert end.readline() == "begun\n"
        run.kill()
        assert select.select([end], [], [], 60)[0], "a process is left that could write"
        assert end.read() == ""


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Diary]:
    diary = Diary(tmp_path / "diary.jsonl")

    def note(*events: tuple[float, str, dict[str, object]]) -> Diary:
        for when, event, facts in events:
            monkeypatch.setattr("tests.crash.chaos.report.time.time", lambda when=when: when)
            diary.note(event, **facts)
        return diary

    return note


FILLED = """
import sys, time
from pathlib import Path
from tests.crash.chaos.scene import LOOK_S, Filler

disk = Path(sys.argv[1])
spool = bytes(1 << 17)
(disk / "spool").write_bytes(spool)
filler = Filler(lambda: disk)
assert filler.begin()
(disk / "spool").unlink()
wanted = time.monotonic() + 60
while (disk / "filler").stat().st_size <= len(spool) and time.monotonic() < wanted:
    time.sleep(LOOK_S)
try:
    (disk / "spool").write_bytes(spool)
except OSError as error:
    print(error.errno)
filler.end()
(disk / "spool").write_bytes(spool)
"""


@pytest.mark.skipif(not may_mount(), reason="nothing can be mounted here")
def test_a_full_disk_stays_full_when_an_engine_deletes_its_files(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done = run_on_small_disk("tmpfs", disk, 1 << 18, FILLED, disk)
    assert (done.returncode, done.stdout.split()) == (0, [str(errno.ENOSPC)]), done.stderr


def test_a_request_may_be_refused_during_an_accident_only(noted: Callable[..., Diary]) -> None:
    refused = {"engine": "vllm", "why": "it is gone"}
    diary = noted(
        (100.0, "refused", {**refused, "asked": 99.0}),
        (110.0, "accident", {"kind": "kill engine"}),
        (111.0, "refused", {**refused, "asked": 109.0}),
        (120.0, "recovered", {"seconds": 9.0}),
        (130.0, "refused", {**refused, "asked": 129.0}),
    )
    found = totals_of(diary)
    assert found.refused == 1
    assert [when for when, _ in found.failures] == [100.0, 130.0]


ANSWER = {"engine": "vllm", "tokens": [1, 2], "spans": [[0, 2, "3"]]}
EXPLAINED = {"engine": "vllm", "unexplained": "", "told_apart": None}


def test_versions_go_back_during_a_rollback_only(noted: Callable[..., Diary]) -> None:
    answer = {**ANSWER, "spans": [[0, 1, "4"], [1, 2, "3"]]}
    diary = noted(
        (100.0, "answer", {**answer, "asked": 98.0, "answered": 99.0}),
        (101.0, "verdict", EXPLAINED),
        (110.0, "accident", {"kind": "roll back"}),
        (112.0, "answer", {**answer, "asked": 111.0, "answered": 112.0}),
        (120.0, "recovered", {"seconds": 9.0}),
        (130.0, "verdict", EXPLAINED),
    )
    assert [when for when, _ in totals_of(diary).failures] == [99.0]


def test_an_answer_without_a_verdict_is_a_failure_until_another_run_judges_it(
    noted: Callable[..., Diary],
) -> None:
    diary = noted(
        (1.0, "answer", {**ANSWER, "name": "a"}),
        (2.0, "answer", {**ANSWER, "name": "b"}),
        (3.0, "verdict", {**EXPLAINED, "name": "a"}),
    )
    assert totals_of(diary).failures == [(2.0, "1 answers were not computed anew")]
    assert [one["name"] for one in unjudged(diary)] == ["b"]
    noted((4.0, "verdict", {**EXPLAINED, "name": "b"}))
    assert (totals_of(diary).failures, unjudged(diary)) == ([], [])


def greedy(model: PreTrainedModel) -> list[int]:
    with torch.no_grad():
        generate: Any = model.bfloat16().generate
        given = torch.tensor([PROMPT])
        found = generate(given, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1)
    return [int(token) for token in found[0, len(PROMPT) :]]


@dataclass(frozen=True, slots=True)
class Published:
    record: Record
    answers: list[list[int]]
    taken_over: int
    head: int

    def why(self, answer: int, *spans: tuple[int, int, str]) -> str:
        tokens = self.answers[answer]
        return self.record.judge(PROMPT, tokens, spans, thorough=False).unexplained


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("published")
    base, weights, url = folder / "base", folder / "weights", str(folder / "chain")
    weights.mkdir()
    answers = []
    with one_thread(), torch.enable_grad():
        pretrain("qwen3", base, make_batches(0), 0)
        model = masters_of(base)
        steps = optimizer_steps(model, make_batches(1), RATE)
        for session, first in (("one", 100), ("two", 200)):
            keep(model, weights, file_of(session, BEGIN))
            answers.append(greedy(masters_of_bits(base, model)))
            config = PublishConfig(url=url, when_busy="wait", metadata={SESSION: session})
            with Publisher(config).attach(model) as publisher:
                begun = publisher.version
                for step in range(first, first + 2):
                    next(steps)
                    keep(model, weights, file_of(session, step))
                    head = publisher.publish(step=step).result().version
                    answers.append(greedy(masters_of_bits(base, model)))
            next(steps)  # was lost with the process that had not published it yet
    record = Record(open_store(url), base, weights, Event())
    return Published(record, answers, begun, head)


def test_a_record_explains_tokens_of_the_version_they_name_alone(published: Published) -> None:
    why = published.why
    assert [why(version, (0, LENGTH, str(version))) for version in range(3)] == [""] * 3
    others = [why(a, (0, LENGTH, str(b))) for a in range(3) for b in range(3) if a != b]
    assert sum("are not those of version" in found for found in others) > len(others) // 2
    beyond = published.head + 1
    assert why(2, (0, LENGTH, str(beyond))) == f"version {beyond} was never committed"
    assert why(2, (0, LENGTH, "default")) == "versions are ['default']"
    assert why(2, (0, LENGTH - 1, "2")) == "not every token has a version"


def test_a_record_knows_the_versions_of_a_process_that_took_over(published: Published) -> None:
    assert 2 < published.taken_over <= published.head - 2
    for version in range(3, published.taken_over):  # without changes
        assert published.why(2, (0, LENGTH, str(version))) == ""
    ours = range(published.taken_over, published.head + 1)
    assert [published.why(3 + n, (0, LENGTH, str(v))) for n, v in enumerate(ours)] == [""] * 3


def masters_of_bits(base: Path, model: PreTrainedModel) -> PreTrainedModel:
    found = masters_of(base)
    found.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    not all((ROOT / f".venv-{kind}/bin/python").exists() for kind in KINDS),
    reason="needs both engines: make venv-vllm venv-sglang",
)
def test_three_minutes_of_chaos_leave_nothing_unexplained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.chaos", "--minutes", "3", "--seed", "7"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 failures\n")
