import gzip
import json
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
from deltachain.store import Store, open_store
from deltachain.store import calls as outage
from deltachain.testing.store import pattern
from tests.support.hub.faults import RequestFault
from tests.support.hub.server import HubServer
from tests.unit.store.calls import calls_of
from tests.unit.store.stub import Answer, Stub, took

pytestmark = pytest.mark.full

PORTAL = Answer(200, body=b"<html>Welcome</html>", headers={"Content-Type": "text/html"})
BOMB = gzip.compress(bytes(65 << 20), 1)
"""More than any document."""

ROW = {"type": "file", "path": "run/a", "size": 4, "xetHash": "ab" * 32}


def opened(stub: Stub, deadline_s: float = 1.0) -> Store:
    options = {"endpoint": stub.options["endpoint_url"], "token": "hf_hush", "calls": 1000}
    return open_store("hf://buckets/me/bucket/run", {**options, "deadline_s": deadline_s})


CALLS = ("find", "list", "get", "put", "delete")


def found(*rows: object, **headers: str) -> Answer:
    return Answer(200, body=json.dumps(rows).encode(), headers=headers)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_elsewhere_is_unavailable_and_says_where_it_leads(status: int) -> None:
    with Stub(Answer(status, headers={"Location": "https://portal.example/login?s=1"})) as stub:
        store = opened(stub)
        error, seconds = took(lambda: store.find("a"))
        assert error.retryable
        assert "redirects to https://portal.example:" in error.hint
        assert seconds < 4


@pytest.mark.full
@pytest.mark.parametrize("location", ["/api/other", "", "http://[bad"])
def test_redirect_without_end_is_unavailable(location: str) -> None:
    with Stub(Answer(308, headers={"Location": location})) as stub:
        store = opened(stub)
        for call in calls_of(store, *CALLS):
            _, seconds = took(call)
            assert seconds < 4


def test_renamed_bucket_is_followed_and_every_request_counted() -> None:
    moved = Answer(307, headers={"Location": "/api/buckets/me/renamed/paths-info"})
    with Stub(moved, found(ROW)) as stub:
        store = opened(stub, 10)
        assert store.find("a") is not None
        assert stub.seen[1] == "POST /api/buckets/me/renamed/paths-info"
        assert store.requests == 2


def test_portal_is_waited_for() -> None:
    with Stub(PORTAL, PORTAL, found(ROW)) as stub:
        assert opened(stub, 10).find("a") is not None


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"7", b"", b"[" * 100_000])
def test_answer_of_another_kind_is_never_an_absent_object(body: bytes) -> None:
    with Stub(Answer(200, body=body)) as stub:
        error, _ = took(lambda: opened(stub).find("a"))
        assert "in its place" in error.hint


def test_answer_is_told_though_the_last_attempt_is_cut_off() -> None:
    with Stub(PORTAL, Answer(200, body=b"[]", body_pace_s=2)) as stub:
        error, _ = took(lambda: opened(stub).find("a"))
        assert "in its place" in error.hint


@pytest.mark.parametrize("row", [{}, [], 7, {**ROW, "size": "many"}, {**ROW, "path": None}])
def test_row_that_is_none_is_typed(row: object) -> None:
    with Stub(found(row)) as stub:
        for call in (lambda: opened(stub).find("a"), lambda: list(opened(stub).list())):
            with pytest.raises(StoreUnavailableError):
                call()


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
def test_bomb_is_not_inflated(coding: str) -> None:
    with Stub(Answer(200, body=BOMB, headers={"Content-Encoding": coding})) as stub:
        took(lambda: opened(stub, 0.3).find("a"))
        assert {headers["accept-encoding"] for headers in stub.headers} == {"identity"}


def test_answer_that_is_compressed_unasked_is_read() -> None:
    body = gzip.compress(json.dumps([ROW]).encode())
    with Stub(Answer(200, body=body, headers={"Content-Encoding": "gzip"})) as stub:
        assert opened(stub, 10).find("a") is not None
    with Stub(
        Answer(200, body=body[: len(body) // 2], headers={"Content-Encoding": "gzip"})
    ) as stub:
        took(lambda: opened(stub).find("a"))


@pytest.mark.parametrize("status", [200, 503])
def test_slow_answer_ends_at_the_deadline(status: int) -> None:
    body = json.dumps([ROW]).encode()
    for slow in (
        Answer(status, body=body, head_pace_s=0.05),
        Answer(status, body=body, body_pace_s=0.05),
    ):
        with Stub(slow) as stub:
            _, seconds = took(lambda: opened(stub).find("a"))
            assert seconds < 4


@pytest.mark.parametrize("nbytes", [1, 10**9])
def test_length_that_is_not_true_ends_at_the_deadline(nbytes: int) -> None:
    with Stub(Answer(200, body=json.dumps([ROW]).encode(), said_nbytes=nbytes)) as stub:
        _, seconds = took(lambda: opened(stub).find("a"))
        assert seconds < 4


def test_write_is_believed_only_where_the_answer_or_a_look_proves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deltachain.store.hf.xet.Xet.write", lambda *_, **__: "ab" * 32)
    for proof in (b'{"failed": []}', b'{"success": true}'):
        with Stub(Answer(200, body=proof)) as stub:
            assert opened(stub, 10).put("a", b"data") == "ab" * 32
            assert len(stub.seen) == 1
    with Stub(Answer(200, body=b'{"ok": 1}'), found(ROW)) as stub:
        assert opened(stub, 10).put("a", b"data") == "ab" * 32
        assert [seen.rpartition("/")[2] for seen in stub.seen] == ["batch", "paths-info"]
    for there in (found(), found({**ROW, "xetHash": "cd" * 32})):
        with Stub(Answer(200, body=b'{"ok": 1}'), there) as stub:
            error, _ = took(lambda stub=stub: opened(stub).put("a", b"data"))  # type: ignore[misc]
            assert "wrote nothing" in str(error)


def through_gateway(stub: Stub, deadline_s: float) -> Store:
    options = {"endpoint": stub.options["endpoint_url"], "token": "hf_hush", "calls": 1000}
    keys = {"s3_key": "k", "s3_secret": "s", "s3_endpoint": stub.options["endpoint_url"]}
    given = {**options, **keys, "deadline_s": deadline_s}
    return open_store("hf://buckets/me/bucket/run", given)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200),
        Answer(301, body=b"moved", headers={"Location": "https://portal.example"}),
        Answer(200, headers={"ETag": '"1"'}, head_pace_s=0.05),
    ],
    ids=["swallowed", "redirected", "slow"],
)
def test_gateway_that_others_answer_for_is_unavailable(answer: Answer) -> None:
    with Stub(answer) as stub:
        store = through_gateway(stub, 0.5)
        _, seconds = took(lambda: store.put_if_absent("a", b"data"))
        store.close()
        assert seconds < 4


def test_gateway_is_believed_once_it_names_the_object() -> None:
    named = Answer(200, headers={"ETag": '"1"'})
    with Stub(Answer(200), Answer(302, body=b"moved"), named) as stub:
        store = through_gateway(stub, 10)
        store.put_if_absent("a", b"data")
        store.close()
        assert len(stub.seen) == 3


@pytest.mark.parametrize("error", [RecursionError, KeyError, TypeError])
def test_exception_of_the_library_is_typed(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("said by the library")

    with Stub(found(ROW)) as stub:
        store = opened(stub, 0.3)
        monkeypatch.setattr("huggingface_hub.utils.get_session", fail)
        for call in calls_of(store, *CALLS):
            took(call)


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
    calls.append(lambda: stranger.read("a", nbytes=1, pin="ab" * 32))
    for call in calls:
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
