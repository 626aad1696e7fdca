"""Ranks on several hosts: each host fetches once, and the proof is summed over all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deltachain.errors import ApplyError, ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.fetcher import folder_id, hosts_of, sees_probe, shown
from deltachain.replica.messages import (
    AttachRequest,
    RankReply,
    RankRequest,
    Refusal,
    decode_reply,
    encode,
)
from deltachain.replica.spool import PROBE, Spool
from deltachain.replica.target import ReplicaTarget
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import StateDigest
from tests.support.engine import FakeEngine, Sharding, save, trained
from tests.support.models import train_
from tests.support.values import present
from tests.unit.replica.rank_process import RankProcess
from tests.unit.replica.replicas import Followed

Build = Callable[..., Followed]


class ProcessEngine:
    """An engine whose ranks are processes; one that has ended does not answer.

    Args:
        checkpoint: Folder that every rank loads.
        spools: Folder of spools of each rank.
        faults: Fault of each rank; see ``rank_process``.
    """

    software = "fake/1.0"

    def __init__(self, checkpoint: Path, spools: Sequence[Path], faults: Sequence[str]) -> None:
        self.paused = False
        self.version = -1
        self.ranks = [
            RankProcess.start(number, len(spools), checkpoint, spool, fault)
            for number, (spool, fault) in enumerate(zip(spools, faults, strict=True))
        ]

    def call(self, request: RankRequest) -> Sequence[RankReply]:
        replies = []
        for number, rank in enumerate(self.ranks):
            answer = rank.ask(encode(request))
            if not answer:
                raise ApplyError(f"rank {number} has ended")
            replies.append(decode_reply(answer))
        return replies

    def is_dead(self) -> bool:
        return False

    def is_paused(self) -> bool:
        return self.paused

    def pause(self, *, in_doubt: bool = False) -> None:  # noqa: ARG002 - of the interface
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def name_version(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()


@dataclass
class Apart:
    """A chain of several objects a version, and an engine whose ranks share no folder of spools."""

    publisher: Publisher
    model: torch.nn.Module
    engine: ProcessEngine
    subscriber: Subscriber
    spools: Sequence[Path]

    def publish(self, seed: int) -> StateDigest:
        train_(self.model, seed, share=0.05)
        self.publisher.publish(step=seed)
        receipt = present(self.publisher.flush())
        return receipt.state

    @property
    def live(self) -> StateDigest | None:
        """State digest of the live bits of all ranks."""
        return self.subscriber.target.state()

    def left(self) -> list[Path]:
        """Spools that are still there."""
        return [one for folder in self.spools if folder.exists() for one in folder.iterdir()]


@contextmanager
def apart(tmp_path: Path, hosts: Sequence[int], faults: Sequence[str]) -> Iterator[Apart]:
    """Ranks on hosts of these numbers; host 0 is the leader's.

    Folders of spools are on two file systems, as those of hosts are.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        folders = [Path(other) / "0" if n % 2 else tmp_path / f"{n}" for n in range(max(hosts) + 1)]
        store = open_store(str(tmp_path / "chain"), writer=True)
        model = trained(Sharding(tp=len(hosts)))
        config = PublishConfig(url=store.url, anchor_factor=1e6, part_nbytes=1 << 10)
        publisher = Publisher(config, store=store).attach(model)
        spools = [folders[host] for host in hosts]
        engine = ProcessEngine(save(model, tmp_path / "model"), spools, faults)
        target = ReplicaTarget(engine, store.url, folders[0])
        subscriber = Subscriber(SubscribeConfig(url=store.url, poll_s=0.001), target)
        try:
            yield Apart(publisher, model, engine, subscriber, folders)
        finally:
            engine.close()
            subscriber.close()
            publisher.close()


def test_two_ranks_with_spools_apart_follow_heal_and_roll_back(tmp_path: Path) -> None:
    with apart(tmp_path, (0, 1), ("none", "none")) as here:
        assert here.subscriber.update() is None  # the engine loaded version 0
        states = [here.live, *(here.publish(seed) for seed in (1, 2, 3))]
        assert here.subscriber.update(1) is not None
        assert here.live == states[1]
        assert here.subscriber.update() is not None  # two versions, folded
        assert here.live == states[3]
        here.subscriber._poison()
        healed = present(here.subscriber.update())  # from nothing: an anchor and three deltas
        assert healed.plan.startswith("nothing")
        assert here.live == states[3]
        here.publish(4)
        here.subscriber.update()
        assert here.subscriber.rollback().version == 3
        assert here.live == states[3]
        here.subscriber.rollback(1)  # by the store
        assert (here.live, here.engine.version) == (states[1], 1)


def test_a_fetcher_that_fails_is_replaced_by_another_rank_of_its_host(tmp_path: Path) -> None:
    with apart(tmp_path, (0, 1, 1, 0), ("none", "fail", "none", "none")) as here:
        here.subscriber.update()
        state = here.publish(1)
        here.subscriber.update()
        assert here.live == state


def test_a_host_on_which_nobody_can_fetch_is_refused_by_name(tmp_path: Path) -> None:
    with apart(tmp_path, (0, 1), ("none", "fail")) as here:
        here.publish(1)
        with pytest.raises(ApplyError, match=r"no rank on \S+ could fetch: rank 1: .*out of reach"):
            here.subscriber.update()
        assert here.engine.version == -1
        assert not here.engine.paused


def test_a_fetcher_that_is_killed_is_refused_by_name(tmp_path: Path) -> None:
    with apart(tmp_path, (0, 1), ("none", "kill")) as here:
        here.publish(1)
        with pytest.raises(ApplyError, match="rank 1 has ended"):
            here.subscriber.update()
        assert here.engine.version == -1


def test_spools_of_all_hosts_go_once_they_are_written(tmp_path: Path) -> None:
    with apart(tmp_path, (0, 1), ("none", "none")) as here:
        here.subscriber.update()
        assert here.left() == []
        here.publish(1)
        staged = present(here.subscriber.stage())
        names = [one.name for one in here.left()]
        assert len(set(names)) == 2
        here.subscriber.swap(staged)
        assert here.left() == []


# How hosts are told apart


def test_ranks_are_grouped_by_the_folder_they_see() -> None:
    found = [("a", ""), ("b", "1"), ("a", ""), ("b", "1"), ("c", "2")]
    hosts = hosts_of(found)
    assert [(one.name, one.ranks, one.is_leaders) for one in hosts] == [
        ("a", (0, 2), True),
        ("b", (1, 3), False),
        ("c", (4,), False),
    ]


def test_a_folder_has_one_id_by_all_of_its_names(tmp_path: Path) -> None:
    assert folder_id(tmp_path / "one") == folder_id(tmp_path / "one")
    (tmp_path / "mounted").symlink_to(tmp_path / "one")
    assert folder_id(tmp_path / "mounted" / "x") == folder_id(tmp_path / "one" / "x")
    assert folder_id(tmp_path / "two") != folder_id(tmp_path / "one")


def test_only_the_leaders_own_word_is_recognised(tmp_path: Path) -> None:
    with shown(tmp_path) as (name, word):
        assert sees_probe(tmp_path / name, word)
        assert not sees_probe(tmp_path / name, "another")
        (tmp_path / name / PROBE).write_bytes(b"\xff\xfe")
        assert not sees_probe(tmp_path / name, word)
    assert not sees_probe(tmp_path / name, word)
    assert list(tmp_path.iterdir()) == []
    Spool.probe(tmp_path, "one").close()


def test_one_folder_by_two_names_is_one_host(followed: Build, tmp_path: Path) -> None:
    here = followed(Sharding(tp=2))
    here.spool.mkdir()
    (tmp_path / "mounted").symlink_to(here.spool)
    here.engine.services[1]._settings = type(here.engine.services[1]._settings)(
        spool=tmp_path / "mounted"
    )
    here.publish(1)
    here.subscriber.update()
    assert here.holds(1)


def test_a_rank_that_can_keep_no_spool_is_refused_before_anything_is_touched(
    followed: Build, tmp_path: Path
) -> None:
    here = followed(Sharding(tp=2))
    (tmp_path / "file").write_text("")
    here.engine.services[1]._settings = type(here.engine.services[1]._settings)(
        spool=tmp_path / "file"
    )
    before = here.engine.bits()
    with pytest.raises(ConfigError, match=r"rank 1: .* does not see the leader's files") as no:
        here.subscriber.update()
    assert "DELTACHAIN_SPOOL" in no.value.hint
    assert here.engine.bits() == before
    assert here.engine.events == []
    assert here.spools() == []


def test_a_rank_that_cannot_open_the_store_says_so(tmp_path: Path) -> None:
    """A store in the leader's memory."""
    store, shape = MemoryStore(), Sharding(tp=2)
    model = trained(shape)
    with Publisher(PublishConfig(url=store.url), store=store).attach(model) as publisher:
        engine = FakeEngine(shape, save(model, tmp_path / "model"), tmp_path / "spool")
        settings = type(engine.services[1]._settings)
        engine.services[1]._settings = settings(spool=tmp_path / "elsewhere")
        target = ReplicaTarget(engine, store.url, tmp_path / "spool")
        before = engine.bits()
        train_(model, 1)
        publisher.publish(step=1)
        publisher.flush()
        with (
            Subscriber(SubscribeConfig(url=store.url), target, store=store) as subscriber,
            pytest.raises(ApplyError, match=r"no rank on .* could fetch: rank 1:"),
        ):
            subscriber.update()
    assert engine.bits() == before


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_a_probe_lies_in_the_spool_folder_alone(followed: Build, name: str) -> None:
    here = followed(Sharding())
    asked = AttachRequest(url=here.store.url, specs=(), aliases={}, probe=(name, "word"))
    answer = here.engine.services[0].handle(asked)
    assert isinstance(answer, Refusal)
    assert answer.error == "ConfigError"
    assert "is not a spool" in answer.message


def test_a_spool_that_cannot_be_written_to_is_said_at_the_start(followed: Build) -> None:
    here = followed(Sharding())
    here.spool.write_text("a file")
    with pytest.raises(ApplyError, match="cannot be written there") as caught:
        here.subscriber.update()
    assert "DELTACHAIN_SPOOL" in caught.value.hint
