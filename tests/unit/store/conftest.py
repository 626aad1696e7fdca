from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from deltachain.store import Store, open_store

pytest.register_assert_rewrite("deltachain.testing.store")

if TYPE_CHECKING:
    from tests.support.hub.server import HubServer


@pytest.fixture
def opened(hub: "HubServer", bucket: str) -> Callable[..., Store]:
    """Opens a store in the bucket of this test: one that may write, as often as it likes."""

    def opening(prefix: str = "run/1", *, writer: bool = True, **options: object) -> Store:
        given = {"endpoint": hub.url, "token": hub.token, "calls": 1_000_000} | options
        return open_store(f"hf://buckets/{bucket}/{prefix}", given, writer=writer)

    hub.configure(calls=1_000_000)
    return opening


@pytest.fixture
def gateway(hub: "HubServer", bucket: str) -> dict[str, str]:
    """The options by which a store in the bucket of this test finds the S3 gateway."""
    endpoint = f"{hub.url}/s3/{bucket.partition('/')[0]}"
    return {"s3_key": hub.s3_key, "s3_secret": hub.s3_secret, "s3_endpoint": endpoint}
