from dataclasses import replace
from math import inf
from typing import Any

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.errors import StoreUnavailableError
from deltachain.format.documents import PrunedRange, PruneRecord, Tag, phases_mark
from deltachain.format.keys import manifest_key
from deltachain.presence.writer import follower_status
from deltachain.publish import PublishConfig, Publisher
from deltachain.redact import LONGEST
from deltachain.status import HealthLimits
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from spaces.dashboard import watcher
from spaces.dashboard.chain_index import ChainIndex
from spaces.dashboard.documents import PHASES, chart_document, page_document, version_document
from tests.support.faults import FaultyStore
from tests.support.models import TinyModel, tensors_of
from tests.support.values import present
from tests.unit.manifest_chains import WideStore, create, extend, manifest_after
from tests.unit.spaces.dashboard.reports import ENGINE, NOW, chain_of, report, status, view_of

PUBLISHED = {"diff": 0.25, "encode": 1.5, "upload": 1.0}
APPLIED = {"look": 0.5, "fetch": 0.125, "stage": 0.0625, "pause": 0.03125, "swap": 0.0}


@pytest.fixture
def chain() -> Chain:
    """Two versions, of which the second says how long its phases took."""
    made = create(MemoryStore())
    first = made.commit(manifest_after(None))
    made.commit(manifest_after(first, ext=phases_mark(PUBLISHED)))
    made.write_head(1, ())
    return made


@pytest.mark.parametrize("value", ["1", None, True, -1.0, inf, 1e300, [1.0], {}])
def test_times_that_cannot_be_are_left_out(value: object) -> None:
    assert watcher.replica_phases({"look": value, "fetch": 2, "other": 1.0}) == {"fetch": 2.0}


@pytest.mark.parametrize("last", [None, {}, {"version": 0}, {"version": "1"}, {"version": None}])
def test_times_of_another_version_are_not_those_of_the_held_one(
    chain: Chain, last: dict[str, Any] | None
) -> None:
    assert report(chain, 1, last=last, phases=APPLIED).status.phases == {}
    assert report(chain, 1, last={"version": 1}, phases=APPLIED).status.phases == APPLIED


def test_a_version_has_the_times_of_its_publisher_and_of_its_replicas(chain: Chain) -> None:
    view, track = view_of(chain), watcher.PhaseTrack()
    manifest = chain.read(1).digest
    track.add("http://a", manifest, APPLIED)
    track.add("http://b", manifest, APPLIED | {"look": 2.5})
    found = present(version_document(view, track.of, 1))
    rows = {row["name"]: row for row in found["phases"]}
    assert tuple(rows) == PHASES
    assert rows["encode"] == {"name": "encode", "seconds": 1.5}
    expected = {"seconds": 1.5, "slowest_s": 2.5, "slowest": "http://b", "replicas": 2}
    assert rows["look"] == {"name": "look", **expected}
    older = present(version_document(view, track.of, 0))
    assert older["phases"] == []


def test_a_chart_has_a_column_of_each_known_phase(chain: Chain) -> None:
    view, track = view_of(chain), watcher.PhaseTrack()
    columns = chart_document(view, track.middles(), 0, 9)["phases"]
    assert tuple(columns) == PHASES
    assert (columns["diff"], columns["look"]) == ([None, 0.25], [])
    track.add("http://a", chain.read(0).digest, APPLIED)
    assert chart_document(view, track.middles(), 0, 9)["phases"]["look"] == [0.5, None]


def test_medians_follow_what_is_added() -> None:
    track = watcher.PhaseTrack()
    for manifest, times in (("", APPLIED), ("m", {})):  # without one of the two nothing is kept
        track.add("http://a", manifest, times)
    assert (track.middles(), track.revision) == ({}, 0)
    for number, seconds in enumerate([3.0, 1.0, 2.0]):
        track.add(f"http://{number}", "m", {"look": seconds})
    assert track.middles() == {"m": {"look": 2.0}}
    revision = track.revision
    track.add("http://0", "m", {"look": 3.0})  # asked again: nothing new
    assert track.revision == revision
    track.add("http://0", "m", {"look": 1.5})
    assert track.middles() == {"m": {"look": 1.5}}
    assert track.revision > revision
    assert watcher.middle({}) == {}


def test_the_oldest_versions_are_forgotten_first() -> None:
    track = watcher.PhaseTrack(kept=6)
    for version in range(10):
        for engine in ("a", "b"):
            track.add(engine, f"m{version}", dict.fromkeys(watcher.REPLICA_PHASES, 1.0))
    assert set(track.middles()) == {"m7", "m8", "m9"}
    assert track.of("m0") == {}


def test_a_follower_that_is_known_by_its_presence_has_phase_times() -> None:
    store, model = MemoryStore(), TinyModel()
    with Publisher(PublishConfig(url=store.url), store=store).attach(model) as publisher:
        publisher.publish()
    config = SubscribeConfig(url=store.url)
    with Subscriber(config, tensors_of(model), store=store) as subscriber:
        before = follower_status(subscriber, {}, engine="follow", trouble=None)
        assert watcher.answered("a", before, 0.0).status.phases == {}
        receipt = present(subscriber.update())
        after = follower_status(subscriber, {}, engine="follow", trouble=None)
    assert tuple(receipt.phases) == PHASES
    assert {"fetch", "stage", "swap"} <= watcher.answered("a", after, 0.0).status.phases.keys()


def test_the_table_marks_what_is_pruned_and_tagged(chain: Chain) -> None:
    view = view_of(chain)
    newest = view.newest or 0
    pruned = PrunedRange(kind="delta", span=1, first=1, last=1, after=0.0)
    record = PruneRecord(
        chain="one", number=0, head=newest, maintainer="m", time=0.0, pruned=(pruned,)
    )
    tag = Tag(chain="one", name="good", number=0, version=0, state="s", manifest="m", time=0.0)
    rows = page_document(replace(view, prunes=record, tags=(tag,)), newest + 1, 50)["versions"]
    assert [row["version"] for row in rows if row["pruned"]] == [1]
    assert [row["version"] for row in rows if row["tags"] == ["good"]] == [0]


def versions(index: ChainIndex) -> list[int | None]:
    return [row.version if row else None for row in index.view.rows]


@pytest.mark.parametrize("kind", [MemoryStore, WideStore])
def test_a_chain_is_read_once_and_then_what_is_new(kind: type[MemoryStore]) -> None:
    store = kind()
    chain = chain_of(700, store)
    seen = FaultyStore(store)
    index = ChainIndex(seen)
    view = index.refresh(1.0)
    assert versions(index) == list(range(700))
    assert (view.chain, view.newest, view.trouble, len(view.rows)) == ("one", 699, "", 700)
    assert {edge.version for edge in view.edges} == set(range(700))
    seen.keys_read.clear()
    revision = view.revision
    assert index.refresh(2.0).revision == revision
    extend(chain, 2, chain.read(699))
    assert versions(index) == list(range(700))
    assert index.refresh(3.0).revision > revision
    assert versions(index) == list(range(702))
    old = {manifest_key(version) for version in range(690)}
    assert not old & set(seen.keys_read)


def test_a_store_without_a_chain_is_waited_for() -> None:
    store = MemoryStore()
    index = ChainIndex(store)
    assert index.refresh(1.0).trouble
    chain = create(store)
    view = index.refresh(2.0)
    assert (view.trouble, view.head, view.rows) == ("", None, ())
    extend(chain, 1)
    head = present(index.refresh(3.0).head)
    assert head.version == 0


def test_versions_stay_while_the_store_is_away() -> None:
    seen = FaultyStore(chain_of(3).store)
    index = ChainIndex(seen)
    before = index.refresh(1.0)
    seen.down = True
    view = index.refresh(2.0)
    assert view.trouble
    assert (view.rows, view.looked_at) == (before.rows, 1.0)
    seen.down = False
    assert index.refresh(3.0).trouble == ""


def test_lost_and_damaged_manifests_are_named_and_the_others_shown() -> None:
    chain = chain_of(8)
    chain.store.delete(manifest_key(2))
    chain.store.delete(manifest_key(3))
    chain.store.put(manifest_key(5), b"{}")
    index = ChainIndex(chain.store)
    view = index.refresh(1.0)
    assert versions(index) == [0, 1, None, None, 4, None, 6, 7]
    assert view.lost == (2, 3, 5)


def test_a_store_that_went_back_is_read_again() -> None:
    chain = chain_of(6)
    index = ChainIndex(chain.store)
    index.refresh(100.0)
    for version in (3, 4, 5):
        chain.store.delete(manifest_key(version))
    fresh = Chain.open(chain.store)
    fresh.commit(manifest_after(fresh.read(2), commit_id="other"))
    index.refresh(200.0)
    view = index.refresh(300.0)
    assert versions(index) == [0, 1, 2, 3]
    row = present(view.at(3))
    assert row.manifest == fresh.read(3).digest
    assert "5" in view.doubt


def test_tags_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(2)
    monkeypatch.setattr(tags, "is_reachable", lambda *_: True)  # manifests without payloads
    tags.set_(chain, "best", chain.read(1), time=0.0)
    assert [(tag.name, tag.version) for tag in ChainIndex(chain.store).refresh(1.0).tags] == [
        ("best", 1)
    ]


def test_an_error_in_the_middle_keeps_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(600)
    index = ChainIndex(chain.store)
    real = MemoryStore.get

    def get(self: MemoryStore, key: str, **limits: int) -> bytes:
        if key == manifest_key(580):
            raise StoreUnavailableError("away")
        return real(self, key, **limits)

    monkeypatch.setattr(MemoryStore, "get", get)
    view = index.refresh(1.0)
    assert view.trouble == "away"
    assert 512 <= len(view.rows) <= 580
    monkeypatch.undo()
    assert len(index.refresh(2.0).rows) == 600


# Alerts

LIMITS = HealthLimits(lag=2, silence_s=30.0)


@pytest.fixture(scope="module")
def six() -> Chain:
    return chain_of(6)


def kinds(six: Chain, *reports: watcher.ReplicaReport) -> list[str]:
    return [alert.kind.value for alert in watcher.alerts(view_of(six), reports, LIMITS, NOW)]


def test_a_replica_in_order_is_no_alert(six: Chain) -> None:
    assert kinds(six, report(six, 5), report(six, 3)) == []


@pytest.mark.parametrize(
    ("version", "changes", "expected"),
    [
        (2, {}, ["behind"]),
        (5, {"ready": False, "reason": "paused"}, ["not ready"]),
        (5, {"silence_s": 31.0}, ["cut off"]),
        (5, {"silence_s": 31.0, "following": False}, []),  # versions are announced to it
        (5, {"silence_s": 31.0, "pinned": True}, []),
        (2, {"silence_s": 31.0, "ready": False}, ["cut off", "not ready", "behind"]),
        (5, {"chain": "two"}, ["another chain"]),
        (5, {"manifest": "0" * 64}, ["another chain"]),
        (9, {}, ["another chain"]),
        (5, {"head": 9}, ["another chain"]),
        (None, {"ready": False, "chain": None, "head": None}, ["not ready"]),
    ],
)
def test_each_thing_that_is_wrong_is_named(
    six: Chain, version: int | None, changes: dict[str, Any], expected: list[str]
) -> None:
    found = watcher.alerts(view_of(six), [report(six, version, **changes)], LIMITS, NOW)
    assert [alert.kind.value for alert in found] == expected
    assert all(alert.engine == ENGINE and alert.message for alert in found)


def test_a_replica_that_does_not_answer_is_silent(six: Chain) -> None:
    assert kinds(six, watcher.ReplicaReport(engine=ENGINE)) == []  # not asked yet
    assert kinds(six, watcher.ReplicaReport(engine=ENGINE, trouble="refused")) == ["silent"]
    assert kinds(six, replace(report(six, 5), trouble="refused")) == ["silent"]
    hanging = replace(report(six, 5), answered_at=NOW - 31)
    assert kinds(six, hanging) == ["silent"]


def test_a_version_committed_after_the_last_look_is_no_lie(six: Chain) -> None:
    ahead = watcher.answered(ENGINE, status(six, 5, head=9), NOW + 1)
    assert kinds(six, ahead) == ["behind"]  # for the newest version is that which anybody saw
    assert watcher.newest_known(view_of(six), [ahead]) == 9


def test_a_lie_does_not_make_others_late(six: Chain) -> None:
    liar = replace(report(six, 5, head=10**9), engine="http://liar")
    assert watcher.newest_known(view_of(six), [liar, report(six, 5)]) == 5
    assert kinds(six, liar, report(six, 5)) == ["another chain"]


def test_lost_manifests_and_stores_are_alerts_of_the_chain() -> None:
    chain = chain_of(6)
    chain.store.delete(manifest_key(3))
    view = view_of(chain)
    found = watcher.alerts(replace(view, trouble="no answer"), [], LIMITS, NOW)
    assert [alert.kind for alert in found] == [watcher.AlertKind.STORE, watcher.AlertKind.HISTORY]
    assert "versions 3" in found[1].message


def test_answers_are_cut_and_out_of_range_numbers_unknown(six: Chain) -> None:
    wild = report(six, 5, reason="\x1b[31m" + "x" * 10_000, head=10**30, silence_s=float("inf"))
    assert len(wild.status.reason) == LONGEST + 1
    assert "\x1b" not in wild.status.reason
    assert (wild.status.head, wild.status.silence_s) == (None, None)
