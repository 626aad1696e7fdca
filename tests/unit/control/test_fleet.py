import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.control.announce import Fleet, Wait
from deltachain.control.comparison import ReplicaRow, compare, newest_seen
from deltachain.control.roster import ReplicaAnswer
from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.leader import Leader
from deltachain.status import Health, HealthLimits, Status
from deltachain.subscribe.subscriber import LOOK_BACK
from tests.support.backup import objects_of, put_back
from tests.support.models import train_
from tests.unit.control.replicas import app_of, followed, leader_of, served, status
from tests.unit.replica.replicas import Followed

OTHERS = {"http://x": status(), "http://y": status(), "http://z": status()}


def judged(one: Status | ControlPlaneError, **limits: Any) -> ReplicaRow:
    """The row of a replica beside three that are well."""
    rows = compare({"http://a": one, **OTHERS}, HealthLimits(**limits))
    others = [row for row in rows if row.engine != "http://a"]
    assert {row.health for row in others} == {"ready"}
    return next(row for row in rows if row.engine == "http://a")


@pytest.mark.parametrize(
    ("found", "health", "why"),
    [
        (status(), "ready", ""),
        (status(6), "behind", "it has seen version 6 as the newest, others 7"),
        (status(6, head=7), "behind", ""),
        (status(5, pinned=True), "pinned", ""),
        (status(ready=False, reason="paused"), "not ready", "paused"),
        (status(None, ready=False, reason="it holds no version"), "not ready", "holds no version"),
        (status(ready=False, fault="the engine is dead"), "failed", "the engine is dead"),
        (status(7, silence_s=61.0), "cut off", "its store has not answered for 61 s"),
        (status(3, head=3, silence_s=3600.0), "cut off", "its store has not answered for 3600 s"),
        (status(7, silence_s=61.0, following=False), "ready", ""),
        (status(7, silence_s=61.0, pinned=True), "pinned", ""),
        (status(7, silence_s=None), "ready", ""),
        (status(poisoned=True, ready=False, reason="poisoned"), "poisoned", "poisoned"),
        (status(doubt="the store went back"), "in doubt", "the store went back"),
        (status(head=10**6), "in doubt", "it says that version 1000000 exists, which no other"),
        (status(manifest="f" * 64), "in doubt", "others hold another version 7"),
        (status(chain="d" * 32), "in doubt", "others follow another chain than dddddddddddd"),
        (ControlPlaneError("http://a did not answer in 5 s"), "failed", "did not answer in 5 s"),
    ],
)
def test_the_health_of_one_among_others(
    found: Status | ControlPlaneError, health: Health, why: str
) -> None:
    row = judged(found)
    assert row.health == health
    assert bool(row.why) == bool(why)
    assert why in " ".join(row.why)


@pytest.mark.parametrize(("lag", "health"), [(None, "behind"), (4, "behind"), (3, "stale")])
def test_a_limit_makes_who_is_behind_stale(lag: int | None, health: Health) -> None:
    row = judged(status(3, head=7), lag=lag)
    assert (row.health, row.is_alarming) == (health, health == "stale")


A, B = "http://a", "http://b"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param(
            {A: status(3, head=3, lag_versions=0), **OTHERS},
            [("behind", 4), *[("ready", 0)] * 3],
            id="who is cut off says lag 0: it sees no newer version",
        ),
        pytest.param(
            {A: status(8), **OTHERS},
            [*[("behind", 1)] * 3, ("ready", 0)],
            id="one that holds a new version is believed",
        ),
        pytest.param(
            {A: status(7, head=9), B: status(7)},
            [("behind", 2)] * 2,
            id="of two each is believed",
        ),
        pytest.param(
            {A: status(chain="c" * 32), B: status(chain="d" * 32)},
            [("in doubt", 0)] * 2,
            id="two that follow two chains are both in doubt",
        ),
        pytest.param(
            {A: status(900, chain="d" * 32), B: status(900, chain="d" * 32), **OTHERS},
            [("in doubt", 0)] * 2 + [("ready", 0)] * 3,
            id="versions of two chains have nothing to do with each other",
        ),
    ],
)
def test_lag_is_behind_the_newest_that_anybody_saw(
    answers: dict[str, ReplicaAnswer], expected: list[tuple[Health, int]]
) -> None:
    rows = compare(answers, HealthLimits())
    assert [(row.health, row.lag) for row in rows] == expected


def test_one_that_says_too_much_makes_no_other_stale() -> None:
    rows = compare({A: status(head=10**6), **OTHERS}, HealthLimits(lag=0))
    assert [(row.health, row.lag) for row in rows] == [("in doubt", 0), *[("ready", 0)] * 3]


def test_the_worst_come_first_then_the_largest_lag() -> None:
    there: dict[str, ReplicaAnswer] = {
        **OTHERS,
        "http://b": status(5),
        "http://c": status(3),
        "http://d": ControlPlaneError("gone"),
        "http://e": status(7, silence_s=99.0),
    }
    rows = compare(there, HealthLimits())
    assert [row.engine[-1] for row in rows] == ["d", "e", "c", "b", "x", "y", "z"]


def test_replicas_with_two_histories_say_so() -> None:
    answers: dict[str, ReplicaAnswer] = {
        A: status(3, manifest="a"),
        B: status(3, manifest="b", doubt="the store went back"),
        "http://c": status(4, manifest="c"),
        "http://x": ControlPlaneError("away"),
    }
    doubts = {row.engine: row.doubt for row in compare(answers, HealthLimits())}
    expected = ["others hold another version 3", "the store went back", "", ""]
    assert [doubts[url] for url in answers] == expected


def test_nobody_saw_anything() -> None:
    assert newest_seen([]) is None
    assert newest_seen([status(None)]) is None
    assert compare({}, HealthLimits()) == []


OTHER = "0" * 64


@pytest.fixture
def fleet(leader: Leader) -> Iterator[Fleet]:
    with ExitStack() as stack:
        url = stack.enter_context(served(app_of(leader, is_open=True)))
        yield stack.enter_context(Fleet([url]))


def digest(here: Followed, version: int) -> str:
    return Chain.open(here.store).read(version).digest


def lose(here: Followed, version: int, *, again: int | None) -> None:
    """Restore the store as it was at a version; a restarted trainer goes on from there, if any."""
    earlier = objects_of(here.store)
    for key in list(earlier):
        if key.startswith("manifests/") and int(key[10:30]) > version:
            del earlier[key]
    earlier.pop("head.json", None)
    put_back(here.store, earlier)
    if again is None:
        return
    config = PublishConfig(url=here.store.url, anchor_factor=1e6)
    with Publisher(config, store=here.store).attach(here.model) as publisher:
        for seed in range(again):
            train_(here.model, 100 + seed, share=0.05)
            publisher.publish()
            publisher.flush()


@pytest.mark.full
def test_a_version_of_the_lost_history_is_not_the_announced_one(
    here: Followed, leader: Leader, fleet: Fleet
) -> None:
    here.publish(3, 4)
    leader.update(4)
    lost = digest(here, 4)
    lose(here, 1, again=0)
    for version in (2, 3):
        manifest = digest(here, version)
        announced = fleet.announce(version, manifest=manifest, deadline=4.0)
        assert not announced.enough
        assert announced.stragglers == tuple(announced.held)
        assert "StoreWentBackError" in "".join(announced.trouble.values())
        assert not fleet.announce(version, deadline=1.0).enough  # nor by its number alone
    held = leader.subscriber.held
    assert held is not None
    assert held.manifest == lost


@pytest.mark.full
def test_the_same_number_of_another_history_is_told_apart(
    here: Followed, leader: Leader, fleet: Fleet
) -> None:
    leader.update(2)
    lose(here, 0, again=1)
    manifest = digest(here, 2)
    assert leader.status().manifest != manifest
    for told in (manifest, ""):
        announced = fleet.announce(2, manifest=told, deadline=1.0)
        assert not announced.enough
        assert list(announced.held.values()) == [None]
        assert "ForkedChainError" in "".join(announced.trouble.values())


def test_who_holds_a_later_version_of_this_history_holds_the_announced_one(
    here: Followed, leader: Leader, fleet: Fleet
) -> None:
    leader.update(2)
    for manifest in (digest(here, 1), ""):
        announced = fleet.announce(1, manifest=manifest, deadline=20.0)
        assert announced.enough
        assert list(announced.held.values()) == [2]
    assert here.holds(2)


@pytest.mark.full
def test_an_announced_version_that_is_another_in_the_store_is_refused(
    leader: Leader, fleet: Fleet
) -> None:
    leader.update(1)
    for version in (1, 2):
        assert not fleet.announce(version, manifest=OTHER, deadline=1.0).enough


def test_a_replica_whose_store_is_away_holds_what_it_proves_to_hold(
    here: Followed, leader: Leader, fleet: Fleet
) -> None:
    leader.update(2)
    manifest = digest(here, 2)
    here.faulty.down = True
    assert fleet.announce(2, manifest=manifest, deadline=20.0).enough
    assert not fleet.announce(2, manifest=OTHER, deadline=0.5).enough
    assert not fleet.announce(2, deadline=0.5).enough  # nobody can say which 2 that is
    here.faulty.mend()


@pytest.mark.parametrize("what", ["store", "identity", "all"])
def test_a_store_that_lost_what_is_held_ends_readiness(
    here: Followed, leader: Leader, what: str
) -> None:
    leader.update()
    newest = objects_of(here.store)
    kept = {
        "store": {key: data for key, data in newest.items() if "manifests/" not in key},
        "identity": {key: data for key, data in newest.items() if key != "chain.json"},
        "all": {},
    }[what]
    looks = leader.subscriber.follow(stop=leader._stop, looked=leader._looked)
    turns = iter(range(100))

    def wait(_: float) -> bool:
        turn = next(turns)
        ready = leader.status().ready
        if turn == 1:
            assert ready
            put_back(here.store, kept)
        elif turn == 2 * LOOK_BACK:
            status = leader.status()
            assert (status.ready, status.lag_versions or 0) == (False, 0)
            assert status.reason == status.doubt != ""
            put_back(here.store, newest)
        elif turn == 2 * LOOK_BACK + 1:
            assert ready
            leader.end()
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader.subscriber.told, "wait", wait)
        assert list(looks) == []


GONE = "http://127.0.0.1:9"


class Three:
    """Three engines, each of a trainer of its own, behind real servers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.heres: list[Followed] = []
        self.leaders: list[Leader] = []
        self.urls: list[str] = []
        for number in range(3):
            place = folder / str(number)
            place.mkdir()
            self.heres.append(stack.enter_context(contextmanager(followed)(place)))
            leader = stack.enter_context(contextmanager(leader_of)(self.heres[-1]))
            self.leaders.append(leader)
            self.urls.append(stack.enter_context(served(app_of(leader, is_open=True))))


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    with ExitStack() as stack:
        yield Three(tmp_path, stack)


def test_all_hold_it_before_the_trainer_goes_on(three: Three) -> None:
    with Fleet(three.urls) as fleet:
        for version in (1, 2):
            announced = fleet.announce(version)
            assert announced.enough
            assert announced.stragglers == ()
            assert announced.held == dict.fromkeys(three.urls, version)
            assert all(here.holds(version) for here in three.heres)
        assert fleet.announce(2).waited_s < 1  # known already


@pytest.mark.full
@pytest.mark.parametrize(
    ("wait", "enough", "deadline"),
    [("all", False, 3.0), ("quorum", True, 30.0), ("any", True, 30.0)],
)
def test_the_trainer_is_not_held_past_the_deadline(
    three: Three, wait: Wait, enough: bool, deadline: float
) -> None:
    with Fleet([*three.urls[:2], GONE]) as fleet:
        start = time.monotonic()
        announced = fleet.announce(1, wait=wait, deadline=deadline)
        assert announced.enough is enough
        assert time.monotonic() - start < deadline + 20.0
        assert GONE in announced.stragglers
        if wait == "all":
            assert "did not answer" in announced.trouble[GONE]
            assert GONE in str(announced)


@pytest.mark.full
def test_one_that_hangs_holds_up_no_other(three: Three) -> None:
    slow, well = three.urls[:2]
    with Fleet([slow, well]) as fleet:
        with three.leaders[0].subscriber.alone():  # nothing is swapped there meanwhile
            announced = fleet.announce(1, deadline=2.0)
            assert (announced.stragglers, announced.held[well]) == ((slow,), 1)
        assert fleet.announce(1, deadline=30).enough


def test_a_replica_that_fell_back_is_asked_again(three: Three) -> None:
    before, after, _ = three.leaders
    with Fleet(three.urls[:1]) as fleet:
        assert fleet.announce(2).enough
        before.update, before.status = after.update, after.status  # type: ignore[method-assign]
        assert not three.heres[1].holds(2)
        assert fleet.announce(2).enough
        assert three.heres[1].holds(2)


def test_nobody_waits_for_none(here: Followed, fleet: Fleet) -> None:
    assert fleet.announce(2, wait="none").enough
    assert fleet.announce(2).stragglers == ()
    assert here.holds(2)


def test_a_replica_that_was_away_is_told_the_newest(here: Followed, leader: Leader) -> None:
    app = app_of(leader, is_open=True)
    with served(app) as url:
        port = int(url.rpartition(":")[2])
    with Fleet([url]) as fleet:
        assert not fleet.announce(1, deadline=0.5).enough
        assert not fleet.announce(2, deadline=0.5).enough
        with served(app, port):
            assert fleet.announce(2, deadline=30).enough
        assert here.holds(2)


def test_a_replica_that_a_rollback_keeps_is_named(
    leader: Leader, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    leader.update(0)
    leader.update(1)
    leader.rollback(0)
    announced = fleet.announce(2, deadline=1.0)
    assert caplog.text.count("lacks version 2") == 1  # once, not at each repetition
    assert announced.stragglers == tuple(announced.trouble)
    assert ["rollback" in trouble for trouble in announced.trouble.values()] == [True]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        Fleet([GONE, GONE])
    with Fleet([]) as fleet:
        assert fleet.announce(1).enough
        with pytest.raises(ConfigError, match="quorum"):
            fleet.announce(1, wait="most")  # type: ignore[arg-type]
