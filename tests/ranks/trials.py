"""What ranks do in a trial; every function here runs on each of them."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from deltachain.checkpoint import Checkpoint
from deltachain.cli.pull import pull
from deltachain.errors import ConfigError, RankError
from deltachain.kernels.device import bits_of
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.snapshot import Snapshot
from deltachain.store import open_store
from deltachain.types import BITS_DTYPES
from tests.ranks.layouts import Block, set_up, train_step, whole
from tests.support.faults import Fault, FaultyStore

RATE = 2e-3
DEADLINE_S = 4.0


def ten_steps(rank: int, layout: str, url: str, folder: str, first: int, steps: int) -> None:
    model, optimizer = set_up(layout)
    for number in range(first):  # as if restored from a checkpoint of that step
        train_step(layout, model, optimizer, number)
    config = PublishConfig(url=url, dtype="BF16", when_busy="wait", deadline_s=60)
    dice = random.Random(rank)
    with CommDebugMode() as attaching:
        publisher = Publisher(config).attach(model)
    assert attaching.get_total_counts() == 0
    with publisher:
        check(rank, publisher.version, model, url, folder)
        for number in range(first, first + steps):
            train_step(layout, model, optimizer, number)
            time.sleep(dice.random() * 0.1)  # ranks are never in step by themselves
            with CommDebugMode() as communication:
                future = publisher.publish(step=number)
            assert communication.get_total_counts() == 0
            receipt = future.result(60)
            assert receipt.step == number
            check(rank, receipt.version, model, url, folder)


def publishes_max(rank: int, url: str, folder: str) -> None:
    model, optimizer = set_up("rows")
    config = PublishConfig(url=url, dtype="BF16", encoding="max", when_busy="wait")
    with Publisher(config).attach(model) as publisher:
        for number in range(2):
            train_step("rows", model, optimizer, number)
            receipt = publisher.publish(step=number).result(60)
            assert receipt.encoding == "max"
            check(rank, receipt.version, model, url, folder)


def check(rank: int, version: int, model: nn.Module, url: str, folder: str) -> None:
    expected = whole(model)
    if rank == 0:
        pulled = Path(folder) / str(version)
        pull(url, out=pulled, version=version)
        compare(pulled, expected)


def compare(folder: Path, expected: dict[str, Tensor]) -> None:
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.specs) == set(expected)
    for name, tensor in expected.items():
        wire = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        bits = bits_of(wire.contiguous()).numpy().view(BITS_DTYPES[wire.element_size()])
        assert (checkpoint.bits(name) == bits.reshape(-1)).all(), name


def dies(rank: int, url: str, victim: int, do: str, prefix: str) -> None:
    at_store = rank == victim and bool(prefix)
    fault = [Fault(do, prefix, nth=2)] if at_store else []  # type: ignore[arg-type]
    store = FaultyStore(open_store(url, writer=True), *fault)
    config = PublishConfig(
        url=url, dtype="BF16", when_busy="wait", deadline_s=DEADLINE_S, anchor_factor=0.01
    )
    model, optimizer = set_up("stages")
    publisher = Publisher(config, store=store).attach(model)
    futures, noticed = [], []
    start = time.monotonic()
    try:
        for number in range(4):
            train_step("stages", model, optimizer, number)
            if rank == victim and number == 1 and do == "absent":
                _end()
            if rank == victim and number == 1 and do == "in-diff":
                Snapshot.diff_ = _end  # type: ignore[method-assign,assignment]
            futures.append(publisher.publish(step=number))
            if futures[-1].exception(60) is None:
                publisher.flush()  # an anchor that follows a version is added beside training
    except RankError as exc:
        noticed.append(exc)
    assert time.monotonic() - start < 10 * DEADLINE_S
    errors = [error for future in futures if (error := future.exception(60)) is not None]
    assert errors or noticed, "somebody died, and nobody noticed"
    assert all(isinstance(error, RankError) for error in errors), errors
    os._exit(0)  # the process group cannot be left in order


def _end(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stalls(rank: int, url: str, folder: str) -> None:
    slow = [Fault("slow", "deltas/", nth=2, seconds=3 * DEADLINE_S)] if rank == 1 else []
    store = FaultyStore(open_store(url, writer=True), *slow)
    config = PublishConfig(
        url=url, dtype="BF16", when_busy="wait", on_error="warn", deadline_s=DEADLINE_S
    )
    model, optimizer = set_up("rows")
    with Publisher(config, store=store).attach(model) as publisher:
        outcomes = []
        for number in range(4):
            train_step("rows", model, optimizer, number)
            future = publisher.publish(step=number)
            outcomes.append(type(future.exception(60)).__name__)
        assert outcomes == ["NoneType", "RankError", "NoneType", "NoneType"]
        assert publisher.version == 3
        check(rank, 3, model, url, folder)


def leaves(rank: int, url: str) -> None:
    slow = Fault("slow", "deltas/", seconds=1.0, times=None)
    store = FaultyStore(open_store(url, writer=True), slow)
    config = PublishConfig(url=url, dtype="BF16", deadline_s=DEADLINE_S)
    model, optimizer = set_up("stages")
    publisher = Publisher(config, store=store).attach(model)
    for number in range(2):
        train_step("stages", model, optimizer, number)
        waiting = publisher.publish(step=number)
    start = time.monotonic()
    if rank == 1:
        publisher.__exit__(ValueError, ValueError("a batch that cannot be read"), None)
        assert time.monotonic() - start < DEADLINE_S
    else:
        with pytest.raises(RankError, match="rank 1 did not answer"):
            publisher.__exit__(None, None, None)
    assert isinstance(waiting.exception(60), RankError)


def refused(rank: int, kind: str, message: str, hint: str, url: str) -> None:
    del rank
    with pytest.raises(ConfigError, match=message) as caught:
        Publisher(PublishConfig(url=url, deadline_s=30)).attach(REFUSED[kind]())
    assert hint in caught.value.hint
    assert not Path(url).exists()


def _fsdp1(*, original: bool) -> nn.Module:
    return FullyShardedDataParallel(
        Block(), use_orig_params=original, device_id=torch.device("cpu")
    )


def _partial() -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    module = nn.Module()
    module.w = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    return module


def _unequal() -> nn.Module:
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, distributed.get_rank())
    return module


def _another_shape() -> nn.Module:
    return nn.Linear(3, 2 + distributed.get_rank())


def _scattered() -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    module = nn.Module()
    placement = _StridedShard(0, split_factor=2)
    whole = DTensor.from_local(torch.ones(4), mesh, [placement], shape=torch.Size([8]), stride=(1,))
    module.w = nn.Parameter(whole)
    return module


def _misfit() -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    module = nn.Module()
    local = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size([8]), stride=(1,))
    module.w = nn.Parameter(local)
    return module


def _frozen_on_one() -> nn.Module:
    module = nn.Linear(3, 2)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    module.weight.requires_grad_(distributed.get_rank() == 0)
    return module


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "flat": partial(_fsdp1, original=False),
    "fsdp1": partial(_fsdp1, original=True),
    "partial": _partial,
    "unequal": _unequal,
    "shape": _another_shape,
    "scattered": _scattered,
    "misfit": _misfit,
    "frozen": _frozen_on_one,
    "nothing": nn.Identity,
}


def note(folder: str, rank: int, **facts: Any) -> None:
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(facts))


def hurries(rank: int, url: str, folder: str) -> None:
    config = PublishConfig(url=url, dtype="BF16", when_busy="wait", deadline_s=30)
    model, optimizer = set_up("rows")
    with Publisher(config).attach(model) as publisher:
        futures = []
        for number in range(6):
            train_step("rows", model, optimizer, number)
            futures += [publisher.publish(step=number) for _ in range(4)]
        versions = [future.result(60).version for future in futures]
    assert versions == list(range(1, 25))
    check(rank, 24, model, url, folder)
