"""What ranks do in a trial; every function here runs on each of them."""

import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import deltachain
from deltachain.chain.chain import Chain
from deltachain.checkpoint import Checkpoint
from deltachain.cli.pull import pull
from deltachain.errors import (
    ChainError,
    ConfigError,
    RankError,
    StoreUnavailableError,
    StoreWentBackError,
)
from deltachain.format.keys import manifest_key
from deltachain.kernels.torch_kernels import bits_of
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.layout import local_of
from deltachain.publish.model.source import MovedExport, TensorSource
from deltachain.publish.revert import revert
from deltachain.publish.snapshot import Snapshot
from deltachain.store import open_store
from deltachain.torch_names import named_tensors
from deltachain.types import BITS_DTYPES
from tests.support.faults import Fault, FaultyStore

WIDTH, INNER, VOCAB, EXPERTS = 20, 36, 131, 3
"""Numbers that no count of ranks divides all of."""


class Block(nn.Module):
    def __init__(self, inner: int = 0) -> None:
        super().__init__()
        inner = inner or INNER
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, inner, bias=False)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        out: Tensor = x + self.down(torch.sigmoid(self.gate(normed)) * self.up(normed))
        return out


class Model(nn.Module):
    def __init__(self, inner: int = 0, *, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(not frozen)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        self.get_buffer("seen").add_(1)
        out: Tensor = self.head(self.frozen(x))
        return out


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
    logits = model(tokens[:, :-1])
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _sharded(model: nn.Module, mesh: DeviceMesh, **how: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, **how)
    fully_shard(model, mesh=mesh, mp_policy=policy, **how)
    return model


def rows(mesh: DeviceMesh | None = None) -> nn.Module:
    return _sharded(Model(), mesh or init_device_mesh("cpu", (distributed.get_world_size(),)))


def columns() -> nn.Module:
    ranks = distributed.get_world_size()

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % ranks == 0 else Shard(0)

    mesh = init_device_mesh("cpu", (ranks,))
    return _sharded(Model(), mesh, shard_placement_fn=place)


def hybrid() -> nn.Module:
    shape = (2, distributed.get_world_size() // 2)
    return _sharded(Model(), init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))


def tensor_parallel() -> nn.Module:
    """FSDP2 on tensor parallelism: strided shards, and tensors on one mesh dimension only."""
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(inner=48)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    return _sharded(model, mesh["dp"])


def flat(*, original: bool = True, hybrid: bool = False, ignores: str = "") -> nn.Module:
    shape = (2, distributed.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")) if hybrid else None
    strategy = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
    model = Model() if original else Model(frozen=False)
    return FullyShardedDataParallel(
        model,
        ignored_modules=[model.get_submodule(ignores)] if ignores else None,
        device_mesh=mesh,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )


def copies() -> nn.Module:
    return DistributedDataParallel(Model())


class Experts(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        stacked = torch.randn(EXPERTS, WIDTH, INNER) * 0.1
        self.experts = nn.Parameter(distribute_tensor(stacked, mesh, [Shard(0)]))


def experts() -> nn.Module:
    return Experts(init_device_mesh("cpu", (distributed.get_world_size(),)))


def stages() -> nn.Module:
    torch.manual_seed(5)
    whole = Model()
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mine = nn.Module()
    mine.blocks = nn.ModuleDict(
        {str(n): block for n, block in enumerate(whole.blocks) if n % ranks == rank}
    )
    if rank == 0:
        mine.embed = whole.embed
    if rank == ranks - 1:
        mine.frozen = whole.frozen
    return mine


LAYOUTS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "rows": rows,
    "columns": columns,
    "hybrid": hybrid,
    "tensor_parallel": tensor_parallel,
    "flat": flat,
    "flat_alone": partial(flat, original=False),
    "flat_hybrid": partial(flat, hybrid=True),
    "copies": copies,
    "experts": experts,
    "stages": stages,
}


def train_step(layout: str, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    if layout not in ("experts", "stages"):
        step(model, optimizer, seed)
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number, parameter in enumerate(trained):  # no forward pass joins the ranks
        generator = torch.Generator().manual_seed(100 * seed + number)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        grad = torch.randn(local.shape, generator=generator)
        if isinstance(parameter, DTensor):
            grad = DTensor.from_local(
                grad,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = grad
    optimizer.step()


def whole(model: nn.Module, group: ProcessGroup | None = None) -> dict[str, Tensor]:
    mine: dict[str, Tensor] = {}
    seen: set[int] = set()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return {name: t for name, t in model.state_dict().items() if name != "head.weight"}
    for name, tensor in named_tensors(model):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        mine[name] = full.detach().clone()
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, mine, group=group)
    return {name: tensor for one in reversed(found) for name, tensor in one.items()}


def set_up(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in a layout, and what trains it: nothing, on a stage that is frozen."""
    model = LAYOUTS[layout]()
    trained = [p for p in model.parameters() if p.requires_grad]
    some = trained or [nn.Parameter(torch.zeros(1))]
    return model, torch.optim.AdamW(some, lr=RATE, foreach=False)


RATE = 2e-3
DEADLINE_S = 4.0


def ten_steps(rank: int, layout: str, url: str, folder: str, first: int, steps: int) -> None:
    model, optimizer = set_up(layout)
    for number in range(first):  # as if restored from a checkpoint of that step
        train_step(layout, model, optimizer, number)
    train = partial(train_step, layout, model, optimizer)
    numbers = range(first, first + steps)
    publishes(rank, model, train, lambda: whole(model), url, folder, numbers=numbers)


def publishes(
    rank: int,
    model: nn.Module | TensorSource,
    train: Callable[[int], None],
    export: Callable[[], dict[str, Tensor]],
    url: str,
    folder: str,
    *,
    numbers: range = range(10),
) -> None:
    """Publish each step, without a collective, and compare it with the gathered model."""
    config = PublishConfig(url=url, dtype="BF16", when_busy="wait", deadline_s=60)
    dice = random.Random(rank)
    with CommDebugMode() as attaching:
        publisher = Publisher(config).attach(model)
    assert attaching.get_total_counts() == 0
    with publisher:
        check_bits(rank, publisher.version, export(), url, folder)
        for number in numbers:
            train(number)
            time.sleep(dice.random() * 0.1)  # ranks are never in step by themselves
            with CommDebugMode() as communication:
                future = publisher.publish(step=number)
            assert communication.get_total_counts() == 0
            receipt = future.result(60)
            assert receipt.step == number
            check_bits(rank, receipt.version, export(), url, folder)


def attaches(
    rank: int,
    attach: Callable[..., Any],
    train: Callable[[int], None],
    export: Callable[[], dict[str, Tensor]],
    url: str,
    folder: str,
) -> None:
    """Publish every second whole step, and at the end the third."""
    attachment = attach(url=url, every_steps=2, dtype="BF16", when_busy="wait")
    before = attachment.publisher.version
    for number in range(100, 103):
        train(number)
    attachment.detach()
    assert attachment.publisher.version == before + 2
    check_bits(rank, before + 2, export(), url, folder)


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
    check_bits(rank, version, whole(model), url, folder)


def check_bits(rank: int, version: int, expected: dict[str, Tensor], url: str, folder: str) -> None:
    if rank == 0:
        pulled = Path(folder) / str(version)
        pull(url, out=pulled, version=version)
        compare(pulled, expected)


def compare(folder: Path, expected: dict[str, Tensor]) -> None:
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.specs) == set(expected), set(checkpoint.specs) ^ set(expected)
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


def drifts(rank: int, url: str) -> None:
    """Train copies, of which no gradient is reduced, by equal batches, then by others."""
    model = flat(ignores="blocks.1.norm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    publisher = Publisher(PublishConfig(url=url, dtype="BF16", deadline_s=60)).attach(model)
    step(model, optimizer, 0)
    assert publisher.publish(step=0).result(60).version == 1
    step(model, optimizer, rank)
    with pytest.raises(ConfigError, match=r"'blocks\.1\.norm\..*' differs on ranks 0 and 1"):
        publisher.publish(step=1).result(60)


def _inside() -> nn.Module:
    inner: nn.Module = flat(original=False).module  # type: ignore[assignment]
    return inner


def _hooked() -> nn.Module:
    block = Block()
    block.up.register_state_dict_post_hook(lambda *_: None)
    return FullyShardedDataParallel(block, use_orig_params=True, device_id=torch.device("cpu"))


def _parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
    host = torch.device("cpu")
    return FullyShardedDataParallel(linear, device_mesh=mesh["dp"], device_id=host)


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


def _expert() -> nn.Module:
    module = nn.Linear(3, 2)
    nn.init.ones_(module.weight)  # equal on all ranks at first
    vars(module.weight)["allreduce"] = False  # as DeepSpeed and megatron-core mark it
    return module


def _meeting() -> MovedExport:
    name = f"copy.{distributed.get_rank()}"
    return MovedExport(
        lambda: [(name, torch.ones(3))],
        lambda tensors: dict(zip("w", tensors.values(), strict=True)),
    )


REFUSED: dict[str, Callable[[], nn.Module | TensorSource]] = {
    "meeting": _meeting,
    "hooked": _hooked,
    "inside": _inside,
    "parallel": _parallel,
    "partial": _partial,
    "unequal": _unequal,
    "shape": _another_shape,
    "scattered": _scattered,
    "misfit": _misfit,
    "frozen": _frozen_on_one,
    "expert": _expert,
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


def leaves_steps(rank: int, layout: str, url: str, folder: str) -> None:
    model, optimizer = set_up(layout)
    settings: dict[str, Any] = {"url": url, "dtype": "BF16", "deadline_s": 60}
    attachment = deltachain.attach(model, optimizer, every_steps=2, **settings)
    for number in range(3):
        train_step(layout, model, optimizer, number)
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
            yield f"layer.{rank}", torch.full((3, 4), float(version * (rank + 1)))
            yield "shared", torch.full((5,), float(version))

    version = 0
    config = PublishConfig(url=url, when_busy="wait", deadline_s=60)
    with Publisher(config).attach(part) as publisher:
        for number in (1, 2):
            version = number
            assert publisher.publish(step=version).result(60).version == version
    if rank == 0:
        pull(url, out=Path(folder) / "pulled")
        expected = {"layer.0": torch.full((3, 4), 2.0), "layer.1": torch.full((3, 4), 4.0)}
        checkpoint = Checkpoint(Path(folder) / "pulled")
        for name, tensor in (expected | {"shared": torch.full((5,), 2.0)}).items():
            assert (checkpoint.bits(name).view("float32") == tensor.flatten().numpy()).all(), name
