"""Maintainers of different rules that are stopped, continued and killed, while tags are set.

No acknowledged tag is lost, and none of the newest versions, whoever stood still for how long.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain, is_reachable
from deltachain.errors import BrokenChainError
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from tests.crash.conftest import PROCESSES
from tests.crash.maintained import GRACE_S, maintain_for_ever
from tests.crash.places import Place
from tests.crash.test_maintainers import kill, publishing
from tests.support.models import TinyModel, tensors_of

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
            running = [self._start(rule) for rule in RULES[: 1 if self.alone else 2]]
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
        assert "Error" not in told, told
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
            running[victim] = self._start(RULES[number % 2 if self.alone else victim])
        else:
            os.kill(running[victim].pid, signal.SIGCONT)
        if self.alone:  # long enough for a prune: a record, its grace, a record after that, deletes
            time.sleep(self.chance.choice([0.0, 2 * GRACE_S, 4 * GRACE_S]))

    def _start(self, rule: int) -> Any:
        process = PROCESSES.Process(
            target=maintain_for_ever, args=(self.url, dict(os.environ), self.printed, rule)
        )
        process.start()
        return process


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
