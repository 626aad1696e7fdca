"""Versions that arrive while a server is busy: nobody notices, and every token is accounted for."""

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.engines.expected import Judge, wrong_steps
from tests.engines.serving import ENGINE, PAUSES, Generated, Seen, Server, clients, prompt, start
from tests.engines.trainer import Trainer

pytestmark = pytest.mark.engine

STALE = "in_place"
"""The mode in which running requests go on with keys and values of older weights."""

CHUNK = "--max-num-batched-tokens" if ENGINE == "vllm" else "--chunked-prefill-size"
"""Option of the most tokens of a prompt that are computed at a time."""

GOES_ON = ("keep", "retract", STALE)
"""Modes in which requests that were running go on with the next version."""

LATENT = "deepseek_v3_wide"

EXPERTS = ("qwen3_moe", LATENT) if ENGINE == "vllm" else ("qwen3_moe",)
"""Families with experts that the stock engine serves on a CPU without AMX."""

LENGTH = 64

FRESH = (4, 24)

MOST_ROUNDS = 10


LOST = import_module(f"deltachain_{ENGINE}.table").TABLE.lacks() if ENGINE else {}
LABELS = not any(row.does.startswith("labels") for row in LOST)
"""Whether answers tell the versions of their tokens: those of vLLM 0.31 and earlier do not."""


class Trial:
    def __init__(self, trainer: Trainer, server: Server, *, push: bool) -> None:
        self.trainer, self.server, self.push = trainer, server, push
        self.judge = cache(lambda version: Judge(trainer.pulled(version, near=True)))
        self.applied = 0
        self.fresh: list[tuple[int, Generated]] = []
        self._dice = random.Random(99)
        self._pool = ThreadPoolExecutor(FRESH[0])

    def version(self) -> None:
        version = self.trainer.step()
        if self.push:
            self.server.update(version)
        else:
            self.server.wait_for(lambda status: status["version"] == version)
        self.applied = version
        for _ in range(MOST_ROUNDS):
            prompts = [prompt(self._dice) for _ in range(FRESH[0])]
            answers = list(self._pool.map(lambda p: self.ask(p, FRESH[1]), prompts))
            self.fresh += [(version, answer) for answer in answers]
            # The version before would have gone on otherwise: the judge could find this one wrong.
            if any(self.wrong(answer, version - 1) for answer in answers):
                return
        pytest.fail(f"versions {version - 1} and {version} go on alike with every prompt")

    def ask(self, prompt: list[int], length: int) -> Generated:
        """Generate by the version that was applied last."""
        answer = self.server.generate(prompt, length)
        if LABELS:
            return answer
        assert answer.spans == ()
        return replace(answer, spans=((0, len(answer.tokens), str(self.applied)),))

    def receipts(self) -> list[int]:
        found = re.findall(r"\] deltachain: version (\d+) \(from \S+\).* nnz", self.server.log())
        return [int(version) for version in found]

    def wrong(self, answer: Generated, version: int | None = None) -> int:
        return sum(
            len(
                self.judge(int(label) if version is None else version).wrong(
                    answer.prompt, answer.tokens, range(start, end)
                )
            )
            for start, end, label in answer.spans
        )

    def explain(self, answer: Generated) -> str:
        lines = [str(answer)]
        for first, end, label in answer.spans:
            around = range(max(0, int(label) - 1), min(int(label) + 1, self.trainer.head) + 1)
            for version in around:
                gap, margin = self.judge(version).gaps(answer.prompt, answer.tokens)
                far = {at: round(float(gap[at]), 3) for at in range(first, end) if gap[at] > margin}
                lines.append(f"labelled {label}, by {version}: tolerance {margin:.3f}, {far}")
        return "\n".join(lines)

    def check_fresh(self) -> None:
        """Every version went on with new prompts as it alone does."""
        assert {version for version, _ in self.fresh} == set(range(1, self.trainer.head + 1))
        for version, answer in self.fresh:
            assert answer.spans == ((0, FRESH[1], str(version)),)
            assert self.wrong(answer) == 0, self.explain(answer)

    def check_labels(self, seen: Seen, *, stale: bool) -> None:
        """Labels have no gap, never go back, and name what was held; tokens are the version's."""
        receipts = [0, *self.receipts()]
        assert receipts == sorted(set(receipts))
        if not LABELS:
            assert {answer.spans for _, answer in seen.generated} == {()}
            return
        for known, answer in seen.generated:
            starts = [start for start, _, _ in answer.spans]
            ends = [end for _, end, _ in answer.spans]
            assert [*starts, len(answer.tokens)] == [0, *ends]
            versions = [int(version) for _, _, version in answer.spans]
            assert versions == sorted(set(versions))
            assert set(versions) <= set(receipts)
            assert all(version >= known for version in versions)
            if stale:
                found = wrong_steps(self.judge, answer.prompt, answer.tokens, answer.spans)
                assert found == [], answer
            else:
                assert self.wrong(answer) == 0, self.explain(answer)


def checked(
    trial: Trial, versions: int, *, finish: set[str], stale: bool = False, streams: int = 8
) -> Seen:
    with clients(
        trial.server, streams=streams, labelled=2, length=LENGTH, applied=lambda: trial.applied
    ) as seen:
        for _ in range(versions):
            trial.version()
    assert seen.failures == [], seen.failures[:3]
    assert {reason for _, reason in seen.finished} == finish
    assert all(count == LENGTH for count, reason in seen.finished if reason == "length")
    assert {answer.finish for _, answer in seen.generated} <= finish
    assert trial.receipts() == list(range(1, trial.trainer.head + 1))
    trial.check_fresh()
    trial.check_labels(seen, stale=stale)
    return seen


@pytest.mark.parametrize("pause", [*PAUSES[:1], STALE])
def test_versions_arrive_under_load_and_no_prefix_outlives_one(
    trainer: Trainer, tmp_path: Path, pause: str
) -> None:
    environment = {"DELTACHAIN_PAUSE": pause}
    with start(trainer.base, tmp_path / "server", trainer.url, environment=environment) as server:
        trial = Trial(trainer, server, push=True)
        checked(trial, 4, finish={"length"}, stale=pause == STALE)
        assert wrong_after_an_update(trial) == 0


def test_versions_arrive_under_load_of_several_engines(trainer: Trainer, tmp_path: Path) -> None:
    with start(trainer.base, tmp_path / "server", trainer.url, dp=2) as server:
        checked(Trial(trainer, server, push=True), 4, finish={"length"})


def _statuses(server: Server, answer: Future[Generated]) -> Iterator[dict[str, Any]]:
    """All that were taken before the answer came."""
    while not answer.done():
        status = server.status()
        if not answer.done():
            yield status
        time.sleep(0.1)


@pytest.mark.skipif(not LABELS, reason="this engine labels no tokens")
def test_answers_and_status_name_the_oldest_version_whose_caches_they_read(
    trainer: Trainer, tmp_path: Path
) -> None:
    environment, long = {"DELTACHAIN_PAUSE": STALE}, 480
    with (
        start(
            trainer.base,
            tmp_path / "server",
            trainer.url,
            environment=environment,
            arguments=(CHUNK, "16"),
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        trial, dice = Trial(trainer, server, push=True), random.Random(5)

        def across(asked: list[int], length: int, wait_s: float) -> tuple[int, Future[Generated]]:
            version = trainer.step()
            assert server.post("stage", version=version).status_code == 200
            answer = pool.submit(server.generate, asked, length)
            time.sleep(wait_s)
            server.update(version)
            return version, answer

        began = time.monotonic()
        server.generate(prompt(dice, long), 1)
        took_s, in_prompts = time.monotonic() - began, 0
        wait_s = took_s / 2
        for _ in range(3 * MOST_ROUNDS):
            before = server.restarts()
            version, found = across(prompt(dice, long), 24, wait_s)
            answer = found.result()
            is_new = answer.spans[0][2] == str(version)  # it read nothing older
            assert not is_new or trial.wrong(answer) == 0, trial.explain(answer)
            is_inside = answer.spans[0][:2] == (0, 0) or server.restarts() > before
            in_prompts += is_inside
            if not is_inside:  # the swap came before the prompt, or after it
                wait_s *= 1.3 if is_new else 0.75
            elif in_prompts == 3:
                break
        assert in_prompts

        for _ in range(MOST_ROUNDS):
            version, found = across(prompt(dice), long, took_s / 5)
            seen = list(_statuses(server, found))
            served = [label for *_, label in found.result().spans]
            if seen and served == [str(version - 1), str(version)]:  # the swap came inside it
                break
        assert seen
        assert served == [str(version - 1), str(version)]
        # The leader looks every five seconds: it may name an older one, never a newer one.
        assert all(status["oldest"] < status["version"] == version for status in seen)
        server.wait_for(lambda status: status["oldest"] == version)


@pytest.mark.slow
@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("push", [True, False], ids=["push", "follow"])
def test_thirty_versions_arrive_under_load(
    trainer: Trainer, tmp_path: Path, pause: str, push: bool
) -> None:
    environment = {
        "DELTACHAIN_PAUSE": pause,
        "DELTACHAIN_FOLLOW": str(int(not push)),
        "DELTACHAIN_POLL_S": "0.1",
    }
    with start(
        trainer.base,
        tmp_path / "server",
        trainer.url,
        environment=environment,
        requests=16,
    ) as server:
        trial = Trial(trainer, server, push=push)
        finish = {"length", "abort"} if pause == "abort" else {"length"}
        seen = checked(trial, 30, finish=finish, stale=pause == STALE)
        assert wrong_after_an_update(trial) == 0
    if pause in GOES_ON:  # requests were running when weights changed, and went on
        assert any(len(answer.spans) > 1 for _, answer in seen.generated)
    else:
        assert all(len(answer.spans) == 1 for _, answer in seen.generated)


def of_experts(folder: Path, family: str, tp: int, versions: int) -> None:
    with (
        # Late in a training, versions that are one step apart go on alike.
        Trainer(folder, family=family, steps=4) as trainer,
        start(trainer.base, folder / "server", trainer.url, tp=tp, requests=16) as server,
    ):
        assert "refused" not in server.status()["classes"]
        trial = Trial(trainer, server, push=True)
        seen = checked(trial, versions, finish={"length"})
    assert not LABELS or any(len(answer.spans) > 1 for _, answer in seen.generated)


def test_versions_of_experts_arrive_under_load(tmp_path: Path) -> None:
    of_experts(tmp_path, "qwen3_moe", 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", EXPERTS)
def test_thirty_versions_of_experts_arrive_under_load(family: str, tp: int, tmp_path: Path) -> None:
    of_experts(tmp_path, family, tp, 30)


@pytest.mark.slow
def test_a_cache_without_salts_serves_stale_prefixes_and_the_test_of_them_sees_it(
    trainer: Trainer, tmp_path: Path
) -> None:
    with start(
        trainer.base,
        tmp_path / "server",
        trainer.url,
        environment={"DELTACHAIN_PAUSE": STALE},
        first=Path(__file__).with_name("unsalted"),
    ) as server:
        assert wrong_after_an_update(Trial(trainer, server, push=True)) > 0


def wrong_after_an_update(trial: Trial) -> int:
    dice = random.Random(7)
    prompts = [prompt(dice, 400) for _ in range(4)]
    for asked in prompts:
        trial.server.generate(asked, 32)
    trial.applied = trial.trainer.step()
    trial.server.update(trial.applied)
    return sum(trial.wrong(trial.ask(asked, 32)) for asked in prompts)
