"""What newcomers and followers far behind ask of a real S3 server: a chain of 10,000 versions."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from statistics import median

import pytest

from deltachain.chain.chain import Chain
from deltachain.store import MemoryStore, open_store
from deltachain.threads import Pool
from tests.support.seaweed import Seaweed
from tests.unit.maintain.test_far_behind import VERSIONS, grow

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)

READERS = 20
WRITES = 8


def test_the_requests_of_readers_do_not_grow_with_the_chain(
    seaweed: Seaweed, s3_url: Callable[[], str]
) -> None:
    made, url = MemoryStore(), s3_url()
    grow(made)
    store = open_store(url, seaweed.options)
    with Pool(WRITES) as pool:
        for _ in pool.map(lambda key: store.put(key, made.get(key)), list(made._objects)):
            pass
    chosen = random.Random(3)
    for held, most_edges, most_median in ((None, 24, 12), (1000, 44, 24)):
        edges, requests = [], []
        for _ in range(READERS):
            with_its_own = open_store(url, seaweed.options)
            target = chosen.randrange(held or 0, VERSIONS)
            chain = Chain.open(with_its_own)
            plan = chain.plan(None if held is None else target - held, chain.read(target))
            chain.look_ahead(plan)
            parts = sum(edge.parts for edge in plan.edges)
            edges.append(len(plan.edges))
            requests.append(with_its_own.requests + parts)
            with_its_own.close()
        logger.info("from %s: edges %s, requests %s", held or "nothing", edges, requests)
        assert max(edges) <= most_edges
        assert median(edges) <= most_median
        assert max(requests) <= 100
    store.close()
