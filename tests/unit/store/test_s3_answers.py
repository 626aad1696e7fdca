import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from deltachain import errors
from deltachain.store import Store, open_store
from deltachain.store.s3.store import S3Store, open_s3
from deltachain.testing.store import StoreContract
from tests.support.proxy import Proxy
from tests.support.seaweed import Seaweed
from tests.unit.store.calls import calls_of
from tests.unit.store.stub import LAST_MODIFIED, OK, Answer, Stub


class TestS3Store(StoreContract):
    race_rounds = 3  # SeaweedFS lets losers wait for seconds

    @pytest.fixture
    def reopen(self, seaweed: Seaweed, s3_url: Callable[[], str]) -> Iterator[Callable[[], Store]]:
        url, opened = s3_url(), list[Store]()

        def reopen() -> Store:
            opened.append(open_store(url, seaweed.options))
            return opened[-1]

        yield reopen
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, reopen: Callable[[], Store]) -> Store:
        return reopen()

    def test_races_were_run(self, store: Store) -> None:
        assert isinstance(store, S3Store)
        assert store.capabilities.conditional_put
        assert store.capabilities.list_consistent


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[Proxy]:
    with Proxy(seaweed.port) as proxy:
        yield proxy


def through(proxy: Proxy, seaweed: Seaweed, url: str, **options: float) -> Store:
    return open_store(url, {**seaweed.options, "endpoint_url": proxy.endpoint, **options})


def since(store: Store) -> float | None:
    """Start of the first request without an answer."""
    return store.unanswered_since


def test_a_store_tells_since_when_it_has_no_answer(
    proxy: Proxy, seaweed: Seaweed, s3_url: Callable[[], str]
) -> None:
    store = through(proxy, seaweed, s3_url())
    store.put("a", b"data")
    assert since(store) is None
    proxy.refuse()
    before = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read, "a", nbytes=4)
        while since(store) is None:
            assert not reading.done()
            time.sleep(0.01)
        assert before <= (since(store) or 0) <= time.monotonic()
        proxy.reset()
        assert bytes(reading.result()) == b"data"
    assert since(store) is None
    store.close()


def test_an_error_is_an_answer(proxy: Proxy, seaweed: Seaweed, s3_url: Callable[[], str]) -> None:
    store = through(proxy, seaweed, s3_url(), deadline_s=0.2)
    proxy.answer("503 Service Unavailable")
    with pytest.raises(errors.StoreUnavailableError):
        store.get("a")
    assert since(store) is None
    proxy.refuse()
    with pytest.raises(errors.StoreUnavailableError):
        store.get("a")
    assert since(store) is not None
    proxy.reset()
    deadline = time.monotonic() + 30
    while since(store) is not None and time.monotonic() < deadline:
        with suppress(errors.StoreUnavailableError):  # too slow on a busy machine
            assert store.find("a") is None
    assert since(store) is None
    store.close()


HERE = "s3://bucket/run"
SLOW_DOWN = Answer(503, "SlowDown")
BROKEN = Answer(500, "InternalError")
CONFLICT = Answer(409, "ConditionalRequestConflict")
TAKEN = Answer(412, "PreconditionFailed")
READS = ("get", "read", "find", "find_all", "list")
CALLS = (*READS, "put", "large", "put_if_absent", "delete")


def opened(stub: Stub, **options: object) -> S3Store:
    return open_s3(HERE, {**stub.options, **options})


def found(body: bytes) -> Answer:
    return Answer(200, body=body, headers=LAST_MODIFIED)


# What passes


@pytest.mark.parametrize("answer", [SLOW_DOWN, BROKEN, Answer(502), Answer(504), Answer(429)])
def test_failure_that_passes_is_retried_and_every_request_counted(answer: Answer) -> None:
    with Stub(answer, answer, found(b"data")) as stub:
        store = opened(stub)
        assert store.get("a") == b"data"
        assert stub.seen == ["GET /bucket/run/a"] * 3
        assert store.requests == 3


@pytest.mark.full
@pytest.mark.parametrize("answer", [SLOW_DOWN, BROKEN])
def test_failure_that_does_not_pass_ends_at_the_deadline(answer: Answer) -> None:
    with Stub(answer) as stub:
        soon, later = (opened(stub, deadline_s=seconds) for seconds in (0.6, 3.0))
        for name in CALLS if answer is SLOW_DOWN else ["put_if_absent"]:
            store = later if name == "large" else soon
            (call,) = calls_of(store, name)
            before, began = len(stub.seen), time.monotonic()
            with pytest.raises(errors.StoreUnavailableError):
                call()
            assert 0.1 < time.monotonic() - began < 30  # half of the default deadline
            assert len(stub.seen) - before >= 2, name
        assert soon.requests + later.requests == len(stub.seen)


# Conditional writes


def test_first_write_is_conditional_and_the_server_is_tried_once() -> None:
    with Stub(OK, TAKEN, OK) as stub:
        store = opened(stub)
        store.put_if_absent("a", b"data")
        store.put_if_absent("b", b"data")
        assert stub.seen == ["PUT /bucket/run/a"] * 2 + ["PUT /bucket/run/b"]
        assert [headers["if-none-match"] for headers in stub.headers] == ["*"] * 3


def test_server_that_ignores_the_condition_is_refused() -> None:
    with Stub(OK) as stub, pytest.raises(errors.ConfigError, match="ignores If-None-Match"):
        opened(stub).put_if_absent("a", b"data")


def test_conflict_is_retried_and_then_won_or_lost() -> None:
    with Stub(CONFLICT, CONFLICT, OK, TAKEN) as stub:
        opened(stub).put_if_absent("a", b"data")
        assert len(stub.seen) == 4
    with Stub(CONFLICT, TAKEN) as stub:
        with pytest.raises(errors.AlreadyExistsError):
            opened(stub).put_if_absent("a", b"data")
        # Nothing was written by an attempt that met a conflict, so nothing is read back.
        assert stub.seen == ["PUT /bucket/run/a"] * 2


def test_first_attempt_that_finds_an_object_has_lost_even_to_equal_bytes() -> None:
    with Stub(TAKEN, found(b"data")) as stub:
        with pytest.raises(errors.AlreadyExistsError) as caught:
            opened(stub).put_if_absent("a", b"data")
        assert stub.seen == ["PUT /bucket/run/a"]
        assert (caught.value.key, caught.value.url) == ("a", HERE)


@pytest.mark.parametrize("unanswered", [BROKEN, SLOW_DOWN])
def test_object_of_an_unanswered_attempt_is_ours_if_it_has_our_bytes(unanswered: Answer) -> None:
    with Stub(unanswered, TAKEN, found(b"data")) as stub:
        opened(stub).put_if_absent("a", b"data")
        assert [seen.split()[0] for seen in stub.seen] == ["PUT", "PUT", "HEAD", "GET"]
    for other in (b"DATA", b"longer"):
        with (
            Stub(unanswered, TAKEN, found(other)) as stub,
            pytest.raises(errors.AlreadyExistsError),
        ):
            opened(stub).put_if_absent("a", b"data")


# What does not pass


@pytest.mark.full
@pytest.mark.parametrize(
    ("answer", "error", "hint"),
    [
        (Answer(403, "AccessDenied"), errors.StorePermissionError, "s3:ListBucket"),
        (Answer(403, "InvalidAccessKeyId"), errors.StorePermissionError, "credentials"),
        (Answer(403, "RequestTimeTooSkewed"), errors.StorePermissionError, "clock"),
        (Answer(400, "ExpiredToken"), errors.StorePermissionError, "credentials"),
        (Answer(507, "InsufficientStorage"), errors.StoreUnavailableError, "server is full"),
        (Answer(507), errors.StoreUnavailableError, "server is full"),
        (Answer(403, "QuotaExceeded"), errors.StoreUnavailableError, "quota"),
        (Answer(404, "NoSuchBucket"), errors.ConfigError, "aws s3 mb s3://bucket"),
        (Answer(400, "InvalidArgument"), errors.ConfigError, "does not take"),
        (Answer(501, "NotImplemented"), errors.ConfigError, "does not take"),
    ],
    ids=lambda value: value.code if isinstance(value, Answer) else "",
)
def test_refusal_is_typed_and_final(
    answer: Answer, error: type[errors.DeltaChainError], hint: str
) -> None:
    with Stub(answer) as stub:
        store = opened(stub)
        calls = calls_of(store, "get", "read", "put", "put_if_absent", "list", "delete")
        for call in calls:
            with pytest.raises(error) as caught:
                call()
            assert hint in caught.value.hint
            assert "hushhush" not in str(caught.value)
            assert "testkey" not in str(caught.value)
        assert len(stub.seen) == len(calls)


# An absent object, or an absent bucket


def test_absent_object_asks_for_the_bucket_once() -> None:
    with Stub(Answer(404), OK, Answer(404)) as stub:
        store = opened(stub)
        assert store.find("a") is None
        assert store.find("b") is None
        assert [seen.split()[0] for seen in stub.seen] == ["HEAD"] * 3
        assert stub.seen[1] == "HEAD /bucket"
        assert store.requests == 3


def test_absent_bucket_is_not_an_absent_object() -> None:
    with Stub(Answer(404)) as stub:
        store = opened(stub)
        for _ in range(2):
            with pytest.raises(errors.ConfigError, match="does not exist"):
                store.find("a")


def test_bucket_that_may_not_be_looked_up_is_there() -> None:
    with Stub(Answer(404), Answer(403)) as stub:
        assert opened(stub).find("a") is None


def test_absent_key_needs_no_look_at_the_bucket() -> None:
    with Stub(Answer(404, "NoSuchKey")) as stub:
        with pytest.raises(errors.ObjectNotFoundError):
            opened(stub).get("a")
        assert stub.seen == ["GET /bucket/run/a"]
