"""Two leaders of one engine, and two callers of one leader: one leads, one thing at a time."""

import errno
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from deltachain.chain import fetch
from deltachain.codec import Part
from deltachain.errors import (
    ApplyError,
    ChainError,
    ConfigError,
    DeltaChainError,
    LeaderReplacedError,
    PartialApplyError,
)
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica import fetcher, messages, spool
from deltachain.replica.fetcher import folder_id, hosts_of, sees_probe, shown
from deltachain.replica.leader import Leader
from deltachain.replica.settings import RankSettings, ReplicaSettings
from deltachain.replica.spool import PROBE, Spool
from deltachain.replica.target import PreparedSwap, ReplicaTarget
from deltachain.store import open_store
from deltachain.subscribe import SubscribeConfig, Subscriber, history
from deltachain.types import StateDigest
from tests.support.engine import HOSTED, Sharding, save, trained
from tests.support.faults import FaultyStore
from tests.support.models import train_
from tests.support.values import present
from tests.unit.replica import replicas
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

    def call(self, request: messages.RankRequest) -> Sequence[messages.RankReply]:
        replies = []
        for number, rank in enumerate(self.ranks):
            answer = rank.ask(messages.encode(request))
            if not answer:
                raise ApplyError(f"rank {number} has ended")
            replies.append(messages.decode_reply(answer))
        return replies

    def is_dead(self) -> bool:
        return False

    def is_paused(self) -> bool:
        return self.paused

    def pause(self, *, in_doubt: bool = False) -> None:  # noqa: ARG002 - of the interface
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def oldest(self) -> str:
        return ""

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


@pytest.mark.full
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
        assert here.left() == []
        staged = present(here.subscriber.stage())
        assert len({one.name for one in here.left()}) == 2, "a spool on each host"
        here.subscriber.swap(staged)
        assert here.left() == []
        assert here.subscriber.rollback().version == 3
        assert here.live == states[3]
        here.subscriber.rollback(1)  # by the store
        assert (here.live, here.engine.version) == (states[1], 1)


@pytest.mark.full
def test_a_fetcher_that_fails_is_replaced_by_another_rank_of_its_host(tmp_path: Path) -> None:
    with apart(tmp_path, (0, 1, 1, 0), ("none", "fail", "none", "none")) as here:
        here.subscriber.update()
        state = here.publish(1)
        here.subscriber.update()
        assert here.live == state


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("fail", r"no rank on \S+ could fetch: rank 1: .*out of reach"),
        ("kill", "rank 1 has ended"),
    ],
)
def test_a_host_on_which_nobody_can_fetch_is_refused_by_name(
    tmp_path: Path, fault: str, why: str
) -> None:
    with apart(tmp_path, (0, 1), ("none", fault)) as here:
        here.publish(1)
        with pytest.raises(ApplyError, match=why):
            here.subscriber.update()
        assert here.engine.version == -1
        assert not here.engine.paused


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


def keep_spools_of_rank_1_in(here: Followed, folder: Path) -> None:
    here.engine.services[1]._settings = RankSettings(spool=folder)


def test_one_folder_by_two_names_is_one_host(followed: Build, tmp_path: Path) -> None:
    here = followed()
    here.spool.mkdir()
    (tmp_path / "mounted").symlink_to(here.spool)
    keep_spools_of_rank_1_in(here, tmp_path / "mounted")
    here.publish(1)
    here.subscriber.update()
    assert here.holds(1)


def test_a_rank_that_can_keep_no_spool_is_refused_before_anything_is_touched(
    followed: Build, tmp_path: Path
) -> None:
    here = followed()
    (tmp_path / "file").write_text("")
    keep_spools_of_rank_1_in(here, tmp_path / "file")
    before = here.engine.bits()
    with pytest.raises(ConfigError, match=r"rank 1: .* does not see the leader's files") as no:
        here.subscriber.update()
    assert "DELTACHAIN_SPOOL" in no.value.hint
    assert here.engine.bits() == before
    assert here.engine.events == []
    assert here.spools() == []


def test_a_rank_that_cannot_open_the_store_says_so(followed: Build, tmp_path: Path) -> None:
    """A store in the leader's memory."""
    here = followed()
    keep_spools_of_rank_1_in(here, tmp_path / "elsewhere")
    before = here.engine.bits()
    here.publish(1)
    with pytest.raises(ApplyError, match=r"no rank on .* could fetch: rank 1:"):
        here.subscriber.update()
    assert here.engine.bits() == before


def test_each_host_reads_its_own_objects_and_the_directories_of_others(
    followed: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "PublishConfig", partial(PublishConfig, part_nbytes=1 << 12))
    monkeypatch.setattr(fetch, "FRONT", 1 << 11)
    here = followed(Sharding(pp=2, layers=8, untied=True))
    keep_spools_of_rank_1_in(here, tmp_path / "elsewhere")
    second = FaultyStore(here.store)
    monkeypatch.setattr(fetcher, "open_store", lambda _: second)
    fronts = [counted(monkeypatch, store) for store in (here.faulty, second)]
    here.subscriber._poison()
    assert present(here.subscriber.update()).plan.startswith("nothing")
    assert here.holds(0)
    found = {ref.key: ref.nbytes for ref in here.subscriber.chain.read(0).manifest.edge.parts}
    large = [key for key, nbytes in found.items() if nbytes > 1 << 11]  # others are fetched whole
    parts = {key: Part.from_bytes(here.store.get(key)) for key in large}
    whole = (here.faulty.keys_read, second.keys_read)
    for rank, (own, keys, front) in enumerate(zip(OF_STAGES, whole, fronts, strict=True)):
        layers = tuple(f"layers.{4 * rank + layer}." for layer in range(4))
        mine = {
            key for key, part in parts.items() if any(r.startswith(own + layers) for r in part.rows)
        }
        assert parts.keys() & keys == mine < parts.keys()
        assert all(part.front_nbytes <= front[key] <= 1 << 11 for key, part in parts.items())


def test_a_leader_on_a_host_without_ranks_reads_directories_alone(
    followed: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = followed()
    for service in here.engine.services:
        service._settings = RankSettings(spool=tmp_path / "elsewhere")
    monkeypatch.setattr(fetcher, "open_store", lambda _: FaultyStore(here.store))
    monkeypatch.setattr(fetch, "FRONT", 1 << 11)
    counted(monkeypatch, here.faulty)
    here.subscriber._poison()
    here.subscriber.update()
    assert here.holds(0)
    assert not [key for key in here.faulty.keys_read if key.startswith(("anchors/", "deltas/"))]


OF_STAGES = ("embed",), ("embed", "head", "norm")


def counted(monkeypatch: pytest.MonkeyPatch, store: FaultyStore) -> Counter[str]:
    """Count the bytes of ranges that are read of each object."""
    found: Counter[str] = Counter()

    def read(key: str, start: int, length: int) -> bytes:
        found[key] += length
        return store.inner.get_range(key, start, length)  # ``keys_read`` has whole reads alone

    monkeypatch.setattr(store, "get_range", read)
    return found


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_a_probe_lies_in_the_spool_folder_alone(followed: Build, name: str) -> None:
    here = followed(Sharding())
    asked = messages.AttachRequest(url=here.store.url, specs=(), aliases={}, probe=(name, "word"))
    answer = here.engine.services[0].handle(asked)
    assert isinstance(answer, messages.Refusal)
    assert answer.error == "ConfigError"
    assert "is not a spool" in answer.message


def test_a_spool_that_cannot_be_written_to_is_said_at_the_start(followed: Build) -> None:
    here = followed(Sharding())
    here.spool.write_text("a file")
    with pytest.raises(ApplyError, match="cannot be written there") as caught:
        here.subscriber.update()
    assert "DELTACHAIN_SPOOL" in caught.value.hint


@pytest.fixture
def leader(here: Followed) -> Leader:
    settings = ReplicaSettings(subscribe=here.subscriber.config, spool=here.spool)
    leader = Leader(settings, here.engine, store=here.faulty)
    leader.subscriber.open()
    return leader


def test_a_leader_that_was_replaced_touches_neither_weights_nor_scheduler(here: Followed) -> None:
    staged = present(here.subscriber.stage())
    later = here.subscribe()
    later.open()
    here.engine.pause()  # the other is in the middle of a swap
    here.engine.events.clear()
    with pytest.raises(PartialApplyError, match="another leader has attached this rank since"):
        here.subscriber.swap(staged)
    assert here.engine.events == []
    assert here.engine.paused
    assert not here.subscriber.poisoned
    assert here.holds(1)
    here.engine.resume()
    later.update()
    assert here.holds(2)


def test_a_leader_that_was_replaced_stages_nothing_and_poisons_nobody(here: Followed) -> None:
    later = here.subscribe()
    later.open()
    for action in (here.subscriber.update, here.subscriber.scrub):
        with pytest.raises(PartialApplyError, match="another leader"):
            action()
        assert here.engine.events == []
        assert all(not rank.rank.staged for rank in here.engine.services)
    later.update()
    assert here.holds(2)
    with pytest.raises(PartialApplyError, match="another leader"):
        here.subscriber.scrub()  # of what another leader wrote
    assert not here.subscriber.poisoned
    assert later.scrub()


def test_a_leader_that_was_replaced_is_not_ready_and_resumes_nobody(
    here: Followed, leader: Leader
) -> None:
    leader.update()
    assert leader.status().ready
    later = here.subscribe()
    later.open()
    here.engine.pause()  # the other is in the middle of a swap
    here.engine.events.clear()
    for action in (leader.resume, leader.pause, leader.scrub):
        with pytest.raises(LeaderReplacedError, match="another leader"):
            action()
    assert here.engine.events == []
    here.engine.resume()
    here.publish(3)
    with pytest.raises(LeaderReplacedError):
        leader.update()
    status = leader.status()
    assert (status.ready, status.poisoned) == (False, False)
    assert "another leader" in status.reason
    later.update()
    assert here.holds(3)


def test_a_name_is_that_of_what_is_held_though_another_swaps(
    here: Followed, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks at the version, and then names it, may be overtaken by a swap in between."""
    leader.update()
    named, go_on = Event(), Event()
    name = here.engine.name_version

    def slow(version: int) -> None:
        if version == 1:
            named.set()
            assert go_on.wait(20)
        name(version)

    monkeypatch.setattr(here.engine, "name_version", slow)
    with ThreadPoolExecutor(2) as pool:
        back = pool.submit(leader.rollback, 1)
        assert named.wait(20)
        refused = pool.submit(leader.update, 2)
        assert not wait([refused], timeout=0.2).done
        go_on.set()
        assert back.result().version == 1
        with pytest.raises(ChainError):
            refused.result()
    names = [event for event in here.engine.events if event.startswith("name")]
    assert names[-1] == "name 1"
    assert here.holds(1)


def test_a_spool_without_room_for_a_while_does_not_end_following(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Event()
    put = spool._put

    def full(*args: Any) -> None:
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        put(*args)

    monkeypatch.setattr(spool, "_put", full)
    told: list[DeltaChainError] = []

    def looked(exc: DeltaChainError | None) -> None:
        if exc is not None:
            told.append(exc)
            room.set()

    assert next(here.subscriber.follow(looked=looked)).version == 2
    assert "No space left" in str(told[0])


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_can_not_load_again_is_not_believed(followed: Build, rank: int) -> None:
    """A scrub lets the engine load its host copies again; one that fails may be half loaded."""
    odd = tuple(name for name in HOSTED if name != "bias")  # zeros on one rank of two
    here = followed(Sharding(tp=2, odd=odd))
    here.publish(1)
    here.subscriber.update()

    def fail(_: str) -> None:
        raise OSError("device lost")

    here.engine.models[rank].failing = fail
    assert not here.subscriber.scrub()
    assert here.subscriber.poisoned
    here.engine.models[rank].failing = lambda _: None
    here.subscriber.update()
    assert here.holds(1)
    assert here.subscriber.scrub()


def test_nobody_resumes_in_the_middle_of_a_swap(
    here: Followed, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = Event(), Event()
    call = here.engine.call

    def slow(request: messages.RankRequest) -> Sequence[messages.RankReply]:
        if isinstance(request, messages.SwapRequest):
            writing.set()
            assert go_on.wait(20)
        return call(request)

    monkeypatch.setattr(here.engine, "call", slow)
    here.engine.events.clear()
    with ThreadPoolExecutor(4) as pool:
        update = pool.submit(leader.update)
        assert writing.wait(20)
        others = [pool.submit(action) for action in (leader.resume, leader.pause, leader.scrub)]
        assert not wait(others, timeout=0.2).done
        assert here.engine.events == ["pause"]
        go_on.set()
        assert update.result() is not None
        assert others[2].result() is True
    assert here.engine.events[:4] == ["pause", "write", "name 2", "resume"]
    assert here.holds(2)


def test_two_stages_at_once_forget_nothing_of_each_other(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback from the store stages beside an update; each tells the ranks what to keep."""
    first_asks, second_is_done = Event(), Event()
    call = here.engine.call

    def slow(request: messages.RankRequest) -> Sequence[messages.RankReply]:
        if isinstance(request, messages.StageRequest) and not first_asks.is_set():
            first_asks.set()
            second_is_done.wait(0.5)
        return call(request)

    monkeypatch.setattr(here.engine, "call", slow)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(here.subscriber.stage)
        assert first_asks.wait(20)
        two = pool.submit(here.subscriber.stage)
        two.add_done_callback(lambda _: second_is_done.set())
        staged = [one.result(), two.result()]
    kept = [set(rank.rank.staged) for rank in here.engine.services]
    tickets = {
        one.prepared.ticket for one in staged if one and isinstance(one.prepared, PreparedSwap)
    }
    assert len(tickets) == 2
    assert all(tickets <= one for one in kept)


def test_two_that_open_at_once_agree_on_what_is_held(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push and a poll, as soon as there is a chain: the late one must not undo the first."""
    late = here.subscribe()
    identify, looks, go_on = history.identify, Event(), Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        found = identify(*args, **kwargs)
        if not looks.is_set():
            looks.set()
            go_on.wait(0.5)
        return found

    monkeypatch.setattr(history, "identify", slow)
    with ThreadPoolExecutor(2) as pool:
        poll = pool.submit(late.open)
        assert looks.wait(20)
        push = pool.submit(late.update)
        push.add_done_callback(lambda _: go_on.set())
        poll.result()
        push.result()
    assert (late.version, late.poisoned) == (2, False)
    assert late.scrub()


def test_a_leader_of_another_chain_replaces_nobody(here: Followed) -> None:
    for rank in here.engine.services:
        rank._settings = RankSettings(spool=here.spool, url=here.store.url)
    stranger = ReplicaTarget(here.engine, "s3://elsewhere/run", here.spool)
    with pytest.raises(ConfigError, match=f"follow {here.store.url}, not s3://elsewhere/run"):
        Subscriber(here.subscriber.config, stranger, store=here.store).open()
    here.subscriber.update()
    assert here.holds(2)


def test_an_engine_that_somebody_else_paused_to_write_is_not_resumed(here: Followed) -> None:
    staged = present(here.subscriber.stage())
    here.engine.faults.refuses[0, "status"] = PartialApplyError("an update session is open")
    here.engine.pause()
    here.engine.events.clear()
    with pytest.raises(PartialApplyError, match="session is open"):
        here.subscriber.swap(staged)
    assert here.engine.events == []
    assert here.engine.paused


def test_a_replica_in_doubt_that_does_not_pause_is_healed_all_the_same(
    here: Followed, leader: Leader
) -> None:
    leader.update()
    here.scribble(0, "layers.0.norm.weight")
    assert not leader.subscriber.scrub()
    here.engine.faults.pause = ApplyError("no answer")
    leader._looked(ApplyError("it is in doubt"))
    here.engine.faults.pause = None
    leader.update()
    assert here.holds(2)
    assert leader.status().ready
    assert not here.engine.paused


def test_a_pause_that_failed_does_not_stick(here: Followed, leader: Leader) -> None:
    here.engine.faults.pause = ApplyError("no answer")
    with pytest.raises(ApplyError):
        leader.pause()
    here.engine.faults.pause = None
    leader.update()
    assert leader.status().ready
    assert not here.engine.paused


def test_a_rollback_from_the_store_is_not_starved(
    followed: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that arrive meanwhile would overtake it, one after another."""
    here = followed(undo_applies=0)
    here.publish(1, 2)
    here.subscriber.update()
    stage, attempts = here.target.stage, [0]
    with ThreadPoolExecutor(1) as pool:

        def slow(*args: Any, **kwargs: Any) -> Any:
            attempts[0] += 1
            here.publish(2 + attempts[0])
            wait([pool.submit(here.subscriber.update)], timeout=0.5)
            return stage(*args, **kwargs)

        monkeypatch.setattr(here.target, "stage", slow)
        assert here.subscriber.rollback(0).version == 0
    assert attempts[0] == 1
    assert here.holds(0)
