"""Ranks that publish to a bucket of the Hub, on one token."""

from __future__ import annotations

import pytest

from deltachain.chain.chain import Chain
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.hub_trials import HUB_VERSIONS
from tests.ranks.spawn import run
from tests.support.hub.server import HubServer

pytestmark = pytest.mark.dist


def test_ranks_take_no_more_requests_than_one_publisher(hub: HubServer, bucket: str) -> None:
    url = f"hf://buckets/{bucket}/run"
    run("tests.ranks.hub_trials:publishes", 3, url, hub.url, hub.token)
    chain = Chain.open(open_store(url, {"endpoint": hub.url, "token": hub.token}))
    proofs = list(verify(chain))
    assert len(proofs) == HUB_VERSIONS + 1
    assert len(chain.read(HUB_VERSIONS).manifest.edge.parts) == 3
