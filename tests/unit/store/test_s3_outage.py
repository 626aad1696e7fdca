"""Outages of an S3 store: since when no request was answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from deltachain.errors import StoreUnavailableError
from deltachain.store import Store, open_store
from tests.support.proxy import Proxy
from tests.support.seaweed import Seaweed


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
    with pytest.raises(StoreUnavailableError):
        store.get("a")
    assert since(store) is None
    proxy.refuse()
    with pytest.raises(StoreUnavailableError):
        store.get("a")
    assert since(store) is not None
    proxy.reset()
    deadline = time.monotonic() + 30
    while since(store) is not None and time.monotonic() < deadline:
        with suppress(StoreUnavailableError):  # too slow on a busy machine
            assert store.find("a") is None
    assert since(store) is None
    store.close()
