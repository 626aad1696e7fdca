"""Maintainers that are killed at any moment, beside a publisher, followers and newcomers.

Whatever happens, a reader ends with proven bits or plans again, every kept version is reachable,
and what a round deletes is what it said.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain, is_reachable
from deltachain.errors import BrokenChainError, ChainError, DeltaChainError
from deltachain.format.keys import manifest_key
from deltachain.maintain import Maintainer
from deltachain.maintain.survey import Survey
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from deltachain.verify import verify
from tests.crash.child import GRACE_S, KEPT, Place, maintain_for_ever, maintainer_of, publish_until
from tests.crash.conftest import PROCESSES
from tests.support.models import TinyModel, tensors_of

pytestmark = pytest.mark.full

KILLS = {"file": 100, "s3": 100, "hf": 100}
VERSIONS = 5 * KEPT
FOLLOWERS = 4


class Reader(Thread):
    def __init__(self, url: str, *, joins: bool) -> None:
        super().__init__(daemon=True)
        self.url, self.joins = url, joins
        self.done, self.errors, self.versions = Event(), list[BaseException](), list[int]()

    def run(self) -> None:
        try:
            self._join() if self.joins else self._follow()
        except Exception as error:  # noqa: BLE001 - the test looks at all
            self.errors.append(error)

    def _follow(self) -> None:
        with closing(self._subscriber()) as subscriber:

            def looked(error: DeltaChainError | None) -> None:
                if error is not None:
                    self.errors.append(error)

            for receipt in subscriber.follow(stop=self.done, looked=looked):
                self.versions.append(receipt.version)
            while (last := subscriber.update()) is not None:
                self.versions.append(last.version)

    def _join(self) -> None:
        while not self.done.wait(1.0):
            with closing(self._subscriber()) as subscriber:
                receipt = subscriber.update()
                assert receipt is not None
                self.versions.append(receipt.version)

    def _subscriber(self) -> Subscriber:
        return Subscriber(self.url, tensors_of(TinyModel(seed=9)))


@contextmanager
def publishing(url: str, folder: Path, pause_s: float = 0.02) -> Iterator[Callable[[], None]]:
    stop, printed = folder / "stop", folder / "publisher"
    arguments = (url, stop, dict(os.environ), printed, pause_s)
    process = PROCESSES.Process(target=publish_until, args=arguments)
    process.start()
    with closing(open_store(url)) as store:
        while store.find(manifest_key(0)) is None:
            assert process.is_alive(), printed.read_text(encoding="utf-8")
            time.sleep(0.05)

    def end() -> None:
        stop.touch()
        process.join(120)
        assert process.exitcode == 0, printed.read_text(encoding="utf-8")

    yield end
    end()


@contextmanager
def reading(url: str) -> Iterator[list[Reader]]:
    readers = [Reader(url, joins=number == FOLLOWERS) for number in range(FOLLOWERS + 1)]
    for reader in readers:
        reader.start()
    yield readers
    for reader in readers:
        reader.done.set()
        reader.join(120)
        assert not reader.is_alive()


def start(url: str, printed: Path, last: int = KEPT) -> Any:
    arguments = (url, dict(os.environ), printed, last)
    process = PROCESSES.Process(target=maintain_for_ever, args=arguments)
    process.start()
    return process


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLS)
def test_maintainers_killed_at_any_moment_harm_nobody(
    kind: str, place_of: Callable[[str], Place], tmp_path: Path
) -> None:
    url, chance = place_of(kind).url(), random.Random(kind)
    maintainers = 1 if kind == "hf" else 2  # a bucket without keys cannot decide between two
    printed = [tmp_path / f"maintainer-{number}" for number in range(maintainers)]
    with publishing(url, tmp_path) as end, reading(url) as readers:
        running = [start(url, file) for file in printed]
        for killed in count():
            if killed >= KILLS[kind] and readers[0].versions[-1:] >= [VERSIONS]:
                break
            time.sleep(chance.uniform(0.05, 0.8))
            number = chance.randrange(maintainers)
            kill(running[number])
            running[number] = start(url, printed[number])
        end()
        for process in running:
            kill(process)
    for reader in readers:
        assert not reader.errors, reader.errors[0]
        assert reader.versions == sorted(reader.versions)
    chain = Chain.open(open_store(url))
    head = chain.head()
    assert head is not None
    assert all(reader.versions[-1] == head.version for reader in readers if not reader.joins)
    told = "".join(file.read_text("utf-8") for file in printed)
    assert "Error" not in told, told
    check_end(url, head.version)


def check_end(url: str, head: int) -> None:
    maintainer = maintainer_of(url, grace_s=0.2)
    assert maintainer.pruner is not None
    done = maintainer.round()
    assert done is not None
    assert not done.failed
    time.sleep(2)
    expected = maintainer.pruner.plan(dry=True)
    assert expected is not None
    before = sum(info.nbytes for info in maintainer.survey.objects().values())
    maintainer.pruner.run()
    after = sum(info.nbytes for info in maintainer.survey.objects().values())
    assert before - after == expected.nbytes
    chain = Chain.open(open_store(url))
    assert all(is_reachable(chain, version) for version in range(head - KEPT + 1, head + 1))
    proofs = list(verify(chain, first=head - KEPT + 1))
    assert all(proof.rebuilt for proof in proofs)
    gone = [edge for proof in verify(chain) for edge in proof.edges if edge.expired]
    assert gone or url.startswith("hf:")  # a bucket serves content by its hash for a while
    assert all(edge.pruned for edge in gone)
    named: set[str] = set()
    survey = Survey(chain)
    committed = chain.read(head)
    for parts in survey.parts_of(survey.edges(committed)).values():
        named |= set(parts or ())
    assert set(survey.objects()) <= named


def take_turns(one: Maintainer, other: Maintainer) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        one.round()
        other.round()


def test_a_second_maintainer_of_a_bucket_that_cannot_decide_is_named(
    place_of: Callable[[str], Place], tmp_path: Path
) -> None:
    url = place_of("hf").url()
    with publishing(url, tmp_path):
        one, other = maintainer_of(url), maintainer_of(url)
        with pytest.raises(ChainError, match=r"another maintainer .* wrote prune record"):
            take_turns(one, other)


ROUNDS: Final = {"file": 150, "s3": 250, "hf": 100}
PRUNES: Final = {"file": 50, "s3": 100, "hf": 20}
"""Rounds of maintainers that deleted something, at least: a slow machine has more rounds."""

CHAIN: Final = 50

RULES: Final = (17, 48)

KEPT_TAGS: Final = 12


@dataclass
class Tagger:
    url: str
    chance: random.Random
    acknowledged: dict[str, int] = field(default_factory=dict)
    refused: int = 0

    def set_one(self, number: int) -> None:
        with closing(open_store(self.url, writer=True)) as store:
            chain = Chain.open(store)
            head = chain.head()
            assert head is not None
            back = self.chance.randrange(self.chance.choice([*RULES, 10 * RULES[1]]))
            version = max(0, head.version - back)
            name = f"tag-{number}"
            try:
                tags.set_(chain, name, chain.read(version), time=time.time())
                self.acknowledged[name] = version
            except BrokenChainError:
                self.refused += 1
            if len(self.acknowledged) > KEPT_TAGS:
                oldest = next(iter(self.acknowledged))
                del self.acknowledged[oldest]
                tags.remove(chain, oldest, time=time.time())

    def check(self) -> None:
        with closing(open_store(self.url)) as store:
            there = {tag.name: tag.version for tag in tags.read_all(Chain.open(store))}
        assert there == self.acknowledged
        for version in set(self.acknowledged.values()):
            with closing(Subscriber(self.url, tensors_of(TinyModel(seed=9)))) as subscriber:
                receipt = subscriber.update(version)
                assert receipt is not None
                assert receipt.version == version


def check_versions(url: str) -> None:
    with closing(open_store(url)) as store:
        chain = Chain.open(store)
        head = chain.head()
        assert head is not None
        newest = range(head.version - RULES[0] + 1, head.version + 1)
        assert all(is_reachable(chain, version) for version in newest)
        assert all(chain.find(version) is not None for version in range(head.version + 1))


class Chaos:
    def __init__(self, url: str, folder: Path, chance: random.Random, *, alone: bool) -> None:
        self.url, self.folder, self.chance, self.alone = url, folder, chance, alone
        self.tagger, self.printed = Tagger(url, chance), folder / "maintainers"

    def prunes(self) -> int:
        return self.printed.read_text("utf-8").count("pruned ") if self.printed.exists() else 0

    def run(self, rounds: int) -> None:
        with publishing(self.url, self.folder, pause_s=0.2) as end:
            rules = RULES[: 1 if self.alone else 2]
            running = [start(self.url, self.printed, rule) for rule in rules]
            for number in range(rounds):
                self._round(number, running)
                if number % 10 == 9:
                    self.tagger.check()
            end()
            time.sleep(4 * GRACE_S)
            for process in running:
                kill(process)
        self.tagger.check()
        told = self.printed.read_text("utf-8")
        assert not re.search("Error(?!.*; trying again for)", told), told
        assert len(self.tagger.acknowledged) == KEPT_TAGS
        check_versions(self.url)

    def _round(self, number: int, running: list[Any]) -> None:
        time.sleep(self.chance.uniform(0.0, 0.3))
        victim = self.chance.randrange(len(running))
        dies = self.chance.random() < (0.15 if self.alone else 0.4)
        os.kill(running[victim].pid, signal.SIGKILL if dies else signal.SIGSTOP)
        self.tagger.set_one(number)
        time.sleep(self.chance.choice([0.0, GRACE_S / 2, GRACE_S * 1.1]))
        if dies:
            running[victim].join(60)
            rule = RULES[number % 2 if self.alone else victim]
            running[victim] = start(self.url, self.printed, rule)
        else:
            os.kill(running[victim].pid, signal.SIGCONT)
        if self.alone:  # long enough for a prune: a record, its grace, a record after that, deletes
            time.sleep(self.chance.choice([0.0, 2 * GRACE_S, 4 * GRACE_S]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDS)
def test_no_acknowledged_tag_is_lost_to_maintainers_of_different_rules(
    kind: str, place_of: Callable[[str], Place], tmp_path: Path
) -> None:
    place, chance = place_of(kind), random.Random(kind)
    rounds = prunes = refused = 0
    for number in count():  # each maintainer that starts reads its whole chain: it stays short
        if rounds >= ROUNDS[kind] and prunes >= PRUNES[kind]:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        # A bucket without keys cannot decide between two maintainers: there is one after the other.
        chaos = Chaos(place.url(f"chain-{number}"), folder, chance, alone=kind == "hf")
        chaos.run(CHAIN)
        rounds, prunes = rounds + CHAIN, prunes + chaos.prunes()
        refused += chaos.tagger.refused
        print(f"{kind}: {rounds} rounds, {prunes} prunes, {refused} tags refused")  # noqa: T201
    assert refused > 0
