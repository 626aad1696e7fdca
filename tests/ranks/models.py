"""Models that ranks train, in every layout, and what each rank does with one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from deltachain.checkpoint import Checkpoint
from deltachain.cli.pull import pull
from deltachain.kernels.torch_kernels import bits_of
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.publisher import Published
from deltachain.store import Store, open_store
from deltachain.torch_names import named_tensors
from deltachain.types import BITS_DTYPES
from tests.support.faults import Fault, FaultyStore

WIDTH, INNER, VOCAB, EXPERTS = 20, 36, 131, 3
"""Numbers that no count of ranks divides all of."""


class Block(nn.Module):
    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, inner, bias=False)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        out: Tensor = x + self.down(torch.sigmoid(self.gate(normed)) * self.up(normed))
        return out


class Model(nn.Module):
    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
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


def whole(model: nn.Module) -> dict[str, Tensor]:
    mine: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_tensors(model):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        mine[name] = full.detach().clone()
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return {name: tensor for one in reversed(found) for name, tensor in one.items()}


RATE: Final = 2e-3


def set_up(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in a layout, and what trains it: nothing, on a stage that is frozen."""
    model = LAYOUTS[layout]()
    trained = [p for p in model.parameters() if p.requires_grad]
    some = trained or [nn.Parameter(torch.zeros(1))]
    return model, torch.optim.AdamW(some, lr=RATE, foreach=False)


class Training:
    """One rank's part of a model that is trained and published."""

    def __init__(
        self,
        url: str,
        layout: str = "rows",
        *,
        store: Store | None = None,
        **settings: Any,
    ) -> None:
        self.url, self.layout, self.store = url, layout, store
        self.model, self.optimizer = set_up(layout)
        self.config = PublishConfig(**{"url": url, "dtype": "BF16", "deadline_s": 60, **settings})

    def __enter__(self) -> Self:
        self.publisher = Publisher(self.config, store=self.store).attach(self.model)
        return self

    def __exit__(self, *error: Any) -> None:
        self.publisher.__exit__(*error)

    def train(self, number: int) -> None:
        train_step(self.layout, self.model, self.optimizer, number)

    def publish(self, number: int) -> Published:
        """Train a step and publish it."""
        self.train(number)
        return self.publisher.publish(step=number)

    def check(self, version: int, folder: str) -> None:
        check(version, self.model, self.url, folder)


def faulty(url: str, *faults: Fault) -> FaultyStore:
    return FaultyStore(open_store(url, writer=True), *faults)


def check(version: int, model: nn.Module, url: str, folder: str) -> None:
    """Pull a version and compare it with the model that the ranks hold together."""
    expected = whole(model)
    if distributed.get_rank() == 0:
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


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.wide = nn.Linear(352, 200)
        self.tall = nn.Linear(160, 410, bias=False)
        self.small = nn.Linear(64, 5, bias=False)
        with torch.no_grad():
            self.wide.weight[130:] = 0  # blocks of zeros


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 80,
        "intermediate_size": 80,
        "moe_intermediate_size": 144,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "vocab_size": 50,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {"layers": Layers, "mixture": mixture}


def shard_(model: nn.Module, dim: int) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            at = min(dim, parameter.ndim - 1)
            spread = distribute_tensor(parameter.detach(), mesh, [Shard(at)], src_data_rank=None)
            setattr(module, name, nn.Parameter(spread))


def step_(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            change = torch.randn(parameter.shape, generator=generator) * 1e-4
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                change = distribute_tensor(change, mesh, placements, src_data_rank=None)
            parameter.add_(change)
