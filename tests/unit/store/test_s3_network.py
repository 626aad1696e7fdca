import gzip
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deltachain import errors
from deltachain.store import Store, open_store
from deltachain.store.s3.store import PART_NBYTES, RANGE_NBYTES, S3Store, open_s3
from deltachain.testing.store import pattern
from tests.support.proxy import Proxy
from tests.support.seaweed import Seaweed
from tests.support.values import eventually, present
from tests.unit.store.calls import EVERY, calls_of
from tests.unit.store.stub import LAST_MODIFIED, OK, Answer, Stub, took

pytestmark = pytest.mark.full

HERE = "s3://bucket/run"
DATA = b"0123456789" * 20


def opened(stub: Stub, **options: object) -> S3Store:
    return open_s3(HERE, {**stub.options, "deadline_s": 0.3, **options})


def to(location: str, status: int = 301, region: str = "") -> Answer:
    headers = {"Location": location} | ({"x-amz-bucket-region": region} if region else {})
    return Answer(status, body=b"moved", headers=headers)


def body(data: bytes = DATA, status: int = 200, *, said: str | None = None, **how: Any) -> Answer:
    """An object, or what is said to be a range of it."""
    ranged = {} if said is None else {"Content-Range": said}
    headers = {**LAST_MODIFIED, **ranged, **how.pop("headers", {})}
    return Answer(status, body=data, headers=headers, **how)


BOMB = gzip.compress(bytes(5 << 20))
PORTAL = "https://portal.example:8443/login?secret=1"
WHOLE_RANGE = "bytes 0-199/200"
WRONG_RANGES = (
    *("bytes 1-10/200", "bytes 0-8/200", "bytes 0-10/200", "bytes 0-9/5", "bytes 0-9/*"),
    *("bytes */200", "items 0-9/200", ""),
)

UNBELIEVED: dict[str, tuple[Answer, tuple[str, ...], str]] = {
    **{
        f"{status} to elsewhere": (
            to(PORTAL, status),
            EVERY if status in (301, 308) else ("get",),
            f"{status}.*redirects to https://portal.example:8443:",
        )
        for status in (301, 302, 307, 308)
    },
    "always another region": (to("", region="eu-west-3"), ("get",), "eu-west-3"),
    "200, a slow head": (body(head_pace_s=0.05), EVERY, ""),
    "503, a slow head": (body(status=503, head_pace_s=0.05), EVERY, ""),
    "206, a slow body": (body(status=206, said=WHOLE_RANGE, body_pace_s=0.05), ("read",), ""),
    "200, a slow body": (body(body_pace_s=0.05), ("get", "list"), ""),
    "503, a slow body": (Answer(503, "SlowDown", body_pace_s=0.05), ("get", "list"), ""),
    # Too long: the rest never comes, and the connection stays open. Too short: what is left
    # looks like the next answer, or the object is another one.
    **{
        f"a range said to have {nbytes} bytes": (
            body(status=206, said=WHOLE_RANGE, said_nbytes=nbytes),
            ("read",),
            "",
        )
        for nbytes in (0, 199, 201, 10**12)
    },
    "an object said to be longer": (body(said_nbytes=201), ("get",), ""),
    **{
        f"a length of {length}": (
            body(headers={"x-amz-missing-meta": length, "Last-Modified": length}),
            ("get", "find"),
            "",
        )
        for length in ("many", "-", "1e400")
    },
    **{
        f"a range said to be {said}": (
            body(DATA[:10], 206, said=said),
            ("get_range",),
            "bytes 0 to 9 were asked for",
        )
        for said in WRONG_RANGES
    },
    "a range of another length": (body(DATA[:9], 206, said="bytes 0-9/200"), ("get_range",), ""),
    "a part in place of all": (body(DATA[:10], 206, said="bytes 0-9/200"), ("get",), ""),
    "all in place of a later range": (body(), ("get_later_range",), "heed Range"),
    "a compressed list": (body(BOMB, headers={"Content-Encoding": "gzip"}), ("list",), ""),
    "a list in br": (body(BOMB, headers={"Content-Encoding": "br"}), ("list",), ""),
    "writes that wrote nothing": (Answer(200), ("put", "put_if_absent"), ""),
}


@pytest.mark.parametrize("what", UNBELIEVED)
def test_what_cannot_be_believed_is_unavailable_in_time(what: str) -> None:
    answer, names, said = UNBELIEVED[what]
    with Stub(answer) as stub:
        store = opened(stub)
        for call in calls_of(store, *names, nbytes=200):
            error, seconds = took(call)
            assert error.retryable
            assert re.search(said, f"{error} {error.hint}", re.DOTALL)
            assert "secret" not in str(error)
            assert seconds < 4


def test_redirect_that_ends_is_survived_by_one_call() -> None:
    with Stub(to("/login"), to("http://[bad"), to(""), body()) as stub:
        assert opened(stub, deadline_s=10).get("a") == DATA
        assert stub.seen == ["GET /bucket/run/a"] * 4


def test_bucket_of_another_region_is_asked_for_there() -> None:
    with Stub(to("", region="eu-west-3"), body()) as stub:
        assert opened(stub, deadline_s=10).get("a") == DATA
        assert "/eu-west-3/s3/" in stub.headers[1]["authorization"]


def test_slow_server_holds_no_thread() -> None:
    before = threading.active_count()
    with Stub(body(head_pace_s=0.05)) as stub:
        store = opened(stub)
        took(lambda: store.find_all(["a"]))
        store.close()
    eventually(lambda: threading.active_count() <= before)


def test_whole_object_in_place_of_its_first_bytes_is_cut() -> None:
    with Stub(body()) as stub:
        store = opened(stub, deadline_s=10)
        assert bytes(store.read("a", nbytes=200)) == DATA
        assert store.get_range("a", 0, 10) == DATA[:10]
        assert len(stub.seen) == 2


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_compressed_body_is_not_inflated(encoding: str) -> None:
    with Stub(body(BOMB, headers={"Content-Encoding": encoding})) as stub:
        assert opened(stub).get("a") == BOMB  # whose digest nobody expects
        assert {seen["accept-encoding"] for seen in stub.headers} == {"identity"}


# Writes that are answered by others


def test_write_that_wrote_nothing_is_sent_again() -> None:
    with Stub(Answer(200), Answer(200), OK) as stub:
        opened(stub, deadline_s=10).put("a", b"data")
        assert [seen.split()[0] for seen in stub.seen] == ["PUT"] * 3


def test_conditional_write_that_was_swallowed_and_then_lost_is_lost() -> None:
    with Stub(Answer(200), Answer(412, "Failed"), body(b"them")) as stub:
        with pytest.raises(errors.AlreadyExistsError):
            opened(stub, deadline_s=10).put_if_absent("a", b"data")
        assert [seen.split()[0] for seen in stub.seen[:3]] == ["PUT", "PUT", "HEAD"]


def test_large_write_that_is_answered_by_others_is_not_believed() -> None:
    with Stub(Answer(200), Answer(404)) as stub:
        for call in calls_of(opened(stub), "large"):
            took(call)


# What nobody foresaw


@pytest.mark.parametrize("error", [RecursionError, KeyError])
def test_exception_of_the_library_is_typed(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with Stub(OK) as stub:
        store = opened(stub)

        def fail(*_: object, **__: object) -> None:
            raise error("said by the library")

        clients: list[Any] = [store._client, store._transfers]
        for client in clients:
            monkeypatch.setattr(client, "_make_api_call", fail)
        for call in [*calls_of(store, nbytes=200), *calls_of(store, "large")]:
            caught, seconds = took(call)
            assert isinstance(caught.__cause__, error)
            assert "said by" not in str(caught)
            assert seconds < 4


LARGE = 20_000_000
"""Three ranges to read."""

Connect = Callable[..., S3Store]


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[Proxy]:
    with Proxy(seaweed.port) as proxy:
        yield proxy


@pytest.fixture
def connect(seaweed: Seaweed, s3_url: Callable[[], str], proxy: Proxy) -> Iterator[Connect]:
    """Opens handles on one empty store, through the proxy unless told otherwise."""
    url, handles = s3_url(), list[Store]()

    def connect(*, direct: bool = False, **options: Any) -> S3Store:
        endpoint = {} if direct else {"endpoint_url": proxy.endpoint}
        handle = open_store(url, {**seaweed.options, **endpoint, **options})
        assert isinstance(handle, S3Store)
        handles.append(handle)
        return handle

    yield connect
    for handle in handles:
        handle.close()


# A body that is cut


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_only_ranges_that_were_cut_are_read_again(
    connect: Connect, proxy: Proxy, reset: bool
) -> None:
    data = pattern(LARGE)
    connect(direct=True).put("a", data)
    store = connect()
    proxy.cut_after(RANGE_NBYTES * 3 // 4, times=2, reset=reset)
    assert bytes(store.read("a", nbytes=LARGE)) == data
    assert proxy.cuts == 2
    # Two cuts at three quarters of a range.
    # The proxy counts a piece after it has passed it on: the last ones may not be counted yet.
    assert LARGE - (1 << 20) < proxy.received < LARGE + (13 << 20)
    assert store.requests == 3 + 2


@pytest.mark.parametrize(("nbytes", "times"), [(20, 1), (100, 1), (200, 1), (1_000_000, 2)])
def test_every_read_survives_cuts_in_head_and_body(
    connect: Connect, proxy: Proxy, nbytes: int, times: int
) -> None:
    data = pattern(3_000_000)
    connect(direct=True).put("a", data)
    store = connect()
    calls: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: bytes(store.read("a", nbytes=len(data))),
        lambda: store.get_range("a", 0, len(data)),
    ]
    for call in calls:
        proxy.cut_after(nbytes, times=times)
        proxy.received = 0
        assert call() == data
        assert proxy.received < 3 * len(data)
    proxy.cut_after(min(nbytes, 200))
    assert present(store.find("a")).nbytes == len(data)
    assert proxy.cuts == len(calls) * times + 1


def test_body_that_is_always_cut_at_once_ends_at_the_deadline(
    connect: Connect, proxy: Proxy
) -> None:
    connect(direct=True).put("a", pattern(1_000_000))
    store = connect(deadline_s=2)
    proxy.cut_after(2000, times=1_000_000)
    began = time.monotonic()
    with pytest.raises(errors.StoreUnavailableError):
        store.read("a", nbytes=1_000_000)
    assert 1.9 < time.monotonic() - began < 20
    assert proxy.cuts >= 2


# Writes whose answer is lost


def test_every_call_survives_a_lost_reply(connect: Connect, proxy: Proxy) -> None:
    store = connect()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("PUT", lambda: store.put_if_absent("a", b"ours")),
        ("PUT", lambda: store.put("b", b"data")),
        ("GET", lambda: store.get("a")),
        ("HEAD", lambda: present(store.find("a")).nbytes),
        ("GET", lambda: [entry.key for entry in store.list()]),
        ("DELETE", lambda: store.delete("b")),
    ]
    answers = []
    for method, call in calls:
        proxy.drop_reply(method)
        answers.append(call())
    assert answers[2:5] == [b"ours", 4, ["a", "b"]]
    assert proxy.dropped == len(calls)
    assert store.find("b") is None


def test_lost_reply_does_not_take_the_object_of_another(connect: Connect, proxy: Proxy) -> None:
    other, store = connect(direct=True), connect()
    other.put_if_absent("a", b"other")
    proxy.drop_reply("PUT")
    with pytest.raises(errors.AlreadyExistsError):
        store.put_if_absent("a", b"ours!")
    assert proxy.dropped == 1
    assert other.get("a") == b"other"


# Large objects


def unfinished(store: S3Store) -> list[object]:
    client: Any = store._client
    found = client.list_multipart_uploads(Bucket=store._bucket, Prefix=store._prefix)
    return list(found.get("Uploads", []))


def test_large_object_is_put_in_parts(connect: Connect) -> None:
    store = connect(direct=True)
    data = pattern(2 * PART_NBYTES + 1)
    store.put("a", memoryview(data))
    assert store.requests == 1 + 3 + 1 + 1
    assert bytes(store.read("a", nbytes=len(data))) == data
    assert store.requests == 6 + 5


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_lost_replies_do_not_fail_an_upload(connect: Connect, proxy: Proxy, method: str) -> None:
    store, data = connect(), pattern(PART_NBYTES + 1)
    proxy.drop_reply(method, times=2)
    store.put("a", data)
    assert proxy.dropped == 2
    assert bytes(store.read("a", nbytes=len(data))) == data


@pytest.mark.full
def test_upload_that_is_given_up_leaves_nothing(connect: Connect, proxy: Proxy) -> None:
    store = connect(deadline_s=2)  # a slow machine must not take its other requests for lost ones
    proxy.drop_reply("PUT", times=1_000_000)
    with pytest.raises(errors.StoreUnavailableError):
        store.put("a", bytes(PART_NBYTES + 1))
    assert proxy.dropped >= 2
    proxy.reset()
    assert store.find("a") is None
    eventually(lambda: unfinished(store) == [])


# A server that is slow, or gone


def test_slow_body_hits_the_deadline(connect: Connect, proxy: Proxy) -> None:
    connect(direct=True).put("a", pattern(1_500_000))
    store = connect(deadline_s=3.0)
    proxy.throttle(100_000)
    began = time.monotonic()
    with pytest.raises(errors.StoreUnavailableError, match="too slow"):  # all of it takes 15 s
        store.read("a", nbytes=1_500_000)
    # Three seconds, and one more for each MiB.
    assert time.monotonic() - began > 4


def test_server_that_was_killed_is_unavailable_and_then_works_again(
    seaweed: Seaweed, connect: Connect
) -> None:
    store, data = connect(direct=True), pattern(LARGE)
    hasty = connect(direct=True, deadline_s=0.4)
    store.put("a", data)
    seaweed.kill()
    for call in calls_of(hasty, "get", "find", "put", "put_if_absent", "list"):
        _, seconds = took(call)
        assert seconds < 30  # half of the default deadline
    seaweed.restart()
    assert bytes(store.read("a", nbytes=LARGE)) == data
    store.put_if_absent("b", b"data")
    assert [found.key for found in store.list()] == ["a", "b"]


# Objects that change, and callers that are misled


def test_ranges_of_two_objects_are_never_mixed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = connect(direct=True), connect(direct=True)
    store.put("a", b"\1" * LARGE)
    inner, replaced = store._range, threading.Event()

    def read_range(*args: Any, **known: Any) -> object:
        found = inner(*args, **known)
        if not replaced.is_set():
            replaced.set()
            other.put("a", b"\2" * LARGE)
        return found

    monkeypatch.setattr(store, "_range", read_range)
    assert bytes(store.read("a", nbytes=LARGE)) == b"\2" * LARGE
    assert replaced.is_set()


def test_ranges_are_not_mixed_where_the_server_ignores_the_pin(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect(direct=True)
    store.put("a", pattern(LARGE))
    inner, number = store._range, 0

    def read_range(*args: Any, **known: Any) -> object:
        nonlocal number
        number += 1
        known["etag"] = ""
        found, data, size = inner(*args, **known)
        return "another" if number == 3 else found, data, size

    monkeypatch.setattr(store, "_range", read_range)
    assert bytes(store.read("a", nbytes=LARGE)) == pattern(LARGE)
    assert number >= 6


# Who asks, and where


def test_wrong_secret_is_refused(seaweed: Seaweed, connect: Connect) -> None:
    store = connect(direct=True, secret="wrong-secret")  # noqa: S106
    names = ("get", "find", "put", "large", "put_if_absent", "list", "delete")
    for call in calls_of(store, *names):
        with pytest.raises(errors.StorePermissionError) as caught:
            call()
        assert caught.value.url == store.url
        shown = f"{caught.value} {caught.value.__cause__}"
        assert "wrong-secret" not in shown
        assert seaweed.options["key"] not in shown


def test_names_that_no_key_has_are_not_listed(connect: Connect) -> None:
    store = connect(direct=True)
    store.put("folder/a", b"data")
    client: Any = store._client
    prefix = store._prefix
    for name in (".hidden", "folder/b c", "folder/ü", "d/"):
        client.put_object(Bucket=store._bucket, Key=f"{prefix}{name}", Body=b"")
    assert [found.key for found in store.list()] == ["folder/a"]


def test_long_listing_comes_in_pages(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    store = connect(direct=True)
    keys = sorted(f"m/{number}" for number in range(25))
    for key in keys:
        store.put(key, b"")
    client: Any = store._client
    inner = client.list_objects_v2
    monkeypatch.setattr(client, "list_objects_v2", lambda **page: inner(**page, MaxKeys=10))
    before = store.requests
    assert [found.key for found in store.list("m/")] == keys
    assert store.requests == before + 3
