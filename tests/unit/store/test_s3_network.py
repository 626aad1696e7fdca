"""S3 over a network that goes wrong, and a server that goes away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import boto3
import pytest

from deltachain.errors import (
    AlreadyExistsError,
    ConfigError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.store import Store, open_store
from deltachain.testing.proxy import Proxy
from deltachain.testing.seaweed import BUCKET, Seaweed
from deltachain.testing.store import pattern

LARGE = 40_000_000
"""Bytes of an object that is put in three parts and read in five ranges."""


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[Proxy]:
    with Proxy(seaweed.port) as proxy:
        yield proxy


@pytest.fixture
def through(
    seaweed: Seaweed, proxy: Proxy, s3_url: Callable[[], str]
) -> Iterator[Callable[..., Store]]:
    """Opens one place on the server, through the proxy."""
    url, opened = s3_url(), list[Store]()

    def open_through(**options: Any) -> Store:
        options = {**seaweed.options, "endpoint_url": proxy.endpoint} | options
        opened.append(open_store(url, options))
        return opened[-1]

    yield open_through
    proxy.reset()
    for store in opened:
        store.close()


def uploads(seaweed: Seaweed) -> list[Any]:
    """Multipart uploads that were neither completed nor aborted."""
    options = seaweed.options
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    )
    found: list[Any] = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return found


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_a_body_that_is_cut_is_resumed_where_it_ended(
    through: Callable[..., Store], proxy: Proxy, reset: bool
) -> None:
    store, data = through(), pattern(LARGE)
    store.put("a", data)
    before = proxy.received
    proxy.cut_after(5_000_000, times=4, reset=reset)
    assert bytes(store.read("a", nbytes=LARGE)) == data
    assert proxy.cuts == 4
    assert proxy.received - before < 1.2 * LARGE  # nothing came twice but what was on its way


def test_an_object_that_is_replaced_while_it_is_read_is_never_mixed(
    through: Callable[..., Store], proxy: Proxy
) -> None:
    store, other = through(), through()
    one, two = pattern(LARGE), pattern(LARGE)[::-1]
    store.put("a", one)
    proxy.throttle(20_000_000)

    def replace() -> None:
        time.sleep(0.3)
        proxy.reset()
        other.put("a", two)

    replacing = Thread(target=replace)
    replacing.start()
    found = bytes(store.read("a", nbytes=LARGE))
    replacing.join()
    assert found in (one, two)
    assert bytes(store.read("a", nbytes=LARGE)) == two


def test_a_lost_reply_to_an_exclusive_put_is_recognised_as_our_own(
    through: Callable[..., Store], proxy: Proxy
) -> None:
    store = through()
    store.put_if_absent("first", b"the server is known by now")
    proxy.drop_reply("PUT")
    store.put_if_absent("a", b"ours")
    assert proxy.dropped == 1
    assert store.get("a") == b"ours"


def test_after_a_lost_reply_another_ones_object_is_still_another_ones(
    through: Callable[..., Store], proxy: Proxy
) -> None:
    store = through()
    store.put_if_absent("a", b"theirs")
    proxy.drop_reply("PUT")
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("a", b"ours")
    assert proxy.dropped == 1
    assert store.get("a") == b"theirs"


def test_a_large_put_through_cuts_and_lost_replies_arrives_whole(
    through: Callable[..., Store], proxy: Proxy, seaweed: Seaweed
) -> None:
    store, data = through(), pattern(LARGE)
    proxy.drop_reply("PUT", times=2)
    assert store.put("a", data) == ""
    assert proxy.dropped == 2
    assert bytes(store.read("a", nbytes=LARGE)) == data
    assert uploads(seaweed) == []


def test_a_large_put_that_is_given_up_leaves_nothing(
    through: Callable[..., Store], proxy: Proxy, seaweed: Seaweed
) -> None:
    store = through(deadline_s=2)
    store.put("a", b"old")
    proxy.drop_reply("PUT", times=1000)
    with pytest.raises(StoreUnavailableError):
        store.put("a", pattern(LARGE))
    proxy.reset()
    assert store.get("a") == b"old"
    assert uploads(seaweed) == []


def test_a_server_that_is_gone_and_comes_back(through: Callable[..., Store], proxy: Proxy) -> None:
    store = through(deadline_s=1)
    store.put("a", b"data")
    proxy.refuse()
    began = time.monotonic()
    for call in (lambda: store.get("a"), lambda: store.put("b", b""), lambda: list(store.list())):
        with pytest.raises(StoreUnavailableError) as caught:
            call()
        assert caught.value.hint
    assert time.monotonic() - began < 12
    proxy.reset()
    assert store.get("a") == b"data"


def test_an_answer_that_does_not_come_ends_at_the_deadline(
    through: Callable[..., Store], proxy: Proxy
) -> None:
    store = through(deadline_s=1)
    store.put("a", b"data")
    proxy.delay(4)
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        store.get("a")
    assert time.monotonic() - began < 3.5


def test_a_server_that_dies_is_waited_for(seaweed: Seaweed, s3_url: Callable[[], str]) -> None:
    """By the same handle, in the middle of a call."""
    store = open_store(s3_url(), seaweed.options)
    store.put("a", b"data")
    seaweed.kill()
    back = Thread(target=seaweed.restart)
    back.start()
    try:
        assert store.get("a") == b"data"
    finally:
        back.join()
        store.close()


def test_a_wrong_secret_is_refused_and_not_shown(
    seaweed: Seaweed, s3_url: Callable[[], str]
) -> None:
    wrong = "a-secret-nobody-may-see"
    store = open_store(s3_url(), {**seaweed.options, "secret": wrong})
    for call in (lambda: store.get("a"), lambda: store.put("a", b""), lambda: store.find("a")):
        with pytest.raises(StorePermissionError) as caught:
            call()
        assert wrong not in str(caught.value)
        assert caught.value.hint
    store.close()


def test_a_bucket_that_is_not_there_is_no_empty_store(seaweed: Seaweed) -> None:
    store = open_store(seaweed.url("x", bucket="no-such-bucket"), seaweed.options)
    for call in (lambda: store.find("a"), lambda: store.get("a"), lambda: list(store.list())):
        with pytest.raises(ConfigError, match="no-such-bucket"):
            call()
    store.close()
