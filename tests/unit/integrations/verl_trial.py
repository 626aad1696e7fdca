"""Runs in verl's environment, by path: its manager, worker groups and workers, on a CPU.

verl's own trainers need a card, so an actor here is a model under FSDP2 whose tensors are gathered
one by one, as verl's ``get_per_tensor_param`` does. Prints a line a step, and waits for one.
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from tests.checkpoint_engine.test_utils import MockServerAdapter
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

from deltachain.errors import ChainError, UnsupportedModelError

STEPS = 20
RATE = 1e-3


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    found = {}
    for name, tensor in tensors.items():
        bits = tensor.contiguous().view(torch.uint8)
        found[name] = hashlib.sha256(bits.numpy().tobytes()).hexdigest()
    return found


class Actor(Worker):
    def __init__(self, path: str, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (ranks,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        import_external_libs(config.custom_backend_module)
        self.engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=rank == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        inputs = torch.randint(3, 500, (2, 32))
        self.model(input_ids=inputs, labels=inputs).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self, folder: str = "") -> dict[str, str]:
        state = {name: tensor.detach().bfloat16() for name, tensor in self.gathered()}
        if folder and torch.distributed.get_rank() == 0:
            self.model.save_pretrained(folder, state_dict=state)
        return digests(state)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        del mode
        return await self.engine.send_weights(self.gathered(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


class Rollout(CheckpointEngineWorker):
    def __init__(self, rollout_config: RolloutConfig, model_config: HFModelConfig) -> None:
        adapter = MockServerAdapter(rollout_config, model_config)
        super().__init__(rollout_config, model_config, adapter)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def received(self) -> dict[str, str]:
        taken, self.server_adapter.received_weights = self.server_adapter.received_weights, {}
        return digests(taken)


class Replica:
    """One rollout with its two ranks, as verl's manager uses it; a mock has nothing to abort."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def nothing(self, **_: Any) -> None: ...

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def group(kind: type, pool: RayResourcePool, **arguments: Any) -> RayWorkerGroup:
    made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def pool() -> RayResourcePool:
    return RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1)


def tell(*said: Any) -> None:
    sys.stdout.write(f"{json.dumps(said)}\n")
    sys.stdout.flush()
    assert sys.stdin.readline(), "nobody waits for the next step"


async def tensors(path: str, config: CheckpointEngineConfig) -> None:
    """Both ranks of a rollout get all tensors of every step."""
    actors = group(Actor, pool(), path=path, config=config)
    model = HFModelConfig(path=path, use_remove_padding=False)
    given = {"rollout_config": RolloutConfig(name="vllm", checkpoint_engine=config)}
    rollouts = group(Rollout, pool(), model_config=model, **given)
    manager = CheckpointEngineManager(config, actors, [Replica(rollouts.workers)])
    for step in range(1, STEPS + 1):
        actors.step(step)
        metrics = await manager.update_weights(global_steps=step)
        tell(metrics["deltachain/version"], actors.digests(), rollouts.received())


def engine(url: str, *, deadline_s: float = 60, **settings: Any) -> Any:
    made = {"url": url, "dtype": "BF16", "deadline_s": deadline_s, **settings}
    return CheckpointEngineRegistry.new("deltachain", bucket_size=1, **made)


async def taken(rollout: Any, step: int) -> dict[str, Tensor]:
    return {name: one.clone() async for name, one in rollout.receive_weights(global_steps=step)}


async def faults(url: str) -> None:
    """An actor that starts again repeats a step, a late one ends the wait, an adapter is missed."""
    import_external_libs("deltachain.integrations.verl")
    weights, rollout = {"w": torch.zeros(64)}, engine(url)
    for _ in range(2):
        actor = engine(url, is_master=True)
        topology = type(actor).build_topology(1, 1, [actor.prepare(), rollout.prepare()])
        for worker, given in zip((actor, rollout), topology, strict=True):
            worker.init_process_group(**{name: value for name, (value,) in given.items()})
        weights["w"] += 1
        received = asyncio.create_task(taken(rollout, 7))  # before there is anything
        await asyncio.sleep(0.5)
        await actor.send_weights(iter(weights.items()), global_steps=7)
        assert torch.equal((await received)["w"], weights["w"].bfloat16())
    late = engine(url, deadline_s=0.5)
    late.init_process_group(after=100)
    try:
        await taken(late, 8)
    except ChainError as error:
        tell(str(error.args[0]))
    name = replace_lora_wrapper("layers.0.q_proj.weight", None)  # of FSDP with LoRA, not merged
    try:
        await engine(url, is_master=True).send_weights(iter([(name, torch.zeros(64))]))
    except UnsupportedModelError as error:
        tell(str(error.args[0]))


class Labels:
    """What verl's actor of a server has for its manager."""

    async def set_global_steps(self, step: int) -> None:
        self.step = step

    async def said(self) -> int:
        return self.step


async def follow(path: str, config: CheckpointEngineConfig, address: str) -> None:
    """A server that follows by itself has each step once the manager returns."""
    from deltachain.integrations.verl import FollowingManager  # noqa: PLC0415 - as verl does

    actors = group(Actor, pool(), path=path, config=config)
    label = ray.remote(Labels).remote()
    replica = SimpleNamespace(server_address=address, server_handle=label)
    manager = FollowingManager(config, actors, [replica])
    for step in range(1, STEPS + 1):
        actors.step(step)
        await manager.update_weights(global_steps=step)
        actors.digests(f"{path}-{step}")
        tell(await label.said.remote())


def main() -> None:
    path, url, address = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if address == ["faults"]:
        asyncio.run(faults(url))
        return
    config = CheckpointEngineConfig(
        backend="deltachain",
        custom_backend_module="deltachain.integrations.verl",
        engine_kwargs={"deltachain": {"url": url, "dtype": "BF16"}},
    )
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        run = follow(str(path), config, address[0]) if address else tensors(str(path), config)
        asyncio.run(run)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
