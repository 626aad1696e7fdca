"""What ranks do that publish to a bucket of the Hub."""

from __future__ import annotations

from deltachain.publish import PublishConfig, Publisher
from tests.ranks.layouts import set_up, train_step

LAYOUT = "rows"
HUB_VERSIONS = 4


def publishes(rank: int, url: str, endpoint: str, token: str) -> None:
    model, optimizer = set_up(LAYOUT)
    options = {"endpoint": endpoint, "token": token}
    config = PublishConfig(
        url=url, dtype="BF16", deadline_s=60, storage_options=options, anchor_every=2
    )
    with Publisher(config).attach(model) as publisher:
        attached = publisher._store.requests
        for number in range(HUB_VERSIONS):
            train_step(LAYOUT, model, optimizer, number)
            assert publisher.publish(step=number).result(60).step == number
    made = publisher._store.requests - attached
    assert made >= 3 * HUB_VERSIONS if rank == 0 else made <= 1  # another token of the storage
