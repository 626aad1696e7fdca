"""Answers that no S3 server gives, and that something in between gives in its place."""

from __future__ import annotations

import gzip
import threading
import time
from typing import Any

import pytest

from deltachain.errors import AlreadyExistsError
from deltachain.store.s3.store import S3Store, open_s3
from tests.unit.store.calls import calls_of
from tests.unit.store.stub import LAST_MODIFIED, OK, Answer, Stub, took

HERE = "s3://bucket/run"
DATA = b"0123456789" * 20


def opened(stub: Stub, **options: object) -> S3Store:
    return open_s3(HERE, {**stub.options, "deadline_s": 0.3, **options})


def to(location: str, status: int = 301, region: str = "") -> Answer:
    headers = {"Location": location} | ({"x-amz-bucket-region": region} if region else {})
    return Answer(status, body=b"moved", headers=headers)


# Redirects


@pytest.mark.parametrize("status", [301, 308])
def test_redirect_is_unavailable_and_says_where_it_leads(status: int) -> None:
    with Stub(to("https://portal.example:8443/login?secret=1", status)) as stub:
        store = opened(stub)
        for call in calls_of(store, nbytes=200):
            error, seconds = took(call)
            assert error.retryable
            assert str(status) in str(error)
            assert "redirects to https://portal.example:8443:" in error.hint
            assert "secret" not in str(error)
            assert seconds < 4


@pytest.mark.parametrize("status", [302, 307])
def test_other_redirects_are_the_same(status: int) -> None:
    with Stub(to("https://portal.example", status)) as stub:
        error, _ = took(lambda: opened(stub).get("a"))
        assert "redirects to https://portal.example:" in error.hint


def test_redirect_that_ends_is_survived_by_one_call() -> None:
    found = Answer(200, body=DATA, headers=LAST_MODIFIED)
    with Stub(to("/login"), to("http://[bad"), to(""), found) as stub:
        assert opened(stub, deadline_s=10).get("a") == DATA
        assert stub.seen == ["GET /bucket/run/a"] * 4


def test_bucket_of_another_region_is_asked_for_there_once() -> None:
    elsewhere = to("", region="eu-west-3")
    with Stub(elsewhere, Answer(200, body=DATA, headers=LAST_MODIFIED)) as stub:
        assert opened(stub, deadline_s=10).get("a") == DATA
        assert "/eu-west-3/s3/" in stub.headers[1]["authorization"]
    with Stub(elsewhere) as stub:
        error, _ = took(lambda: opened(stub, deadline_s=10).get("a"))
        assert "eu-west-3" in error.hint


# Slow answers


@pytest.mark.parametrize("status", [200, 503])
def test_slow_head_ends_at_the_deadline(status: int) -> None:
    slow = Answer(status, body=DATA, headers=LAST_MODIFIED, head_pace_s=0.05)
    with Stub(slow) as stub:
        store = opened(stub)
        for call in calls_of(store, nbytes=200):
            _, seconds = took(call)
            assert seconds < 4


def test_slow_body_ends_at_the_deadline() -> None:
    ranged = {**LAST_MODIFIED, "Content-Range": "bytes 0-199/200"}
    slow = Answer(206, body=DATA, headers=ranged, body_pace_s=0.05)
    with Stub(slow) as stub:
        _, seconds = took(lambda: opened(stub).read("a", nbytes=200))
        assert seconds < 4
    for slow in (
        Answer(200, body=DATA, headers=LAST_MODIFIED, body_pace_s=0.05),
        Answer(503, "SlowDown", body_pace_s=0.05),
    ):
        with Stub(slow) as stub:
            for call in (opened(stub).get, lambda _: list(opened(stub).list())):
                _, seconds = took(lambda call=call: call("a"))  # type: ignore[misc]
                assert seconds < 4


def test_slow_server_holds_no_thread() -> None:
    before = threading.active_count()
    with Stub(Answer(200, body=DATA, headers=LAST_MODIFIED, head_pace_s=0.05)) as stub:
        store = opened(stub)
        took(lambda: store.find_all(["a"]))
        store.close()
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= before


# Lengths


@pytest.mark.parametrize("nbytes", [0, 199, 201, 10**12])
def test_object_of_a_length_that_is_not_true_never_comes(nbytes: int) -> None:
    # Too long: the rest never comes, and the connection stays open. Too short: what is left
    # looks like the next answer, or the object is another one.
    ranged = {**LAST_MODIFIED, "Content-Range": "bytes 0-199/200"}
    with Stub(Answer(206, body=DATA, headers=ranged, said_nbytes=nbytes)) as stub:
        _, seconds = took(lambda: opened(stub).read("a", nbytes=200))
        assert seconds < 4


def test_object_that_is_said_to_be_longer_never_comes() -> None:
    with Stub(Answer(200, body=DATA, headers=LAST_MODIFIED, said_nbytes=201)) as stub:
        _, seconds = took(lambda: opened(stub).get("a"))
        assert seconds < 4


@pytest.mark.parametrize("length", ["many", "-", "1e400"])
def test_length_that_is_none_is_unavailable(length: str) -> None:
    headers = {**LAST_MODIFIED, "x-amz-missing-meta": length, "Last-Modified": length}
    with Stub(Answer(200, body=DATA, headers=headers)) as stub:
        store = opened(stub)
        took(lambda: store.get("a"))
        took(lambda: store.find("a"))


# Ranges


@pytest.mark.parametrize(
    "said",
    [
        "bytes 1-10/200",
        "bytes 0-8/200",
        "bytes 0-10/200",
        "bytes 0-9/5",
        "bytes 0-9/*",
        "bytes */200",
        "items 0-9/200",
        "",
    ],
)
def test_range_that_was_not_asked_for_is_refused(said: str) -> None:
    headers = {**LAST_MODIFIED, "Content-Range": said}
    with Stub(Answer(206, body=DATA[:10], headers=headers)) as stub:
        error, _ = took(lambda: opened(stub).get_range("a", 0, 10))
        assert "bytes 0 to 9 were asked for" in str(error)


def test_range_of_another_length_is_refused() -> None:
    headers = {**LAST_MODIFIED, "Content-Range": "bytes 0-9/200"}
    with Stub(Answer(206, body=DATA[:9], headers=headers)) as stub:
        took(lambda: opened(stub).get_range("a", 0, 10))


def test_part_where_all_was_asked_for_is_refused() -> None:
    headers = {**LAST_MODIFIED, "Content-Range": "bytes 0-9/200"}
    with Stub(Answer(206, body=DATA[:10], headers=headers)) as stub:
        took(lambda: opened(stub).get("a"))


def test_whole_object_in_place_of_its_first_bytes_is_cut() -> None:
    with Stub(Answer(200, body=DATA, headers=LAST_MODIFIED)) as stub:
        store = opened(stub, deadline_s=10)
        assert bytes(store.read("a", nbytes=200)) == DATA
        assert store.get_range("a", 0, 10) == DATA[:10]
        assert len(stub.seen) == 2


def test_whole_object_in_place_of_a_later_range_is_unavailable() -> None:
    with Stub(Answer(200, body=DATA, headers=LAST_MODIFIED)) as stub:
        error, _ = took(lambda: opened(stub).get_range("a", 3, 10))
        assert "heed Range" in error.hint


# Encodings


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_compressed_body_is_not_inflated(encoding: str) -> None:
    bomb = gzip.compress(bytes(5 << 20))
    headers = {**LAST_MODIFIED, "Content-Encoding": encoding}
    with Stub(Answer(200, body=bomb, headers=headers)) as stub:
        assert opened(stub).get("a") == bomb  # whose digest nobody expects
        assert {seen["accept-encoding"] for seen in stub.headers} == {"identity"}
        took(lambda: list(opened(stub).list()))


# Writes that are answered by others


def test_write_that_wrote_nothing_is_not_believed() -> None:
    with Stub(Answer(200), Answer(200), OK) as stub:
        store = opened(stub, deadline_s=10)
        store.put("a", b"data")
        assert [seen.split()[0] for seen in stub.seen] == ["PUT"] * 3
    with Stub(Answer(200)) as stub:
        for call in (opened(stub).put, opened(stub).put_if_absent):
            took(lambda call=call: call("a", b"data"))  # type: ignore[misc]


def test_conditional_write_that_was_swallowed_and_then_lost_is_lost() -> None:
    taken = Answer(412, "Failed")
    theirs = Answer(200, body=b"them", headers=LAST_MODIFIED)
    with Stub(Answer(200), taken, theirs) as stub:
        with pytest.raises(AlreadyExistsError):
            opened(stub, deadline_s=10).put_if_absent("a", b"data")
        assert [seen.split()[0] for seen in stub.seen[:3]] == ["PUT", "PUT", "HEAD"]


def test_large_write_that_is_answered_by_others_is_not_believed() -> None:
    with Stub(Answer(200), Answer(404)) as stub:
        took(lambda: opened(stub).put("a", bytes(17 << 20)))


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
