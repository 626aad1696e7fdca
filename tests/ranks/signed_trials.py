"""What ranks do that publish a signed chain."""

from __future__ import annotations

import os
from pathlib import Path

from deltachain.chain.trust import SigningKey
from deltachain.publish import PublishConfig, Publisher
from tests.ranks.layouts import set_up, train_step

LAYOUT = "rows"
OLD_KEY = SigningKey.of(b"\2" * 32)


def publishes(rank: int, key: str, url: str, first: int) -> None:
    os.environ["DELTACHAIN_TRUSTED_KEYS"] = str(OLD_KEY.public)
    model, optimizer = set_up(LAYOUT)
    for number in range(first):
        train_step(LAYOUT, model, optimizer, number)
    file = None if rank else Path(key)
    config = PublishConfig(url=url, dtype="BF16", deadline_s=60, signing_key=file)
    with Publisher(config).attach(model) as publisher:
        train_step(LAYOUT, model, optimizer, first)
        assert publisher.publish(step=first).result(60).step == first
