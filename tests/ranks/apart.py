"""What ranks do that fall out of step, and come together again."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import deltachain
from deltachain.chain.chain import Chain
from deltachain.checkpoint import Checkpoint
from deltachain.cli.pull import pull
from deltachain.errors import ChainError, RankError, StoreUnavailableError, StoreWentBackError
from deltachain.format.keys import manifest_key
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.layout import local_of
from deltachain.publish.revert import revert
from deltachain.store import open_store
from tests.ranks.layouts import LAYOUTS, set_up, train_step, whole
from tests.ranks.trials import check, compare
from tests.support.faults import Fault, FaultyStore

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


def comes_late(rank: int, url: str, folder: str) -> None:
    model = LAYOUTS["rows"]()
    config = PublishConfig(url=url, dtype="BF16", when_busy="wait", deadline_s=1.0)
    if rank != 1:
        with pytest.raises(RankError, match="rank 1 did not answer") as caught:
            Publisher(config).attach(model)
        assert "every rank" in caught.value.hint
    distributed.barrier()
    with Publisher(replace(config, deadline_s=60.0)).attach(model) as publisher:
        assert publisher.version == 0
        check(rank, 0, model, url, folder)


def flushes_alone(rank: int, url: str, folder: str) -> None:
    slow = Fault("slow", "deltas/", seconds=4.0, times=1)
    store = FaultyStore(open_store(url, writer=True), slow)
    config = PublishConfig(url=url, dtype="BF16", on_error="warn", deadline_s=4.0)
    model, optimizer = set_up("stages")
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
    fault = [Fault("fail-read", "chain.json", times=None)] if rank == 1 else []
    store = FaultyStore(open_store(url, writer=True), *fault)
    config = PublishConfig(url=url, dtype="BF16", deadline_s=60)
    model = LAYOUTS["rows"]()
    start = time.monotonic()
    with pytest.raises((RankError, StoreUnavailableError), match=r"rank 1: |unavailable") as caught:
        Publisher(config, store=store).attach(model)
    assert isinstance(caught.value, RankError) == (rank != 1)
    assert time.monotonic() - start < config.deadline_s / 2


def misses_one(rank: int, url: str, folder: str) -> None:
    model, optimizer = set_up("rows")
    config = PublishConfig(url=url, dtype="BF16", when_busy="wait", on_error="warn", deadline_s=4.0)
    with Publisher(config).attach(model) as publisher:
        for number in range(4):
            train_step("rows", model, optimizer, number)
            if (rank, number) != (1, 1):
                future = publisher.publish(step=number)
                assert number == 1 or future.result(60).step == number
            distributed.barrier()
        check(rank, publisher.version, model, url, folder)
    assert publisher.version == 3


def leaves_steps(rank: int, url: str, folder: str) -> None:
    model, optimizer = set_up("rows")
    settings: dict[str, Any] = {"url": url, "dtype": "BF16", "deadline_s": 60}
    attachment = deltachain.attach(model, optimizer, every_steps=2, **settings)
    for number in range(3):
        train_step("rows", model, optimizer, number)
    attachment.detach()
    assert attachment.publisher.version == 2
    check(rank, 2, model, url, folder)
    for changes in (True, False):
        attachment = deltachain.attach(model, optimizer, **settings)
        version = attachment.publisher.version
        if changes and rank == 1:
            with torch.no_grad():
                local_of(optimizer.param_groups[0]["params"][0]).mul_(2.0)
        attachment.detach()
        assert attachment.publisher.version - version == changes
        check(rank, attachment.publisher.version, model, url, folder)
        distributed.barrier()


def store_goes_back(rank: int, url: str, folder: str) -> None:
    model, optimizer = set_up("rows")
    config = PublishConfig(url=url, dtype="BF16", when_busy="wait", deadline_s=60)
    store = open_store(url)
    newest = [manifest_key(version) for version in (2, 3, 4)]
    with Publisher(config).attach(model) as publisher:
        for number in range(4):
            train_step("rows", model, optimizer, number)
            future = publisher.publish(step=number)
            assert future.result(60).version == number + 1
        lost = {key: store.get(key) for key in newest}
        distributed.barrier()
        if rank == 0:
            for key in newest:
                store.delete(key)
        distributed.barrier()
        there = [info.key for info in store.list("manifests/")]
        train_step("rows", model, optimizer, 4)
        error = publisher.publish(step=4).exception(60)
        assert isinstance(error, StoreWentBackError), error
        assert "restart this publisher" in error.hint
        with pytest.raises(StoreWentBackError):
            publisher.flush()
        distributed.barrier()
        assert [info.key for info in store.list("manifests/")] == there
        distributed.barrier()
        if rank == 0:
            for key, data in lost.items():
                store.put(key, data)
        distributed.barrier()
        train_step("rows", model, optimizer, 5)
        assert publisher.publish(step=5).result(60).version == 5
        check(rank, 5, model, url, folder)


def covers(rank: int, url: str, folder: str) -> None:
    slow = Fault("slow", "deltas/", seconds=0.2, times=None)
    store = FaultyStore(open_store(url, writer=True), slow)
    model, optimizer = set_up("rows")
    dice, steps = random.Random(rank), {}
    config = PublishConfig(url=url, dtype="BF16", deadline_s=60)
    with Publisher(config, store=store).attach(model) as publisher:
        for number in range(24):
            train_step("rows", model, optimizer, number)
            steps[number] = whole(model)
            time.sleep(dice.random() * 0.1)
            publisher.publish(step=number)
        publisher.flush()
    if rank:
        return
    chain = Chain.open(open_store(url))
    published = [committed.manifest for committed in chain.history(1, publisher.version)]
    assert 3 < len(published) < 24
    for manifest in published:
        assert manifest.step is not None
        pull(url, out=Path(folder) / str(manifest.version), version=manifest.version)
        compare(Path(folder) / str(manifest.version), steps[manifest.step])


def exports(rank: int, url: str, folder: str) -> None:
    def part() -> Iterator[tuple[str, Tensor]]:
        if rank < 2:
            yield f"layer.{rank}", torch.full((3, 4), float(step * (rank + 1)))
            yield "shared", torch.full((5,), float(step))

    step = 0
    config = PublishConfig(url=url, when_busy="wait", deadline_s=60)
    with Publisher(config).attach(part) as publisher:
        for number in (1, 2):
            step = number
            assert publisher.publish(step=step).result(60).version == step
    if rank == 0:
        pull(url, out=Path(folder) / "pulled")
        expected = {"layer.0": torch.full((3, 4), 2.0), "layer.1": torch.full((3, 4), 4.0)}
        checkpoint = Checkpoint(Path(folder) / "pulled")
        for name, tensor in (expected | {"shared": torch.full((5,), 2.0)}).items():
            assert (checkpoint.bits(name).view("float32") == tensor.flatten().numpy()).all(), name
