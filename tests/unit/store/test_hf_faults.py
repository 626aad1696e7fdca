import gzip
import json
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from deltachain import errors
from deltachain.store import Store, open_store
from deltachain.store import calls as outage
from deltachain.testing.store import pattern
from tests.support.hub.faults import RequestFault
from tests.support.hub.server import HubServer
from tests.unit.store.calls import calls_of
from tests.unit.store.stub import Answer, Stub, took

pytestmark = pytest.mark.full

PORTAL = Answer(200, body=b"<html>Welcome</html>", headers={"Content-Type": "text/html"})
ROW = {"type": "file", "path": "run/a", "size": 4, "xetHash": "ab" * 32}


def opened(stub: Stub, deadline_s: float = 1.0, **given: object) -> Store:
    options = {"endpoint": stub.options["endpoint_url"], "token": "hf_hush", "calls": 1000}
    options |= {"deadline_s": deadline_s, **given}
    return open_store("hf://buckets/me/bucket/run", options)


CALLS = ("find", "list", "get", "put", "delete")


def found(*rows: object, **headers: str) -> Answer:
    return Answer(200, body=json.dumps(rows).encode(), headers=headers)


def body(data: bytes, **how: Any) -> Answer:
    return Answer(how.pop("status", 200), body=data, **how)


def to(location: str, status: int = 308) -> Answer:
    return Answer(status, headers={"Location": location})


ROWS = json.dumps([ROW]).encode()
GZIP = {"Content-Encoding": "gzip"}
ZIPPED = gzip.compress(ROWS)
BOMB = gzip.compress(bytes(65 << 20), 1)
"""More than any document."""
FIND, LOOKS = ("find",), ("find", "list")
OF_ANOTHER_KIND = (b"<html>", b"{}", b"7", b"", b"[" * 100_000)
NO_ROWS: tuple[object, ...] = ({}, [], 7, {**ROW, "size": "many"}, {**ROW, "path": None})

UNBELIEVED: list[tuple[Answer, tuple[str, ...], str]] = [
    *[
        (to("https://portal.example/login?s=1", status), FIND, "redirects to https://portal.ex.*:")
        for status in (301, 302, 303, 307, 308)
    ],
    *[(to(location), CALLS, "") for location in ("/api/other", "", "http://[bad")],
    *[(body(data), FIND, "in its place") for data in OF_ANOTHER_KIND],
    *[(found(row), LOOKS, "") for row in NO_ROWS],
    *[(body(BOMB, headers={"Content-Encoding": c}), FIND, "") for c in ("gzip", "deflate", "br")],
    (body(ZIPPED[: len(ZIPPED) // 2], headers=GZIP), FIND, ""),
    *[(body(ROWS, status=status, head_pace_s=0.05), FIND, "") for status in (200, 503)],
    *[(body(ROWS, status=status, body_pace_s=0.05), FIND, "") for status in (200, 503)],
    *[(body(ROWS, said_nbytes=nbytes), FIND, "") for nbytes in (1, 10**9)],
]


@pytest.mark.parametrize(("answer", "names", "hint"), UNBELIEVED)
def test_what_cannot_be_believed_is_unavailable_in_time_and_no_absent_object(
    answer: Answer, names: tuple[str, ...], hint: str
) -> None:
    with Stub(answer) as stub:
        for call in calls_of(opened(stub), *names):
            error, seconds = took(call)
            assert error.retryable
            assert re.search(hint, error.hint)
            assert seconds < 4
        assert {headers["accept-encoding"] for headers in stub.headers} == {"identity"}


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


def test_answer_is_told_though_the_last_attempt_is_cut_off() -> None:
    with Stub(PORTAL, Answer(200, body=b"[]", body_pace_s=2)) as stub:
        error, _ = took(lambda: opened(stub).find("a"))
        assert "in its place" in error.hint


def test_answer_that_is_compressed_unasked_is_read() -> None:
    with Stub(body(ZIPPED, headers=GZIP)) as stub:
        assert opened(stub, 10).find("a") is not None


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
    endpoint = stub.options["endpoint_url"]
    return opened(stub, deadline_s, s3_key="k", s3_secret="s", s3_endpoint=endpoint)  # noqa: S106


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
        with pytest.raises(errors.StorePermissionError, match="403") as caught:
            call()
        assert "write access" in caught.value.hint
    assert [info.key for info in reader.list()] == ["a"]


def test_unknown_token_is_refused_and_not_shown(opened: Open) -> None:
    stranger = opened(token="hf_of_nobody")  # noqa: S106 - nobody's
    calls = calls_of(stranger, "get", "put", "find", "list")
    calls.append(lambda: stranger.read("a", nbytes=1, pin="ab" * 32))
    for call in calls:
        with pytest.raises(errors.StorePermissionError, match="401") as caught:
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
    error, seconds = took(lambda: store.find("a"))
    assert "429" in str(error)
    assert "rate limit" in error.hint
    assert seconds < 30


@pytest.mark.parametrize("do", ["status", "refuse", "lose-reply", "truncate"])
@pytest.mark.parametrize("route", ["batch", "paths-info", "tree", "xet-read-token"])
def test_request_that_failed_is_tried_again(
    hub: HubServer, opened: Open, do: str, route: str
) -> None:
    fault = RequestFault(do=do, path=f".*/{route}")  # type: ignore[arg-type]
    hub.inject(fault)
    store = opened()
    store.put("a", b"data")
    assert store.get("a") == b"data"
    assert [info.key for info in store.list()] == ["a"]
    assert hub.faults_left() == 0
    hub.inject(fault)
    store.delete("a")
    assert store.find("a") is None
    assert (hub.faults_left() == 0) is (route in ("batch", "paths-info"))


def test_hub_that_stays_down_is_unavailable(hub: HubServer, opened: Open) -> None:
    store = opened(deadline_s=2)
    hub.kill()
    start = time.monotonic()
    for call in (lambda: store.find("a"), lambda: store.put("a", b"data")):
        with pytest.raises(errors.StoreUnavailableError):
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
    error, seconds = took(lambda: store.find("absent"))
    assert "nothing answers at" in str(error)
    assert seconds > 0.4
    hub.start()


def test_stalled_hub_is_given_up_at_the_deadline(hub: HubServer, opened: Open) -> None:
    store = opened(deadline_s=2)
    hub.inject(RequestFault(do="stall", path=".*/paths-info", seconds=20, times=100))
    error, seconds = took(lambda: store.find("a"))
    assert "Timeout" in str(error)
    assert 1 < seconds < 15


@pytest.mark.parametrize(
    "path", ["/cas/v1/xorbs", "/cas/v2/shards", "/cas/xorbs", "/cas/v2/reconstructions"]
)
def test_stalled_transfer_is_given_up(hub: HubServer, opened: Open, path: str) -> None:
    store = opened(deadline_s=2)
    pin = store.put("a", b"data")
    hub.inject(RequestFault(do="stall", path=path, seconds=30, times=100))
    if path in ("/cas/v1/xorbs", "/cas/v2/shards"):
        _, seconds = took(lambda: store.put("b", os.urandom(100)))
    else:
        _, seconds = took(lambda: store.read("a", nbytes=4, pin=pin))
    assert seconds < 15
    hub.clear_faults()
    store.put("b", b"other")
    assert store.get("b") == b"other"
    assert bytes(store.read("a", nbytes=4, pin=pin)) == b"data"


@pytest.mark.parametrize("path", ["/cas/v1/xorbs", "/cas/xorbs"], ids=["upload", "download"])
def test_hub_killed_in_the_middle_of_a_transfer(hub: HubServer, opened: Open, path: str) -> None:
    store, data = opened(), os.urandom(20_000_000)
    store.put("before", b"data")
    pin = store.put("a", data) if path == "/cas/xorbs" else ""
    hub.inject(RequestFault(do="stall", path=path, seconds=60))
    with ThreadPoolExecutor(1) as pool:
        if pin:
            doing: Future[Any] = pool.submit(store.read, "a", nbytes=len(data), pin=pin)
        else:
            doing = pool.submit(store.put, "a", data)
        while hub.faults_left():
            assert not doing.done()
            time.sleep(0.02)
        hub.kill()
        hub.start()
        done = doing.result()
    assert store.get("before") == b"data"
    assert bytes(done if pin else opened().read("a", nbytes=len(data), pin=done)) == data


def test_storage_that_is_down_never_makes_an_object_short(hub: HubServer, opened: Open) -> None:
    store = opened(deadline_s=2)
    pin = store.put("a", b"data")
    store.read("a", nbytes=4, pin=pin)
    hub.kill()
    for _ in range(3):
        with pytest.raises(errors.StoreUnavailableError):
            store.read("a", nbytes=4, pin=pin)
        with pytest.raises(errors.StoreUnavailableError):
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
    with pytest.raises(errors.ObjectNotFoundError):
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
        with pytest.raises(errors.AlreadyExistsError):
            store.put_if_absent("a", b"mine")

    @pytest.mark.parametrize("theirs", [b"them", b"theirs: longer"])
    def test_write_of_another_is_not_taken_for_ones_own(
        self, hub: HubServer, opened: Open, gateway: dict[str, str], theirs: bytes
    ) -> None:
        opened(**gateway).put_if_absent("a", theirs)
        hub.inject(RequestFault(do="lose-reply", path="/s3/", method="PUT"))
        with pytest.raises(errors.AlreadyExistsError) as caught:
            opened(**gateway).put_if_absent("a", b"mine")
        assert caught.value.key == "a"
        assert opened().get("a") == theirs

    def test_unknown_key_is_refused(self, opened: Open, gateway: dict[str, str]) -> None:
        store = opened(**gateway | {"s3_key": "HFAKNOBODY"})
        with pytest.raises(errors.StorePermissionError) as caught:
            store.put_if_absent("a", b"data")
        assert "HF_S3_ACCESS_KEY_ID" in caught.value.hint
        assert store.find("a") is None

    def test_wrong_namespace_is_no_such_bucket(self, opened: Open, gateway: dict[str, str]) -> None:
        store = opened(**gateway | {"s3_endpoint": gateway["s3_endpoint"] + "-other"})
        with pytest.raises(errors.ConfigError, match=r"gateway: the bucket .* does not exist"):
            store.put_if_absent("a", b"data")

    def test_gateway_that_stays_down_is_unavailable(
        self, hub: HubServer, opened: Open, gateway: dict[str, str]
    ) -> None:
        store = opened(deadline_s=1.5, **gateway)
        hub.inject(RequestFault(do="status", path="/s3/", status=503, times=100))
        with pytest.raises(errors.StoreUnavailableError, match="gateway"):
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
    with pytest.raises(errors.StoreUnavailableError, match="and others"):
        store.reveal({"there": pin, "not-there": "ab" * 32})
    with pytest.raises(errors.StoreUnavailableError, match="not-there"):
        store.reveal({"not-there": "ab" * 32})
    assert store.find("not-there") is None


def test_reveal_that_is_lost_on_its_way_is_sent_again(hub: HubServer, opened: Open) -> None:
    store = opened()
    pins = {key: store.upload(key, key.encode()) for key in ("a", "b")}
    hub.inject(RequestFault(do="lose-reply", path="/api/buckets/.*/batch"))
    store.reveal(pins)
    assert [info.key for info in store.list()] == ["a", "b"]
