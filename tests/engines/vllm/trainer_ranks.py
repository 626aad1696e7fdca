"""What each rank of a trainer does that drives replicas by vLLM's interface."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from deltachain.subscribe import Subscriber
from deltachain_vllm import DeltaChainTrainerInit

STEPS = 5


class Replica:
    """A client by vLLM's protocol; its replica is a dict of tensors."""

    def __init__(self, url: str, weights: dict[str, Tensor]) -> None:
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self.inits: list[dict[str, Any]] = []
        self._subscriber = Subscriber(url, self.weights)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.inits.append(init_info)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._subscriber.update(update_info["version"])
        assert self._subscriber.held is not None
        assert self._subscriber.held.manifest == update_info["manifest"]


class Halves(WeightSource):  # type: ignore[misc]
    """A source of which each of two ranks holds every other tensor, as experts and stages do."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._all = dict(module.named_parameters())
        self._held = [*self._all][rank::2]

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._all.items()]

    def held_names(self) -> Collection[str]:
        return self._held

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, one if name in self._held else None) for name, one in self._all.items())


def full(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in model.state_dict().items()
    }


def follow(rank: int, kind: str, folder: str) -> None:
    torch.manual_seed(7)
    inner = [nn.Linear(20, 36), nn.LayerNorm(36), nn.Linear(36, 20, bias=False)]
    model = nn.Sequential(nn.Embedding(131, 20), *inner).bfloat16()
    if kind != "halves":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    url = (Path(folder) / "chain").as_uri()
    sources: dict[str, Callable[[], Any]] = {
        "shards": lambda: model,
        "gathered": lambda: ModuleSource(model),
        "halves": lambda: Halves(model, rank),
    }
    clients = [Replica(url, full(model)) for _ in range(2)]
    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaChainTrainerInit(url), client=clients, source=sources[kind]()
    )
    assert [client.inits for client in clients] == [[{}] * (rank == 0)] * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        model(torch.randint(131, (4,))).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with CommDebugMode() as talk:
            engine.send_weights()
        gathers = sum(n for op, n in talk.comm_counts.items() if "all_gather" in str(op))
        assert (gathers > 0) == (kind == "gathered"), talk.comm_counts
        wanted = full(model)
        for client in clients if rank == 0 else ():
            for name, tensor in wanted.items():
                found = client.weights[name].view(torch.int16)
                assert torch.equal(found, tensor.view(torch.int16)), name
    engine.shutdown()
    distributed.barrier()
