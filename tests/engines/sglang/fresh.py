"""What a CPU rank of stock SGLang makes of a checkpoint, without a server around it.

See :mod:`tests.engines.vllm.fresh`, whose words it has. A process is one rank, and is brought up
for the first checkpoint that it loads as a scheduler would be; later ones are loaded into the same.
"""

# ruff: noqa: PLC0415 - SGLang reads its environment when it is imported
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias
from unittest.mock import DEFAULT, patch

import torch
from torch import nn

from deltachain.replica.engine import EngineModel
from examples.demo.online.processes import free_port
from tests.engines.two_ranks import RENDEZVOUS

_ENVIRONMENT: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

_published: dict[str, Any] = {}


def load_fresh(checkpoint: Path, **how: Any) -> nn.Module:
    with load_in_context(checkpoint, **how) as (_, model):
        return model


@contextmanager
def load_in_context(
    checkpoint: Path,
    *,
    tp: int = 1,
    rank: int = 0,
    plain_linears: bool = True,
    plain_experts: bool = False,
    way: str = "tp",
    redundant: int = 0,
    heads: bool = False,
) -> Iterator[tuple[Any, nn.Module]]:
    """As :func:`load_fresh`, staying where SGLang's loaders can be called again.

    Ranks are stages (``pp``) or shards, of experts as a whole (``ep``) or in part. ``heads`` of the
    checkpoint draft if asked for.
    """
    del plain_linears, plain_experts
    _bring_up(checkpoint, tp, rank, way, redundant)
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import get_model_loader

    named = {"model_path": str(checkpoint)}
    config = ModelConfig.from_server_args(_arguments(checkpoint, tp, way), **named)
    bootstrap.init_layer_runtime(model_config=config)
    if redundant:
        from sglang.srt.eplb import expert_location

        where = expert_location.ExpertLocationMetadata.init_trivial(config, rank)
        expert_location.set_global_expert_location_metadata(where, allow_overwrite=True)

    def loaded(config: Any) -> nn.Module:
        loader = get_model_loader(load_config=LoadConfig(), model_config=config)
        with _filled():
            made: nn.Module = loader.load_model(
                model_config=config, device_config=DeviceConfig("cpu", 0)
            )
        return made

    model: Any = loaded(config)
    if heads:
        theirs = ModelConfig.from_server_args(
            _arguments(checkpoint, tp, way), is_draft_model=True, **named
        )
        draft: Any = loaded(theirs)
        with patch.multiple(torch.cuda, empty_cache=DEFAULT, synchronize=DEFAULT):
            draft.set_embed_and_head(*model.get_embed_and_head())  # as SGLang's workers do
        model = nn.ModuleDict({"model": model, "draft": draft})
        model.heads = SimpleNamespace(model=draft, model_config=theirs)
    yield config, model


@contextmanager
def _filled() -> Iterator[None]:
    """Have new memory filled with NaN, and draws begin anew: what is not loaded is always alike."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)


def known(config: Any, model: nn.Module) -> EngineModel:
    from deltachain_sglang.model import SglangModel

    if isinstance(model, nn.ModuleDict):
        return SglangModel(model["model"], config, "cpu", model.heads)
    return SglangModel(model, config, "cpu")


Move: TypeAlias = Callable[[list[list[int]]], None]
"""Has all ranks move experts: takes the experts in the slots of every layer."""


@contextmanager
def load_moving(
    checkpoint: Path, *, rank: int, ranks: int, redundant: int
) -> Iterator[tuple[EngineModel, nn.Module, Move]]:
    """Load redundant experts, which SGLang itself moves."""
    how: dict[str, Any] = {"tp": ranks, "rank": rank, "way": "ep", "redundant": redundant}
    with load_in_context(checkpoint, **how) as (config, model):
        from sglang.srt.eplb.expert_location import ExpertLocationMetadata
        from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

        updater = ExpertLocationUpdater()

        def move(rows: list[list[int]]) -> None:
            held: Any = model.routed_experts_weights_of_layer
            new = ExpertLocationMetadata.init_by_mapping(config, torch.tensor(rows), rank)
            with patch.object(torch.cpu, "empty_cache", create=True):
                updater.update(held, new, list(held.keys()), nnodes=1, rank=rank)

        yield known(config, model), model, move


def _arguments(checkpoint: Path, ranks: int, way: str, redundant: int = 0) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(checkpoint),
        device="cpu",
        dtype="bfloat16",
        attention_backend="torch_native",
        tp_size=1 if way == "pp" else ranks,
        pp_size=ranks if way == "pp" else 1,
        ep_size=ranks if way == "ep" else 1,
        ep_num_redundant_experts=redundant,
        skip_tokenizer_init=True,
        mem_fraction_static=0.6,
        max_total_tokens=512,
        context_length=128,
        max_running_requests=2,
        disable_cuda_graph=True,
    )


def _bring_up(checkpoint: Path, tp: int, rank: int, way: str, redundant: int) -> None:
    if _published:
        return
    os.environ.update({**_ENVIRONMENT, **os.environ})
    if tp > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(tp))))
    from sglang.benchmark import one_batch
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    arguments = _arguments(checkpoint, tp, way, redundant)
    threads = torch.get_num_threads()
    at = {"tp_rank": 0, "pp_rank": rank} if way == "pp" else {"tp_rank": rank, "pp_rank": 0}
    ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, **at), gpu_id=rank)
    publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=_port(tp, rank))
    torch.set_num_threads(threads)
    _published["rank"] = rank


def _port(tp: int, rank: int) -> int:
    """A port that the ranks of a group agree on: the first writes down a free one."""
    if tp == 1:
        return free_port()
    meeting = Path(os.environ[RENDEZVOUS])
    if rank == 0:
        port = free_port()
        meeting.with_suffix(".new").write_text(str(port))
        meeting.with_suffix(".new").replace(meeting)
        return port
    while True:
        with contextlib.suppress(FileNotFoundError):
            return int(meeting.read_text())
