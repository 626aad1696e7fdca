"""What ranks do after their chain was reverted; every function here runs on each of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import distributed

from deltachain.chain.chain import Chain
from deltachain.errors import ChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.revert import revert
from deltachain.store import open_store
from tests.ranks.layouts import LAYOUTS, train_step

LAYOUT = "rows"


def goes_back(rank: int, url: str) -> None:
    model, older = LAYOUTS[LAYOUT](), LAYOUTS[LAYOUT]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)
    config = PublishConfig(url=url, dtype="BF16", when_busy="wait", deadline_s=60)
    with Publisher(config).attach(model) as publisher:
        for number in range(2):
            train_step(LAYOUT, model, optimizer, number)
            publisher.publish(step=number)
    if rank == 0:
        chain = Chain.open(open_store(url))
        done = revert(chain, chain.read(0))
        assert done.committed is not None
        assert done.committed.version == 3
    distributed.barrier()
    with pytest.raises(ChainError, match="version 3 was reverted to the state of version 0"):
        Publisher(config).attach(model)
    with Publisher(config).attach(older) as publisher:
        assert (publisher.version, publisher.epoch) == (4, 2)
    with pytest.raises(ChainError, match="version 4 was reverted to the state of version 0"):
        Publisher(config).attach(model)  # nothing was trained since
    accepting = dataclasses.replace(config, continue_reverted=True)
    with Publisher(accepting).attach(model) as publisher:
        assert publisher.version == 6
    with Publisher(config).attach(older) as publisher:
        assert publisher.version == 8  # version 6 has no mark
