import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Event, Semaphore
from typing import Any
from unittest import mock

import msgspec
import pytest

from deltachain import errors
from deltachain.control.comparison import ReplicaRow, compare
from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import Roster
from deltachain.presence import record as record_module
from deltachain.presence import writer as writer_module
from deltachain.presence.record import (
    LARGEST,
    TEXT,
    PresenceBoard,
    PresenceFound,
    PresenceRecord,
    encode_record,
    parse_record,
)
from deltachain.presence.writer import PresenceWriter, follower_status, interval_s, record_key
from deltachain.publish import PublishConfig, Publisher
from deltachain.status import HealthLimits, Status
from deltachain.store import MemoryStore, Store, open_store
from deltachain.store.hf.store import open_hf
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel
from tests.support.values import eventually
from tests.unit.control.replicas import status


def document(**fields: Any) -> dict[str, Any]:
    made = PresenceRecord(time=1.0, status=status(**fields))
    found: dict[str, Any] = json.loads(encode_record(made))
    return found


def parsed(found: object) -> PresenceRecord:
    return parse_record(json.dumps(found).encode(), "r.json")


def test_what_is_written_is_read() -> None:
    record = PresenceRecord(time=1.5, status=status(7, head=9), software={"deltachain": "1"})
    found = parse_record(encode_record(record), "r.json")
    assert (found.status, found.ended) == (record.status, None)


def test_fields_of_a_newer_writer_are_left_alone() -> None:
    found = document()
    found["later"] = found["status"]["later"] = {"a": [1]}
    assert parsed(found).status.version == 7


NO_RECORDS = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    b"[" + b"[]," * 80_000 + b"[]]",
    b'{"presence":1,"time":0,"status":' + b"[" * 50_000,
]
ABSENT = Ellipsis  # with an id that all workers of a run agree on


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence", 2),
        ("time", "now"),
        ("ended", 7),
        ("software", {"a": 1}),
        ("status", None),
        ("status.version", "7"),
        ("status.version", -1),
        ("status.version", 1.5),
        ("status.head", 1 << 53),
        ("status.head", 10**30),
        ("status.silence_s", -1.0),
        ("status.silence_s", 1e308),
        ("status.silence_s", math.nan),
        ("status.ready", "yes"),
        ("status.url", None),
        ("status.url", ABSENT),
        ("status.phases", {"look": "x"}),
    ],
    ids=str,
)
def test_a_wrong_type_or_number_is_malformed(field: str, value: object) -> None:
    found = document()
    *path, name = field.split(".")
    place = found[path[0]] if path else found
    place[name] = value
    if value is ABSENT:
        del place[name]
    with pytest.raises(errors.MalformedError, match="no presence record"):
        parsed(found)


def test_long_texts_are_cut_and_details_are_not_kept() -> None:
    found = parsed(
        document(reason="x" * 9999, trouble="y" * 9999, engine="z" * 9999, ranks=[{"a": 1}])
        | {"ended": "w" * 9999}
    )
    texts = (found.status.reason, found.status.trouble, found.status.engine, found.ended or "")
    assert [len(text) for text in texts] == [TEXT] * 4
    assert found.status.ranks == []


def test_a_record_is_small_whatever_a_replica_has_to_say() -> None:
    large = status(
        ranks=[{"unused": "x" * 9999} for _ in range(64)],
        on_host={f"layer.{n}": "y" * 999 for n in range(999)},
        trouble="z" * (2 * LARGEST),
    )
    data = encode_record(PresenceRecord(time=1.0, status=large))
    assert len(data) <= LARGEST
    assert parse_record(data, "r.json").status.version == 7


def test_a_record_has_the_fields_of_the_status_route() -> None:
    found = document()
    assert found["status"].keys() == msgspec.to_builtins(status()).keys()


def test_a_follower_without_its_folder_and_an_agent_without_its_server_are_not_ready(
    tmp_path: Path,
) -> None:
    url, folder = str(tmp_path / "chain"), tmp_path / "out"
    with Publisher(PublishConfig(url=url)) as publisher:
        publisher.attach(TinyModel())
        publisher.flush()
    with Subscriber(SubscribeConfig(url=url), folder) as subscriber:
        subscriber.update()
        assert follower_status(subscriber, {}, engine="follow", trouble=None).ready
        away = errors.ControlPlaneError("http://127.0.0.1:1 does not answer")
        status = follower_status(subscriber, {}, engine="agent", trouble=away)
        assert (status.ready, status.reason) == (False, "http://127.0.0.1:1 does not answer")
        shutil.rmtree(folder)
        status = follower_status(subscriber, {}, engine="follow", trouble=None)
        assert not status.ready
        assert "was removed" in status.reason


HOUR = 3600.0


def record(version: int | None = 7, ended: str | None = None, **fields: object) -> bytes:
    made = PresenceRecord(time=time.time(), status=status(version, **fields), ended=ended)
    return encode_record(made)


def rows_of(url: str, silence_s: float = 60.0) -> dict[str, ReplicaRow]:
    with Roster([], boards=[url]) as roster:
        answers = dict(roster.ask(ReplicaClient.status))
        named = {one: one.removeprefix(roster.boards[0]).strip("/") for one in answers}
    rows = compare(answers, HealthLimits(silence_s=silence_s))
    return {named[row.engine]: row for row in rows}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "replicas")


def put(url: str, name: str, data: bytes) -> None:
    with closing(open_store(url)) as store:
        store.put(f"{name}.json", data)


def test_a_store_carries_presences(url: str) -> None:
    asked = Semaphore(0)

    def source() -> Status:
        asked.release()
        return status(7)

    writer = PresenceWriter(
        url, source, engine="vllm/1", place="a", apart_from=["s3://elsewhere/run"]
    )
    with writer:
        assert asked.acquire(timeout=60)
        while not (found := _look(url)):
            pass
        (name,) = found
        assert name.endswith(writer.key.removesuffix(".json"))
        seen = found[name]
        assert isinstance(seen, PresenceFound)
        assert seen.status.version == 7
        assert 0 <= seen.age_s < 60
        rows = rows_of(url)
    assert [(row.health, row.lag) for row in rows.values()] == [("ready", 0)]
    assert _look(url) == {}


def _look(url: str) -> dict[str, PresenceFound | errors.DeltaChainError]:
    with closing(PresenceBoard(url)) as board:
        try:
            return dict(board.look())
        except errors.ControlPlaneError:
            return {}


def test_its_age_is_by_the_clock_of_the_store(url: str) -> None:
    """Whatever a record says of the time: clocks of replicas are not trusted."""
    old = encode_record(PresenceRecord(time=time.time() + 9 * HOUR, status=status(3)))
    put(url, "a", old)
    (found,) = _look(url).values()
    assert isinstance(found, PresenceFound)
    assert found.age_s < 60


def test_who_has_not_written_for_long_is_silent(url: str) -> None:
    put(url, "dead", record(7, head=9))
    put(url, "alive", record(9))
    file = Path(url) / "dead.json"
    before = time.time() - HOUR
    os.utime(file, (before, before))
    rows = rows_of(url)
    assert [*rows] == ["dead", "alive"]
    dead = rows["dead"]
    assert (dead.health, dead.lag, dead.is_alarming) == ("silent", 2, True)
    assert "3600 s" in dead.why[0]
    assert dead.hint
    assert rows["alive"].health == "ready"
    assert rows_of(url, silence_s=2 * HOUR)["dead"].health == "behind"


def test_a_clock_that_is_behind_the_stores_finds_nobody_silent_by_mistake(url: str) -> None:
    """A folder may be on a server whose clock is ahead of this machine's."""
    for name, ahead_s in (("new", 2 * HOUR), ("old", HOUR)):
        put(url, name, record())
        at = time.time() + ahead_s
        os.utime(Path(url) / f"{name}.json", (at, at))
    rows = rows_of(url)
    assert {name: row.health for name, row in rows.items()} == {"new": "ready", "old": "silent"}


def test_who_ended_cleanly_is_no_row_and_who_failed_is_one(url: str) -> None:
    put(url, "told", record(ended=""))
    put(url, "fallen", record(ended="two histories"))
    rows = rows_of(url)
    assert [*rows] == ["fallen"]
    assert (rows["fallen"].health, rows["fallen"].why[0]) == ("failed", "it ended: two histories")


def test_a_board_without_anybody_says_so(url: str) -> None:
    ((name, row),) = rows_of(url).items()
    assert (name, row.health) == ("", "failed")
    assert "no presence of a replica" in row.why[0]
    assert "DELTACHAIN_PRESENCE_URL" in row.hint


def test_hostile_records_are_rows_with_a_reason(url: str) -> None:
    wrong = record().replace(b'"version":7', b'"version":[7]')
    large = b" " * (LARGEST + 1)
    hostile = dict(enumerate([*NO_RECORDS, os.urandom(1000), wrong, large]))
    for number, data in hostile.items():
        put(url, str(number), data)
    put(url, "good", record())
    rows = rows_of(url)
    assert rows.pop("good").health == "ready"
    assert rows.keys() == set(map(str, hostile))
    for row in rows.values():
        assert row.health == "failed"
        assert "no presence record" in row.why[0]


def test_a_record_of_a_gigabyte_is_not_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(url, "huge", b"")
    os.truncate(Path(url) / "huge.json", 1 << 30)
    monkeypatch.setattr("deltachain.store.FileStore.get", lambda *_, **__: pytest.fail("read"))
    (row,) = rows_of(url).values()
    assert "1073741824 bytes" in row.why[0]


def test_other_objects_are_left_alone(url: str) -> None:
    put(url, "good", record())
    with closing(open_store(url)) as store:
        store.put("notes.txt", b"x")
        store.put("folder/other.json", b"x")
    assert rows_of(url).keys() == {"good"}


def test_more_records_than_are_read_are_said(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "MOST", 2)
    for name in ("a", "b", "c"):
        put(url, name, record())
    rows = rows_of(url)
    assert rows.keys() == {"", "a", "b"}
    assert "more than 2 records" in rows[""].why[0]


class Counted(MemoryStore):
    reads = 0

    def get(self, key: str, **options: int) -> bytes:
        self.reads += 1
        return super().get(key, **options)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(record_module, "open_store", lambda _: made)
    return made


def test_only_what_changed_is_read_again(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    counted.put("a.json", record(1))
    counted.put("b.json", b"wrong")
    board = PresenceBoard("memory://x")
    monkeypatch.setattr(
        "deltachain.presence.record.time.monotonic", iter(range(0, 1000, 10)).__next__
    )
    assert len(board.look()) == 2
    counted.put("a.json", record(22))
    found = board.look()
    assert counted.reads == 3
    versions = [one.status.version for one in found.values() if isinstance(one, PresenceFound)]
    assert versions == [22]
    counted.delete("a.json")
    assert [type(one) for one in board.look().values()] == [errors.MalformedError]


def test_looks_at_once_ask_the_store_once(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``fleet --watch`` may be told to look more often than a store's budget allows."""
    counted.put("a.json", record(1))
    board = PresenceBoard("memory://x")
    now = [0.0]
    monkeypatch.setattr("deltachain.presence.record.time.monotonic", lambda: now[0])
    (first,) = board.look().values()
    counted.delete("a.json")
    now[0] += 0.5
    (second,) = board.look().values()
    assert isinstance(first, PresenceFound)
    assert isinstance(second, PresenceFound)
    assert second.age_s == pytest.approx(first.age_s + 0.5, abs=0.01)
    now[0] += 0.6
    with pytest.raises(errors.ControlPlaneError):
        board.look()


def test_a_record_removed_meanwhile_is_no_row(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted.put("a.json", record())
    counted.put("b.json", record())
    listed = list(counted.list())
    counted.delete("a.json")
    monkeypatch.setattr(counted, "list", lambda: iter(listed))
    assert len(PresenceBoard("memory://x").look()) == 1


# Who writes


class Source:
    """A status that knows how often it was asked for."""

    def __init__(self) -> None:
        self.asked = Semaphore(0)

    def __call__(self) -> Status:
        self.asked.release()
        return status()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.asked.acquire(timeout=60)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """The store that a writer opens, whatever its URL is."""
    made = FaultyStore(MemoryStore())
    monkeypatch.setattr(writer_module, "open_store", lambda _: made)
    return made


@pytest.fixture
def source() -> Source:
    return Source()


def writer(
    source: Callable[[], Status], url: str = "memory://board", **options: float
) -> PresenceWriter:
    return PresenceWriter(
        url, source, engine="vllm/1", place="a:1", apart_from=["s3://b/x"], **options
    )


def records(store: Store) -> list[PresenceRecord]:
    return [parse_record(store.get(info.key), info.key) for info in store.list()]


def test_it_is_written_again_and_again_and_removed_at_the_end(
    store: FaultyStore, source: Source
) -> None:
    with writer(source, every_s=0.01) as made:
        source.wait(4)
        assert [info.key for info in store.list()] == [made.key]
        (found,) = records(store)
        assert (found.status, found.ended) == (status(), None)
    assert records(store) == []
    made.close()  # again


def test_two_replicas_of_one_host_name_and_place_have_a_record_each(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [Source(), Source()]
    with writer(sources[0], every_s=0.01) as one, writer(sources[1], every_s=0.01) as other:
        eventually(lambda: one.key != other.key)
        for source in sources:
            source.wait(10)
        assert len({info.key for info in store.list()} | {one.key, other.key}) == 2
        (logged,) = caplog.messages
        assert logged.startswith("another replica writes the presence ")
    assert records(store) == []


def test_one_that_starts_again_keeps_its_record(store: FaultyStore) -> None:
    source = Source()
    first = writer(source, every_s=0.01)
    source.wait(3)
    first.fail("another start follows")
    with writer(source, every_s=0.01) as again:
        source.wait(10)
        assert [info.key for info in store.list()] == [first.key] == [again.key]


def test_one_that_may_not_read_its_record_renews_it(store: FaultyStore, source: Source) -> None:
    refused = errors.StorePermissionError("no right to read")
    with mock.patch.object(store, "get", side_effect=refused), writer(source, every_s=0.01) as made:
        source.wait(4)
        assert not made._failures


@pytest.mark.parametrize(
    "error", [None, KeyboardInterrupt(), errors.ForkedChainError("two histories")]
)
@pytest.mark.parametrize("may_delete", [True, False])
def test_only_an_error_leaves_its_reason_and_where_nothing_may_be_deleted_the_end(
    store: FaultyStore, source: Source, error: BaseException | None, *, may_delete: bool
) -> None:
    refused = errors.StorePermissionError("no right to delete", key="", url="memory://board")
    with ExitStack() as stack:
        if not may_delete:
            stack.enter_context(mock.patch.object(store, "delete", side_effect=refused))
        stack.enter_context(suppress(KeyboardInterrupt, errors.ForkedChainError))
        stack.enter_context(writer(source))
        source.wait(1)
        if error:
            raise error
    ended = [found.ended for found in records(store)]
    if isinstance(error, errors.ForkedChainError):
        assert ended == ["two histories"]
    else:
        assert ended == ([] if may_delete else [""])


def test_failures_are_told_once_and_counted(
    store: FaultyStore, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    store.add(Fault("fail", "", times=3))
    with caplog.at_level(logging.WARNING), writer(source, every_s=0.01) as made:
        source.wait(6)
        figures = {figure.name: figure.value for figure in made.figures()}
    assert figures["presence_failures"] == 3
    assert figures["presence_timestamp_seconds"] > 1e9
    assert caplog.text.count("presence of this replica is not written") == 1


@pytest.mark.usefixtures("store")
def test_a_status_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    asked = Semaphore(0)

    def broken() -> Status:
        asked.release()
        raise RuntimeError("nobody foresaw this")

    with writer(broken, every_s=0.01) as made:
        assert all(asked.acquire(timeout=60) for _ in range(3))
        assert next(f.value for f in made.figures() if f.name == "presence_failures") >= 2
    assert "nobody foresaw this" in caplog.text


def test_a_store_that_hangs_does_not_hold_up_the_end(
    store: FaultyStore, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CLOSE_S", 0.05)
    released = Event()

    def hang(*_: object) -> str:
        released.wait()
        return ""

    monkeypatch.setattr(store, "put", hang)
    made = writer(source)
    source.wait(1)
    made.close()
    released.set()


@pytest.mark.usefixtures("store")
def test_without_a_thread_the_replica_serves_on(
    source: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "started", lambda _: False)
    with writer(source) as made:
        assert {figure.name: figure.value for figure in made.figures()} == {"presence_failures": 1}
    assert "no thread" in caplog.text


@pytest.mark.parametrize("url", ["s3://b/x", "s3://b/x/replicas", "s3://b"])
def test_it_is_never_written_into_a_chain(source: Source, url: str) -> None:
    with pytest.raises(errors.ConfigError, match="the chain s3://b/x"):
        writer(source, url)
    assert not source.asked.acquire(blocking=False)


def test_the_rate_is_a_share_of_the_stores_budget() -> None:
    assert interval_s(MemoryStore().capabilities) == 10
    with closing(open_hf("hf://buckets/me/b", {"token": "hf_none"})) as polled:
        assert interval_s(polled.capabilities) == 30  # 10 of 100 requests in 5 minutes


def test_a_record_has_the_same_key_after_a_restart_and_another_than_its_neighbours() -> None:
    key = record_key("vllm/0.32.0", "0.0.0.0:8000")
    assert key == record_key("vllm/0.33.0", "0.0.0.0:8000")
    others = {record_key("vllm/1", "0.0.0.0:8001"), record_key("sglang/1", "0.0.0.0:8000")}
    assert key not in others
    assert len(others) == 2


@pytest.mark.parametrize("host", ["", "a/b", "..", "x" * 300, "\x1b[31mred", "späte"], ids=repr)
def test_any_host_name_makes_a_valid_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    MemoryStore().put(record_key("follow", "/out"), b"")
