"""What ranks do that fall out of step, and come together again."""

from __future__ import annotations

import time

import pytest
import torch
from torch import distributed

from deltachain.errors import RankError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.testing.faults import Fault, FaultyStore
from tests.ranks.layouts import LAYOUTS, train_step
from tests.ranks.trials import RATE, check


def comes_late(rank: int, url: str, folder: str) -> None:
    """One rank does not attach; a second attempt in the same processes meets it."""
    model = LAYOUTS["rows"]()
    config = PublishConfig(url=url, dtype="BF16", when_busy="wait", deadline_s=1.0)
    if rank != 1:
        with pytest.raises(RankError, match="rank 1 did not answer") as caught:
            Publisher(config).attach(model)
        assert "every rank" in caught.value.hint
    distributed.barrier()
    with Publisher(config).attach(model) as publisher:
        assert publisher.version == 0
        check(rank, 0, model, url, folder)


def flushes_alone(rank: int, url: str, folder: str) -> None:
    """One rank flushes while a version waits, and does not meet the others there."""
    slow = Fault("slow", "deltas/", seconds=1.0, times=1)
    store = FaultyStore(open_store(url, writer=True), slow)
    config = PublishConfig(url=url, dtype="BF16", on_error="warn", deadline_s=1.0)
    model = LAYOUTS["stages"]()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, foreach=False)
    with Publisher(config, store=store).attach(model) as publisher:
        for number in range(4):
            train_step("stages", model, optimizer, number)
            future = publisher.publish(step=number)
            if (rank, number) == (1, 1):
                assert not future.done()
                publisher.flush()  # longer than rank 0 has patience for
            distributed.barrier()
        assert publisher.flush() is not None
        assert future.result(60).step == number
        check(rank, publisher.version, model, url, folder)


def can_not_look(rank: int, url: str) -> None:
    """The store fails on one rank while the chain begins: the others know at once."""
    fault = [Fault("fail-read", "chain.json", times=None)] if rank == 1 else []
    store = FaultyStore(open_store(url, writer=True), *fault)
    config = PublishConfig(url=url, dtype="BF16", deadline_s=60)
    model = LAYOUTS["rows"]()
    start = time.monotonic()
    with pytest.raises(Exception, match=r"rank 1: |unavailable") as caught:
        Publisher(config, store=store).attach(model)
    assert isinstance(caught.value, RankError) == (rank != 1)
    assert time.monotonic() - start < config.deadline_s / 2
