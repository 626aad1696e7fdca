"""A replica writes its presence, and nothing that goes wrong there reaches it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Semaphore
from unittest import mock

import pytest

from deltachain.errors import ConfigError, ForkedChainError, StorePermissionError
from deltachain.presence import writer as module
from deltachain.presence.record import PresenceRecord, parse_record
from deltachain.presence.writer import PresenceWriter, interval_s, record_key
from deltachain.status import Status
from deltachain.store import Capabilities, MemoryStore, Store
from deltachain.store.hf.store import open_hf
from tests.support.faults import Fault, FaultyStore
from tests.support.values import eventually
from tests.unit.control.replicas import status


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
    monkeypatch.setattr(module, "open_store", lambda _: made)
    return made


@pytest.fixture
def source() -> Source:
    return Source()


def writer(source: Callable[[], Status], **options: float) -> PresenceWriter:
    return PresenceWriter(
        "memory://board", source, engine="vllm/1", place="a:1", apart_from=["s3://b/x"], **options
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
    refused = StorePermissionError("no right to read")
    with mock.patch.object(store, "get", side_effect=refused), writer(source, every_s=0.01) as made:
        source.wait(4)
        assert not made._failures


def test_an_error_leaves_its_reason(store: FaultyStore, source: Source) -> None:
    with pytest.raises(ForkedChainError), writer(source):
        raise ForkedChainError("two histories", version=7)
    (found,) = records(store)
    assert found.ended == "two histories"


def test_an_interrupt_is_a_clean_end(store: FaultyStore, source: Source) -> None:
    made = writer(source)
    source.wait(1)
    with pytest.raises(KeyboardInterrupt), made:
        raise KeyboardInterrupt
    assert records(store) == []


def test_where_nothing_may_be_deleted_it_says_that_it_ended(
    store: FaultyStore, source: Source
) -> None:
    store.delete = _refuse  # type: ignore[method-assign]
    with writer(source):
        source.wait(1)
    (found,) = records(store)
    assert found.ended == ""


def _refuse(key: str) -> None:
    raise StorePermissionError(f"no right to delete {key}", key=key, url="memory://board")


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
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
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
    monkeypatch.setattr(module, "started", lambda _: False)
    with writer(source) as made:
        assert {figure.name: figure.value for figure in made.figures()} == {"presence_failures": 1}
    assert "no thread" in caplog.text


def test_it_is_never_written_into_a_chain(source: Source) -> None:
    for url in ("s3://b/x", "s3://b/x/replicas", "s3://b"):
        with pytest.raises(ConfigError, match="the chain s3://b/x"):
            PresenceWriter(url, source, engine="vllm", place="", apart_from=["s3://b/x"])
    assert not source.asked.acquire(blocking=False)


@pytest.fixture
def polls() -> Iterator[Capabilities]:
    with closing(open_hf("hf://buckets/me/b", {"token": "hf_none"})) as store:
        yield store.capabilities


def test_the_rate_is_a_share_of_the_stores_budget(polls: Capabilities) -> None:
    assert interval_s(MemoryStore().capabilities) == 10
    assert interval_s(polls) == 30  # 10 of 100 requests in 5 minutes


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


def test_a_folder_that_cannot_be_written_to_is_a_warning(
    tmp_path: Path, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    made = PresenceWriter(
        str(tmp_path / "file"), source, engine="f", place="", apart_from=[], every_s=0.01
    )
    with made:
        source.wait(3)
    assert caplog.text.count("is not written") == 1
