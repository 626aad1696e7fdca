from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from deltachain.errors import (
    AlreadyExistsError,
    ConfigError,
    ObjectNotFoundError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.store import Store
from deltachain.store import calls as outage
from deltachain.testing.store import pattern
from tests.support.hub.faults import RequestFault
from tests.support.hub.server import HubServer
from tests.unit.store.calls import calls_of

Open = Callable[..., Store]


# Content of uploads that a fault is to strike is new each time: of what the storage already has,
# hf_xet sends nothing.


def wait_until_struck(hub: HubServer, *doing: Future[object]) -> None:
    while hub.faults_left():
        assert not any(each.done() for each in doing)
        time.sleep(0.02)


def test_read_only_token_follows_but_does_not_publish(hub: HubServer, opened: Open) -> None:
    pin = opened().put("a", b"data")
    reader = opened(token=hub.read_token)
    assert reader.get("a") == bytes(reader.read("a", nbytes=4, pin=pin)) == b"data"
    assert [info.key for info in reader.list()] == ["a"]
    for call in (
        lambda: reader.put("a", b"other"),
        lambda: reader.put_if_absent("b", b"other"),
        lambda: reader.delete("a"),
    ):
        with pytest.raises(StorePermissionError, match="403") as caught:
            call()
        assert "write access" in caught.value.hint
    assert [info.key for info in reader.list()] == ["a"]


def test_unknown_token_is_refused_and_not_shown(opened: Open) -> None:
    stranger = opened(token="hf_of_nobody")  # noqa: S106 - nobody's
    calls = calls_of(stranger, "get", "put", "find", "list")
    for call in (*calls, lambda: stranger.read("a", nbytes=1, pin="ab" * 32)):
        with pytest.raises(StorePermissionError, match="401") as caught:
            call()
        assert "hf auth login" in caught.value.hint
        assert "hf_of_nobody" not in str(caught.value)
    assert stranger.requests == 5  # none was tried twice


def test_named_wait_is_waited_for(hub: HubServer, opened: Open) -> None:
    store = opened()
    store.put("a", b"data")
    hub.inject(RequestFault(do="status", path=".*/paths-info", status=429, retry_after=2))
    before, start = store.requests, time.monotonic()
    assert store.get("a") == b"data"
    assert 2 <= time.monotonic() - start < 10
    assert store.requests - before == 3  # the look-up twice, and a storage token


def test_end_of_the_window_is_waited_for(hub: HubServer, opened: Open) -> None:
    store = opened()
    store.put("a", b"data")
    hub.configure(calls=3, window_s=2)
    start = time.monotonic()
    for _ in range(7):
        assert store.find("a") is not None
    assert time.monotonic() - start > 3  # two windows went by


def test_wait_beyond_the_deadline_is_not_begun(hub: HubServer, opened: Open) -> None:
    store = opened(deadline_s=40)
    hub.inject(RequestFault(do="status", path=".*/paths-info", status=429, retry_after=120))
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="429") as caught:
        store.find("a")
    assert time.monotonic() - start < 30
    assert "rate limit" in caught.value.hint


@pytest.mark.parametrize("do", ["status", "refuse", "lose-reply", "truncate"])
@pytest.mark.parametrize("route", ["batch", "paths-info", "tree", "xet-read-token"])
def test_request_that_failed_is_tried_again(
    hub: HubServer, opened: Open, do: str, route: str
) -> None:
    hub.inject(RequestFault(do=do, path=f".*/{route}"))  # type: ignore[arg-type]
    store = opened()
    store.put("a", b"data")
    assert store.get("a") == b"data"
    assert [info.key for info in store.list()] == ["a"]
    store.delete("a")
    assert store.find("a") is None
    assert hub.faults_left() == 0


def test_lost_reply_to_a_delete(hub: HubServer, opened: Open) -> None:
    store = opened()
    store.put("a", b"data")
    hub.inject(RequestFault(do="lose-reply", path=".*/batch"))
    store.delete("a")
    assert hub.faults_left() == 0
    assert store.find("a") is None


def test_hub_that_stays_down_is_unavailable(hub: HubServer, opened: Open) -> None:
    store = opened(deadline_s=2)
    hub.kill()
    start = time.monotonic()
    for call in (lambda: store.find("a"), lambda: store.put("a", b"data")):
        with pytest.raises(StoreUnavailableError):
            call()
    assert time.monotonic() - start < 30
    assert start <= (store.unanswered_since or 0) < time.monotonic()
    hub.start()
    store.put("a", b"data")
    assert store.get("a") == b"data"
    assert store.unanswered_since is None


def test_a_hub_that_answered_once_is_waited_for(
    hub: HubServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "FIRST_S", 0.0)
    store = opened(deadline_s=2)
    assert store.find("absent") is None
    hub.kill()
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="nothing answers at"):
        store.find("absent")
    assert time.monotonic() - began > 0.4
    hub.start()


def test_stalled_hub_is_given_up_at_the_deadline(hub: HubServer, opened: Open) -> None:
    store = opened(deadline_s=2)
    hub.inject(RequestFault(do="stall", path=".*/paths-info", seconds=20, times=100))
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="Timeout"):
        store.find("a")
    assert 1 < time.monotonic() - start < 15


@pytest.mark.parametrize("path", ["/cas/v1/xorbs", "/cas/v2/shards"])
def test_stalled_upload_is_given_up(hub: HubServer, opened: Open, path: str) -> None:
    store = opened(deadline_s=2)
    hub.inject(RequestFault(do="stall", path=path, seconds=30, times=100))
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        store.put("a", os.urandom(100))
    assert time.monotonic() - start < 15
    hub.clear_faults()
    store.put("a", b"data")
    assert store.get("a") == b"data"


@pytest.mark.parametrize("path", ["/cas/xorbs", "/cas/v2/reconstructions"])
def test_stalled_download_is_given_up(hub: HubServer, opened: Open, path: str) -> None:
    store = opened(deadline_s=2)
    pin = store.put("a", b"data")
    hub.inject(RequestFault(do="stall", path=path, seconds=30, times=100))
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        store.read("a", nbytes=4, pin=pin)
    assert time.monotonic() - start < 15
    hub.clear_faults()
    assert bytes(store.read("a", nbytes=4, pin=pin)) == b"data"


def test_hub_killed_in_the_middle_of_an_upload(hub: HubServer, opened: Open) -> None:
    store, data = opened(), os.urandom(20_000_000)
    store.put("before", b"data")
    hub.inject(RequestFault(do="stall", path="/cas/v1/xorbs", seconds=60))
    with ThreadPoolExecutor(1) as pool:
        putting: Future[str] = pool.submit(store.put, "a", data)
        wait_until_struck(hub, putting)  # type: ignore[arg-type]
        hub.kill()
        hub.start()
        pin = putting.result()
    assert store.get("before") == b"data"
    assert bytes(opened().read("a", nbytes=len(data), pin=pin)) == data


def test_hub_killed_in_the_middle_of_a_download(hub: HubServer, opened: Open) -> None:
    store, data = opened(), os.urandom(20_000_000)
    pin = store.put("a", data)
    hub.inject(RequestFault(do="stall", path="/cas/xorbs", seconds=60))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read, "a", nbytes=len(data), pin=pin)
        wait_until_struck(hub, reading)  # type: ignore[arg-type]
        hub.kill()
        hub.start()
        assert bytes(reading.result()) == data


def test_storage_that_is_down_never_makes_an_object_short(hub: HubServer, opened: Open) -> None:
    store = opened(deadline_s=2)
    pin = store.put("a", b"data")
    store.read("a", nbytes=4, pin=pin)
    hub.kill()
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            store.read("a", nbytes=4, pin=pin)
        with pytest.raises(StoreUnavailableError):
            store.read("a", nbytes=0, pin=pin)


@pytest.mark.parametrize("do", ["truncate", "status", "refuse"])
def test_broken_transfer_is_taken_up_again(hub: HubServer, opened: Open, do: str) -> None:
    store, data = opened(), pattern(3_000_000)
    pin = store.put("a", data)
    hub.inject(RequestFault(do=do, path="/cas/xorbs", times=5))  # type: ignore[arg-type]
    assert bytes(store.read("a", nbytes=len(data), pin=pin)) == data
    assert hub.faults_left() == 0


def test_revoked_storage_token_is_replaced(hub: HubServer, opened: Open) -> None:
    store = opened()
    pin = store.put("a", b"data")
    store.read("a", nbytes=4, pin=pin)
    before = store.requests
    hub.inject(RequestFault(do="status", path="/cas/v[12]/reconstructions", status=401, times=2))
    assert bytes(store.read("a", nbytes=4, pin=pin)) == b"data"
    assert store.requests == before + 1
    hub.inject(RequestFault(do="status", path="/cas/v1/xorbs", status=401))
    data = os.urandom(100)
    store.put("a", data)
    assert hub.faults_left() == 0
    assert store.get("a") == data


def test_flipped_bit_arrives(hub: HubServer, opened: Open) -> None:
    # What the class says: digests are compared by the callers. Noise does not compress, so the
    # bit is in the content and not in how it is packed.
    store = opened()
    data = random.Random(1).randbytes(100_000)
    pin = store.put("a", data)
    hub.inject(RequestFault(do="corrupt", path="/cas/xorbs"))
    read = bytes(store.read("a", nbytes=len(data), pin=pin))
    assert len(read) == len(data)
    assert read != data


def test_stale_look_up_shows_the_old_object_whole(hub: HubServer, opened: Open) -> None:
    store = opened()
    store.put("a", b"old")
    hub.go_stale(60)
    pin = store.put("a", b"newer")
    assert store.get("a") == b"old"
    assert bytes(store.read("a", nbytes=5, pin=pin)) == b"newer"
    hub.go_stale(0)
    assert store.get("a") == b"newer"


def test_content_that_the_storage_lost_is_not_registered(hub: HubServer, opened: Open) -> None:
    hub.inject(RequestFault(do="status", path=".*/batch", status=500))
    store = opened()
    store.put("a", b"data")  # the batch is repeated with the content in place
    pin = store.put("b", b"data")
    assert store.get("b") == b"data"
    with pytest.raises(ObjectNotFoundError):
        store.read("b", nbytes=4, pin=pin[:-1] + ("0" if pin[-1] != "0" else "1"))


class TestGateway:
    @pytest.mark.parametrize("do", ["lose-reply", "status", "refuse"])
    def test_own_write_is_recognised(
        self, hub: HubServer, opened: Open, gateway: dict[str, str], do: str
    ) -> None:
        store = opened(**gateway)
        hub.inject(RequestFault(do=do, path="/s3/", method="PUT"))  # type: ignore[arg-type]
        store.put_if_absent("a", b"mine")
        assert hub.faults_left() == 0
        assert store.get("a") == b"mine"
        with pytest.raises(AlreadyExistsError):
            store.put_if_absent("a", b"mine")

    @pytest.mark.parametrize("theirs", [b"them", b"theirs: longer"])
    def test_write_of_another_is_not_taken_for_ones_own(
        self, hub: HubServer, opened: Open, gateway: dict[str, str], theirs: bytes
    ) -> None:
        opened(**gateway).put_if_absent("a", theirs)
        hub.inject(RequestFault(do="lose-reply", path="/s3/", method="PUT"))
        with pytest.raises(AlreadyExistsError) as caught:
            opened(**gateway).put_if_absent("a", b"mine")
        assert caught.value.key == "a"
        assert opened().get("a") == theirs

    def test_unknown_key_is_refused(self, opened: Open, gateway: dict[str, str]) -> None:
        store = opened(**gateway | {"s3_key": "HFAKNOBODY"})
        with pytest.raises(StorePermissionError) as caught:
            store.put_if_absent("a", b"data")
        assert "HF_S3_ACCESS_KEY_ID" in caught.value.hint
        assert store.find("a") is None

    def test_wrong_namespace_is_no_such_bucket(self, opened: Open, gateway: dict[str, str]) -> None:
        store = opened(**gateway | {"s3_endpoint": gateway["s3_endpoint"] + "-other"})
        with pytest.raises(ConfigError, match=r"gateway: the bucket .* does not exist"):
            store.put_if_absent("a", b"data")

    def test_gateway_that_stays_down_is_unavailable(
        self, hub: HubServer, opened: Open, gateway: dict[str, str]
    ) -> None:
        store = opened(deadline_s=1.5, **gateway)
        hub.inject(RequestFault(do="status", path="/s3/", status=503, times=100))
        with pytest.raises(StoreUnavailableError, match="gateway"):
            store.put_if_absent("a", b"data")
        hub.clear_faults()
        opened(**gateway).put_if_absent("a", b"data")


def test_many_uploads_are_revealed_by_one_request_a_page(opened: Open) -> None:
    store = opened()
    pins = {f"parts/{n}": store.upload(f"parts/{n}", b"%d" % (n % 2)) for n in range(3)}
    assert [info.key for info in store.list()] == []
    many = {f"many/{n:04d}": pins[f"parts/{n % 3}"] for n in range(1001)}
    before = store.requests
    store.reveal(pins)
    assert store.requests == before + 1
    store.reveal(many)
    assert store.requests == before + 3
    assert len(list(store.list("many/"))) == 1001


def test_upload_that_is_not_there_is_not_revealed(opened: Open) -> None:
    store = opened()
    pin = store.upload("there", b"there")
    with pytest.raises(StoreUnavailableError, match="and others"):
        store.reveal({"there": pin, "not-there": "ab" * 32})
    with pytest.raises(StoreUnavailableError, match="not-there"):
        store.reveal({"not-there": "ab" * 32})
    assert store.find("not-there") is None


def test_reveal_that_is_lost_on_its_way_is_sent_again(hub: HubServer, opened: Open) -> None:
    store = opened()
    pins = {key: store.upload(key, key.encode()) for key in ("a", "b")}
    hub.inject(RequestFault(do="lose-reply", path="/api/buckets/.*/batch"))
    store.reveal(pins)
    assert [info.key for info in store.list()] == ["a", "b"]
