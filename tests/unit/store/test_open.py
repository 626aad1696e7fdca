import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deltachain import store as stores
from deltachain.errors import ConfigError
from deltachain.retry import Backoff
from deltachain.store import FileStore, MemoryStore, Store, check_key, open_store
from deltachain.store.calls import Calls
from deltachain.store.hf.api import Budget
from deltachain.testing.store import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def reopen(self, store: MemoryStore) -> Callable[[], Store]:
        return lambda: store


def test_memory_stores_are_shared_by_name_alone() -> None:
    first = open_store("memory://test-memory/shared")
    first.put("a", b"data")
    first.close()
    assert open_store("memory://test-memory/shared") is first
    assert MemoryStore.named("test-memory/shared").get("a") == b"data"
    assert first.url == "memory://test-memory/shared"
    first, second = MemoryStore(), MemoryStore()
    first.put("a", b"data")
    assert second.find("a") is None
    assert first.url != second.url


@pytest.mark.parametrize("name", ["", "a b", "../a"])
def test_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        MemoryStore.named(name)


DATE = "Mon, 23 Nov 2026 15:00:00 GMT"


@pytest.fixture
def calls() -> Calls:
    return Calls("s3://bucket", Backoff(0.1, 1.0))


@pytest.mark.parametrize("date", ["", None, "now", "Mon, 99 Nov 2026 15:00:00 GMT", "\x00" * 99])
def test_it_goes_on_between_answers_and_from_what_is_no_date(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, date: str | None
) -> None:
    elapsed = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: elapsed[0])
    assert calls.now() is None
    calls.hear(DATE)
    elapsed[0] += 90
    calls.hear(date)
    assert calls.now() == 1_795_446_000 + 90


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        with self._lock:
            self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budget(clock: Clock, calls: int, window_s: float) -> Budget:
    return Budget(calls, window_s, clock=clock, sleep=clock.sleep)


def test_next_request_waits_for_the_oldest_to_leave(clock: Clock) -> None:
    spending = budget(clock, 2, 10)
    for at in (100, 104):
        clock.now = at
        assert spending.take(0) == 0
    assert spending.take(60) == 0
    assert clock.now == 110
    assert spending.take(60) == 0
    assert clock.now == 114


def test_what_left_unasked_counts_for_those_that_come_after(clock: Clock) -> None:
    spending = budget(clock, 3, 10)
    assert spending.take(0) == 0
    spending.charge(3)
    assert spending.take(0) == 10
    assert spending.take(60) == 0
    assert clock.now == 110


def test_wait_beyond_the_limit_is_told_and_not_begun(clock: Clock) -> None:
    spending = budget(clock, 1, 300)
    assert spending.take(0) == 0
    clock.now = 150
    assert spending.take(60) == 250
    assert clock.now == 150
    clock.now = 400
    assert spending.take(0) == 0  # what was refused was not accounted for


def test_no_stretch_has_more_requests_than_allowed(clock: Clock) -> None:
    spending = budget(clock, 7, 30)
    sent: list[float] = []
    for number in range(100):
        clock.sleep(0.1 + number * 7919 % 13 / 3)
        assert spending.take(1000) == 0
        sent.append(clock.now)
    gaps = [later - first for first, later in zip(sent, sent[7:], strict=False)]
    assert min(gaps) >= 30
    assert min(gaps) < 31  # it waits no longer than it has to


def test_threads_share_one_budget() -> None:
    spending = Budget(50, 300)
    with ThreadPoolExecutor(8) as pool:
        waits = list(pool.map(lambda _: spending.take(0), range(200)))
    assert waits.count(0.0) == 50
    assert all(290 < wait <= 300 for wait in waits if wait)


def test_paths_and_file_urls_are_the_same_store(tmp_path: Path) -> None:
    folder = tmp_path / "run 1#?%41ä"
    for url in (folder, str(folder), folder.as_uri(), f"file://localhost{folder.as_uri()[7:]}"):
        opened = open_store(url)
        assert isinstance(opened, FileStore)
        assert opened.url == folder.as_uri()
    open_store(folder).put("a", b"data")
    assert open_store(open_store(folder).url).get("a") == b"data"


def test_paths_are_relative_to_here_and_a_tilde_is_the_home_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for place in ("~/run", Path("~/run")):
        assert open_store(place).url == (tmp_path / "home" / "run").as_uri()
    assert open_store("runs/~x").url == (tmp_path / "runs" / "~x").as_uri()
    opened = open_store("runs/1")
    monkeypatch.chdir("/")
    opened.put("a", b"data")
    assert (tmp_path / "runs/1/a").read_bytes() == b"data"


@pytest.mark.parametrize("place", [None, "", 3, b"folder", ["folder"]])
def test_what_is_no_location_is_refused(place: Any) -> None:
    with pytest.raises(ConfigError, match="URL or a path") as caught:
        open_store(place)
    assert "s3://" in caught.value.hint


@pytest.mark.parametrize(
    "place",
    [
        *("s3//chains/run1", "S3//chains/run1", "s3:chains/run1", "s3;//chains/run1"),
        *("hf//buckets/me/b/r", "gs//b/run", "az:c/run", "file:chains/run", "memory//a"),
        *(" s3://user:secret@b/run", "'s3://b/secret'", "url=s3://b/secret"),
        *("https//host/secret", Path("s3:b/run")),
    ],
)
def test_what_is_nearly_a_url_is_no_folder(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a store") as caught:
        open_store(place)
    assert "a URL begins with" in caught.value.hint
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "place", ["s3/run", "./s3//run", "runs//1", "a:b", "gs", "/a:b//c", "b/s3:c"]
)
def test_what_is_not_nearly_a_url_is_a_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_store(place), FileStore)


def test_opening_writes_nothing(tmp_path: Path) -> None:
    opened = open_store(tmp_path / "absent")
    assert list(opened.list()) == []
    assert opened.find("a") is None
    opened.delete("a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        *("nfs://user:secret@host/x", "s3://key:secret@bucket/x", "file://user:secret@host/x"),
        *("file:///x?token=secret", "file:///x#secret", "memory://x?token=secret"),
        *("", "a\0b", "file:///", "file://folder", "file:///a%00b", "memory://", "memory:///"),
    ],
)
def test_refusal_does_not_show_what_may_be_a_credential(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)
    if "secret" in url:
        assert url.partition(":")[0] in str(caught.value)


def test_check_key_returns_the_key_and_names_the_bad_segment() -> None:
    assert check_key("deltas/1/part.safetensors") == "deltas/1/part.safetensors"
    with pytest.raises(ConfigError, match=r"'\.\.' is not a name"):
        check_key("deltas/../head.json")


def test_exports_are_complete() -> None:
    assert sorted(stores.__all__) == stores.__all__
    assert all(name in vars(stores) for name in stores.__all__)
