import json
import os
import shutil
import time
from contextlib import closing
from pathlib import Path
from threading import Semaphore
from typing import Any

import msgspec
import pytest

from deltachain.control.comparison import ReplicaRow, compare
from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import Roster
from deltachain.errors import ControlPlaneError, DeltaChainError, MalformedError
from deltachain.presence import record as module
from deltachain.presence.record import (
    LARGEST,
    TEXT,
    PresenceBoard,
    PresenceFound,
    PresenceRecord,
    encode_record,
    parse_record,
)
from deltachain.presence.writer import PresenceWriter, follower_status
from deltachain.publish import PublishConfig, Publisher
from deltachain.status import HealthLimits, Status
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.models import TinyModel
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


@pytest.mark.parametrize(
    "data",
    [
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
    ],
)
def test_what_is_no_record_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError, match="no presence record"):
        parse_record(data, "r.json")


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
        ("status.ready", "yes"),
        ("status.url", None),
        ("status.phases", {"look": "x"}),
    ],
    ids=str,
)
def test_a_wrong_type_or_number_is_malformed(field: str, value: object) -> None:
    found = document()
    *path, name = field.split(".")
    place = found[path[0]] if path else found
    place[name] = value
    with pytest.raises(MalformedError, match="no presence record"):
        parsed(found)


def test_a_field_that_is_missing_is_malformed() -> None:
    found = document()
    del found["status"]["url"]
    with pytest.raises(MalformedError, match="url"):
        parsed(found)


def test_a_number_that_is_none_is_malformed() -> None:
    text = json.dumps(document()).replace('"silence_s": 0.5', '"silence_s": NaN')
    with pytest.raises(MalformedError):
        parse_record(text.encode(), "r.json")


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
        away = ControlPlaneError("http://127.0.0.1:1 does not answer")
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


def test_every_store_carries_presences(board_url: str) -> None:
    asked = Semaphore(0)

    def source() -> Status:
        asked.release()
        return status(7)

    writer = PresenceWriter(
        board_url, source, engine="vllm/1", place="a", apart_from=["s3://elsewhere/run"]
    )
    with writer:
        assert asked.acquire(timeout=60)
        while not (found := _look(board_url)):
            pass
        (name,) = found
        assert name.endswith(writer.key.removesuffix(".json"))
        seen = found[name]
        assert isinstance(seen, PresenceFound)
        assert seen.status.version == 7
        assert 0 <= seen.age_s < 60
        rows = rows_of(board_url)
    assert [(row.health, row.lag) for row in rows.values()] == [("ready", 0)]
    assert _look(board_url) == {}


def _look(url: str) -> dict[str, PresenceFound | DeltaChainError]:
    with closing(PresenceBoard(url)) as board:
        try:
            return dict(board.look())
        except ControlPlaneError:
            return {}


def test_its_age_is_by_the_clock_of_the_store(board_url: str) -> None:
    """Whatever a record says of the time: clocks of replicas are not trusted."""
    old = encode_record(PresenceRecord(time=time.time() + 9 * HOUR, status=status(3)))
    put(board_url, "a", old)
    (found,) = _look(board_url).values()
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


HOSTILE = {
    "empty": b"",
    "nested": b"[" * 200_000,
    "deep": b'{"presence":1,"time":1,"status":{"url":' * 3000,
    "types": record().replace(b'"version":7', b'"version":[7]'),
    "binary": os.urandom(1000),
    "other": b'{"format":1,"chain":"x"}',
    "large": b" " * (LARGEST + 1),
}


def test_hostile_records_are_rows_with_a_reason(url: str) -> None:
    for name, data in HOSTILE.items():
        put(url, name, data)
    put(url, "good", record())
    rows = rows_of(url)
    assert rows.keys() == {*HOSTILE, "good"}
    assert rows["good"].health == "ready"
    for name in HOSTILE:
        assert rows[name].health == "failed"
        assert "no presence record" in rows[name].why[0]


def test_a_record_of_a_gigabyte_is_not_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(url, "huge", b"")
    os.truncate(Path(url) / "huge.json", 1 << 30)
    monkeypatch.setattr("deltachain.store.FileStore.get", lambda *_, **__: pytest.fail("read"))
    (row,) = rows_of(url).values()
    assert "1073741824 bytes" in row.why[0]


def test_another_chains_replica_is_in_doubt(url: str) -> None:
    for name in ("a", "b"):
        put(url, name, record())
    put(url, "stranger", record(chain="d" * 32))
    rows = rows_of(url)
    assert rows["stranger"].health == "in doubt"
    assert "another chain" in rows["stranger"].why[0]


def test_other_objects_are_left_alone(url: str) -> None:
    put(url, "good", record())
    with closing(open_store(url)) as store:
        store.put("notes.txt", b"x")
        store.put("folder/other.json", b"x")
    assert rows_of(url).keys() == {"good"}


def test_more_records_than_are_read_are_said(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
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
    monkeypatch.setattr(module, "open_store", lambda _: made)
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
    assert [type(one) for one in board.look().values()] == [MalformedError]


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
    with pytest.raises(ControlPlaneError):
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
