"""Twenty versions of real training in a real server: exact after each, and exactly back again."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltachain.cli.pull import pull
from tests.engines.expected import Judge, sharded
from tests.engines.serving import ENGINE, Generated, Server, prompt, start
from tests.engines.trainer import Trained, train

pytestmark = [pytest.mark.engine]
if ENGINE == "vllm":  # the same is tried in its own process, by test_offline
    pytestmark.append(pytest.mark.slow)

VERSIONS = 20
RATE = 1e-2
"""Far more than a real one: tokens must tell a version from the one before."""
PROMPTS = 6
LENGTH = 12


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train("qwen3", tmp_path_factory.mktemp("chain") / "run", VERSIONS, rate=RATE)


@pytest.fixture(scope="module")
def pulled(chain: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("pulled")
    for version in range(VERSIONS + 1):
        pull(chain.url, out=folder / str(version), version=version)
    return {version: folder / str(version) for version in range(VERSIONS + 1)}


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["tp1", "tp2"]
)
def pair(
    request: pytest.FixtureRequest, chain: Trained, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[Pair]":
    folder = tmp_path_factory.mktemp("servers")
    options = {"tp": request.param, "plain": True, "dev": True}
    with (
        start(chain.base, folder / "follower", chain.url, **options) as follower,
        start(chain.base, folder / "other", "", **options) as other,
    ):
        yield Pair(follower, other, request.param)


@dataclass(frozen=True, slots=True)
class Pair:
    """A server that follows the chain, and one that knows nothing of it."""

    follower: Server
    other: Server
    tp: int

    def holds(self, checkpoint: Path) -> bool:
        self.other.load(checkpoint)
        loaded = self.other.checksums()
        cut = {n: self.follower.digest(t) for n, t in sharded(checkpoint, self.tp).items()}
        assert loaded == cut
        return self.follower.checksums() == loaded


def wrong(answers: Sequence[Generated], checkpoint: Path) -> int:
    judge = Judge(checkpoint)
    return sum(len(judge.wrong(a.prompt, a.tokens, range(LENGTH))) for a in answers)


def test_every_version_is_exact_and_so_is_the_way_back(pair: Pair, pulled: dict[int, Path]) -> None:
    engine = pair.follower
    dice = random.Random(3)
    engine.post("rollback", version=0)  # it caught up with the head before it was ready
    engine.post("release")
    asked = [prompt(dice, 20) for _ in range(PROMPTS)]
    told_apart = 0
    for version in range(1, VERSIONS + 1):
        assert engine.update(version)["version"] == version
        assert pair.holds(pulled[version])
        answers = [engine.generate(tokens, LENGTH) for tokens in asked]
        assert {answer.spans for answer in answers} == {((0, LENGTH, str(version)),)}
        assert wrong(answers, pulled[version]) == 0
        told_apart += wrong(answers, pulled[version - 1]) > 0
    assert told_apart >= 0.75 * VERSIONS
    for version in (VERSIONS - 1, VERSIONS - 2, 0):
        assert engine.post("rollback", version=version).json()["version"] == version
        assert pair.holds(pulled[version])
        assert engine.post("scrub").json()["version"] == version
