"""What newcomers and followers far behind ask of S3; and many on one free token of the Hub.

In life: 1,000 requests in 300 s, a version every 10 s, a look every 5 s. Here windows, versions and
looks are ten times shorter, and the counts are the same.
"""

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from threading import Event, Thread
from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.publish import PublishConfig, Publisher, publisher_record
from deltachain.publish.writer import HINT_EVERY
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.threads import Pool
from tests.support.hub.server import HubServer
from tests.support.models import bits_of, plain_model, same, tensors_of, train_
from tests.support.seaweed import Seaweed
from tests.unit.maintain.test_skips import VERSIONS, grow

logger = logging.getLogger(__name__)

READERS = 20
WRITES = 8


@pytest.mark.slow
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


FASTER = 10
WINDOW_S = 300 / FASTER
VERSION_S = 10 / FASTER
LOOK_S = 5 / FASTER
FOLLOWERS = 8
STEPS = 34  # more than a window's worth
CALLS = 1000


def test_shares_of_a_free_token_add_up() -> None:
    url = "hf://buckets/me/any"
    options = {"token": "hf_any"}
    budgets: list[Any] = [open_store(url, options, writer=True)]
    budgets += [open_store(url, options) for _ in range(FOLLOWERS)]
    assert sum(store._hub._budget.calls for store in budgets) == CALLS
    assert {store._hub._budget.window_s for store in budgets} == {300.0}
    assert budgets[1].capabilities.poll_s == 5.0


# Renewals of the publisher's record fall into the time of any version: with them, the whole counts.
@pytest.mark.slow
@pytest.mark.parametrize("renew_s", [publisher_record.RENEW_S / FASTER, math.inf])
def test_a_publisher_and_its_followers_stay_inside_a_free_token(
    hub: HubServer,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    renew_s: float,
) -> None:
    """By count: the Hub refuses nothing, and everybody gets every bit in time."""
    monkeypatch.setattr(publisher_record, "RENEW_S", min(renew_s, threading.TIMEOUT_MAX))
    hub.configure(calls=CALLS, window_s=WINDOW_S)
    earlier = hub.counts()
    url = f"hf://buckets/{bucket}/policy"
    options = {"endpoint": hub.url, "token": hub.token, "window_s": WINDOW_S}
    model, stop = plain_model(), Event()
    targets = [tensors_of(model) for _ in range(FOLLOWERS)]
    config = SubscribeConfig(url=url, storage_options=options, poll_s=LOOK_S)
    followers = [Subscriber(config, target) for target in targets]
    spent: Counter[int] = Counter()

    def follow(number: int) -> None:
        for receipt in followers[number].follow(stop=stop):
            spent[number] += receipt.requests

    threads = [Thread(target=follow, args=(number,)) for number in range(FOLLOWERS)]
    publish = PublishConfig(url=url, storage_options=options)
    with (
        caplog.at_level(logging.WARNING, "deltachain"),
        Publisher(publish).attach(model) as publisher,
    ):
        began = time.monotonic()
        for thread in threads:
            thread.start()
        receipts = []
        for step in range(1, STEPS + 1):
            time.sleep(max(0.0, began + step * VERSION_S - time.monotonic()))
            train_(model, step)
            publisher.publish(step=step)
            receipts.append(publisher.flush())
        counted = Counter(hub.counts()) - Counter(earlier)
        windows = (time.monotonic() - began) / WINDOW_S  # longer than planned on a busy machine
        deadline = time.monotonic() + 30
        while any(f.version != STEPS for f in followers) and time.monotonic() < deadline:
            time.sleep(0.05)
        stop.set()
        for follower, thread in zip(followers, threads, strict=True):
            follower.notify()
            thread.join()
    assert [follower.version for follower in followers] == [STEPS] * FOLLOWERS
    assert all(same(bits_of(target), bits_of(model)) for target in targets)
    assert "refused" not in counted
    assert "are spent" not in caplog.text  # nobody had to wait for its share either
    each = {receipt.version: receipt.requests for receipt in receipts if receipt is not None}
    if math.isinf(renew_s):
        check_publisher(each)
    assert sum(counted.values()) / windows < CALLS, counted
    assert all(count / windows < 100 for count in spent.values()), spent


def check_publisher(each: dict[int, int]) -> None:
    """Check the requests of each version."""
    assert max(count for version, count in each.items() if version % HINT_EVERY) <= 4
    # At these the head hint is written, after it was read for anchors that maintainers added.
    assert max(count for version, count in each.items() if version % HINT_EVERY == 0) <= 6
    assert sum(each.values()) / len(each) < 4.5
