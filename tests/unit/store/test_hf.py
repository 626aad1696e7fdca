from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltachain.errors import AlreadyExistsError, ConfigError, MalformedError, ObjectNotFoundError
from deltachain.store import Store, open_store
from deltachain.testing.store import StoreContract, pattern
from tests.support.hub.server import HubServer
from tests.unit.store.calls import calls_of

Open = Callable[..., Store]


class TestHfStore(StoreContract):
    """With a single writer, as the Hub's API allows."""

    race_rounds = 5

    @pytest.fixture
    def store(self, opened: Open) -> Store:
        return opened()

    @pytest.fixture
    def reopen(self, opened: Open) -> Open:
        return opened


class TestHfStoreWithGateway(StoreContract):
    """With conditional writes."""

    race_rounds = 5

    @pytest.fixture
    def reopen(self, opened: Open, gateway: dict[str, str]) -> Open:
        return lambda: opened(**gateway)

    @pytest.fixture
    def store(self, reopen: Open) -> Store:
        return reopen()


def test_capabilities(opened: Open, gateway: dict[str, str]) -> None:
    alone, shared = opened().capabilities, opened(**gateway).capabilities
    assert (alone.conditional_put, shared.conditional_put) == (False, True)
    assert (alone.list_consistent, alone.probes, alone.poll_s) == (False, 1000, 5.0)


def test_without_conditions_a_racer_always_returns_and_the_object_is_whole(opened: Open) -> None:
    # What single-writer mode does not promise is that only one does: that is what makes a
    # publisher read its manifest back.
    writers = [opened() for _ in range(4)]
    barrier = threading.Barrier(len(writers))

    def attempt(number: int) -> bool:
        barrier.wait()
        try:
            writers[number].put_if_absent("a", bytes([number]) * 1000)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(writers)) as pool:
        returned = list(pool.map(attempt, range(len(writers))))
    data = writers[0].get("a")
    assert data == bytes([data[0]]) * 1000
    assert returned[data[0]]


def test_pinned_read_outlives_overwrite_and_delete(opened: Open) -> None:
    store = opened()
    pin = store.put("a", b"old content")
    store.put("a", b"new")
    assert bytes(store.read("a", nbytes=11, pin=pin)) == b"old content"
    store.delete("a")
    assert bytes(opened().read("a", nbytes=11, pin=pin)) == b"old content"


def test_find_tells_the_pin_that_put_returned(opened: Open) -> None:
    store = opened()
    pins = {key: store.put(key, key.encode()) for key in ("a", "b/c")}
    assert {key: info.pin for key, info in store.find_all([*pins, "absent"]).items()} == pins
    assert {info.key: info.pin for info in store.list()} == pins


def test_unknown_content_is_not_found(opened: Open) -> None:
    with pytest.raises(ObjectNotFoundError) as caught:
        opened().read("a", nbytes=5, pin="ab" * 32)
    assert caught.value.key == "a"


@pytest.mark.parametrize("pin", ["x", "zz" * 32, "ab" * 31, "../" * 21 + "a", "AB" * 32])
def test_what_is_no_hash_is_refused_at_once(opened: Open, pin: str) -> None:
    store = opened()
    with pytest.raises(MalformedError, match="not a Xet hash"):
        store.read("a", nbytes=1, pin=pin)
    assert store.requests == 0


def test_empty_pin_does_not_stand_for_anything_else(opened: Open) -> None:
    store = opened()
    empty = store.put("a", b"")
    with pytest.raises(MalformedError):
        store.read("a", nbytes=1, pin=empty)


def test_prefixes_are_apart(opened: Open) -> None:
    stores = {prefix: opened(prefix) for prefix in ("", "run", "run/1", "run-2")}
    for prefix, store in stores.items():
        store.put(f"key{len(prefix)}", prefix.encode())
    assert [info.key for info in stores["run/1"].list()] == ["key5"]
    assert [info.key for info in stores["run-2"].list("key")] == ["key5"]
    assert [info.key for info in stores["run"].list()] == ["1/key5", "key3"]
    assert stores["run"].get("1/key5") == b"run/1"
    assert len(list(stores[""].list("run"))) == 3


def test_listing_goes_over_pages_and_look_ups_over_requests(hub: HubServer, opened: Open) -> None:
    store = opened()
    keys = [f"k/{number:02}" for number in (7, 3, 9, 1, 5, 8, 2)]
    for key in keys:
        store.put(key, b"data")
    hub.configure(page=3, calls=1_000_000)
    before = store.requests
    assert [info.key for info in store.list("k/")] == sorted(keys)
    assert store.requests - before == 3
    hub.configure(page=1000, calls=1_000_000)
    before = store.requests
    absent = [f"absent/{number}" for number in range(1500)]
    assert set(store.find_all([*absent, *keys])) == set(keys)
    assert store.requests - before == 2


def test_requests_are_those_that_the_hub_counts(
    hub: HubServer, opened: Open, gateway: dict[str, str]
) -> None:
    hub.restart()  # counts from nothing
    store, shared = opened(), opened("shared", **gateway)
    spent: list[int] = []
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", b"data"),
        lambda: store.put("a", b"other"),
        lambda: store.put_if_absent("b", b"data"),
        lambda: store.find_all(["a", "b", "c"]),
        lambda: store.get("a"),
        lambda: store.get("a"),
        lambda: store.get_range("a", 1, 2),
        lambda: list(store.list()),
        lambda: store.delete("a"),
        lambda: store.delete("a"),
        lambda: shared.put_if_absent("b", b"data"),
    ]
    for call in calls:
        before = store.requests + shared.requests
        call()
        spent.append(store.requests + shared.requests - before)
    pin = store.put("a", b"data")
    before = store.requests
    store.read("a", nbytes=4, pin=pin)
    assert store.requests == before
    # The first put and the first read have a storage token to get.
    assert spent == [2, 1, 2, 1, 2, 1, 1, 1, 1, 2, 1]
    counted = hub.counts()
    assert sum(counted.values()) + sum(hub.counts("s3").values()) == (
        store.requests + shared.requests
    )
    assert counted == {
        "GET xet-write-token": 1,
        "GET xet-read-token": 1,
        "GET tree": 1,
        "POST batch": 6,
        "POST paths-info": 6,
    }
    assert hub.counts("s3") == {"PUT s3": 1}


def test_storage_token_is_renewed_before_it_ends(hub: HubServer, opened: Open) -> None:
    hub.configure(xet_token_s=62, calls=1_000_000)
    store = opened()
    pin = store.put("a", b"data")
    store.read("a", nbytes=4, pin=pin)
    before = store.requests
    time.sleep(2.1)
    assert bytes(store.read("a", nbytes=4, pin=pin)) == b"data"
    assert store.requests == before + 1


def test_large_object_is_put_without_a_copy_on_disk(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    data = pattern(20_000_000)
    store = opened()
    pin = store.put("a", memoryview(data))
    assert bytes(store.read("a", nbytes=len(data), pin=pin)) == data
    assert store.get_range("a", 9_999_990, 20) == data[9_999_990:10_000_010]


def test_missing_bucket_does_not_look_empty(hub: HubServer) -> None:
    store = open_store("hf://buckets/me/absent", {"endpoint": hub.url, "token": hub.token})
    for call in calls_of(store, "get", "find", "put", "list", "delete"):
        with pytest.raises(ConfigError, match="no bucket me/absent") as caught:
            call()
        assert "hf buckets create me/absent" in caught.value.hint
