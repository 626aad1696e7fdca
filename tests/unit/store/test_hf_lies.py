"""Answers that the Hub does not give, and that something in between gives in its place."""

from __future__ import annotations

import gzip
import json

import pytest

from deltachain.errors import StoreUnavailableError
from deltachain.store import Store, open_store
from tests.unit.store.calls import calls_of
from tests.unit.store.stub import Answer, Stub, took

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
