"""Everything that may differ between versions of SGLang, and the range that was tested."""

# ruff: noqa: PLC0415 - SGLang is imported where it is used: it takes seconds
from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from fastapi import APIRouter
from fastapi.routing import APIRoute
from torch import Tensor, nn

from deltachain.checkpoint import named_folder
from deltachain.errors import ConfigError, EngineVersionError

FIRST: Final = (0, 5, 23)
BEYOND: Final = (0, 5, 24)
"""The tested range: from FIRST up to, not including, BEYOND."""

PAUSES: Final = ("retract", "in_place", "abort")
"""Pause modes: running requests are computed anew afterwards, go on with what they have, or end."""

DERIVED: Final = re.compile(
    r"(^|\.)(cos_sin_cache|\w*inv_freq|alibi_slopes|normalizer|embed_scale|kv_cache"
    r"|_?[qkvp](rob)?_scale(_float|_cpu)?|position_ids|lora_\w+)$"
)
"""Live floating-point tensors that SGLang makes itself, from the configuration alone."""

ABORT_LOOK_S: Final = 0.01
"""Seconds between two looks whether requests that were aborted have ended."""

OUTLIVING: Final = ("enable_hierarchical_cache", "enable_lmcache")
"""Options under which cached prefixes outlive a flush, or keep the scheduler from flushing."""

_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

ASKED: Final = f"{_UPDATER}.SchedulerWeightUpdaterManager.check_weights"
PAUSED: Final = f"{_SCHEDULER}.pause_generation"
NAMED: Final = f"{_SCHEDULER}.record_weight_version_change"
TOLD: Final = f"{_TOKENIZER}.update_weights_from_disk"
CHECKED: Final = f"{_TOKENIZER}.check_weights"
RUN: Final = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
"""What is hooked, in the schedulers and in the server."""


def check_version() -> str:
    """The version of the SGLang that is installed.

    Raises:
        EngineVersionError: It was not tested.
    """
    import sglang

    found = re.match(r"(\d+)\.(\d+)\.(\d+)", sglang.__version__)
    version = tuple(int(number) for number in found.groups()) if found else (0, 0, 0)
    if not FIRST <= version < BEYOND:
        raise EngineVersionError(
            f"SGLang {sglang.__version__} was not tested with this deltachain: "
            f"{_text(FIRST)} up to, not including, {_text(BEYOND)} was",
            hint=f'pip install "sglang>={_text(FIRST)},<{_text(BEYOND)}", or another deltachain',
        )
    return str(sglang.__version__)


def pause_mode(named: str) -> str:
    """The pause mode of a name; the default for none.

    Raises:
        ConfigError: SGLang has no such mode.
    """
    if named and named not in PAUSES:
        raise ConfigError(f"pause mode {named!r} is none of {', '.join(PAUSES)}")
    return named or PAUSES[0]


def hook(target: str, function: Callable[..., Any]) -> None:
    """Let a function be called around another, as SGLang's plugins do; again changes nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if all(known is not function for _, known, _ in HookRegistry._hooks[target]):
        HookRegistry.register(target, function, HookType.AROUND)


def verdicts(text: str) -> Any:  # noqa: ANN401 - SGLang's message
    """The scheduler's answer to a question that travels as a check of its weights."""
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    return CheckWeightsReqOutput(success=True, message=text)


def gather(mine: object) -> list[Any]:
    """What every rank of this scheduler's group has, in their order."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size == 1:
        return [mine]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found


@contextmanager
def _grammars_aside(scheduler: Any) -> Iterator[None]:  # noqa: ANN401
    """Requests whose grammar is being compiled have cached nothing, but count as running."""
    grammars = scheduler.grammar_manager
    waiting, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        yield
    finally:
        grammars.grammar_queue = waiting


def can_flush(manager: Any) -> bool:  # noqa: ANN401
    """Whether no request of this scheduler keeps its cache."""
    scheduler = manager.scheduler
    with _grammars_aside(scheduler):
        return bool(manager.is_fully_idle(ignore_waiting=scheduler._engine_paused))


def flush(manager: Any) -> None:  # noqa: ANN401
    """Forget cached prefixes; device memory is kept, and no garbage is collected meanwhile."""
    with _grammars_aside(manager.scheduler):
        manager.flush_cache(empty_cache=False)


def rest(scheduler: Any) -> None:  # noqa: ANN401
    """Let a paused scheduler's watchdog see that it does not hang: it ends those that do."""
    scheduler.cur_batch_for_debug = None


def credit(scheduler: Any, version: str) -> None:  # noqa: ANN401
    """Label the tokens that were computed before a pause and are not handed out yet.

    A scheduler computes a step ahead of handing out, and labels what it hands out after the name
    has changed with the new one.

    Args:
        scheduler: Paused.
        version: Of the weights that computed them.
    """
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    for batch, _ in getattr(scheduler, "result_queue", ()):
        for request in batch.reqs:
            if request is scheduler.chunked_req or request.finished():
                continue  # its step makes no token
            events, count = request.weight_version_events, len(request.output_ids)
            if events and events[-1].num_output_tokens == count:
                events.pop()
            event = WeightVersionEvent(old_version=version, num_output_tokens=count + 1)
            events.append(event)


def named() -> str:
    """The version that this scheduler's tokens are labelled with."""
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def rank_of() -> int:
    """The number of this scheduler among its group."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_group.rank_in_group)


def guard(model: nn.Module) -> None:
    """Refuse what SGLang itself refuses to update: weights that others share or derive from.

    Raises:
        ConfigError: It would.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.runtime_context import get_model

    mode = get_model().weight_cache_mode
    if mode != "off":
        raise ConfigError(
            "the weights are shared with other engines by SGLang's weight cache",
            hint="start it with --weight-cache-mode off",
        )
    error = weight_updater._unsupported_derived_weight_cache_error(model)
    if error:
        raise ConfigError(f"SGLang refuses to update these weights: {error}")


def loading(dtype: torch.dtype) -> AbstractContextManager[None]:
    """What SGLang's loaders are called in."""
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    context: AbstractContextManager[None] = set_default_torch_dtype(dtype)
    return context


def reload(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Unpack, load, and pack again, as SGLang does for a checkpoint on disk."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.restore_weights_before_loading(model, device)
    DefaultModelLoader.load_weights_and_postprocess(model, tensors, device)


def linears() -> tuple[type[nn.Module], ...]:
    """Classes of layers that multiply by a parameter called ``weight``."""
    from sglang.srt.layers.linear import LinearBase

    return (LinearBase,)


def app() -> Any:  # noqa: ANN401
    """SGLang's FastAPI application."""
    from sglang.srt.entrypoints.http_server import app as found

    return found


def manager() -> Any:  # noqa: ANN401
    """The ``TokenizerManager`` of this server."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


def checkpoint(config: Any = None) -> Path:  # noqa: ANN401
    """The folder that SGLang loaded, in the Hub's cache where it is named by repository.

    Args:
        config: A rank's own, which knows of what was loaded later; the server's by default.
    """
    from sglang.srt.runtime_context import get_model

    named, cache = config or get_model(), get_model().download_dir
    return named_folder(named.model_path, revision=named.revision, cache=cache)


def exposure() -> tuple[str, str]:
    """The host that this server listens on, and the key that its own routes that write ask for."""
    from sglang.srt.runtime_context import get_serving

    return get_serving().host, get_serving().admin_api_key or get_serving().api_key or ""


def serve(router: APIRouter, prefix: str) -> None:
    """Add routes to SGLang's application, for which it asks for its key as for its own that write.

    One by one: SGLang finds out what a route asks for only where it lies in the application itself.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for route in router.routes:
        if isinstance(route, APIRoute):
            app().add_api_route(
                prefix + route.path,
                auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint),
                methods=sorted(route.methods or ()),
                responses=route.responses,
                response_class=route.response_class,
                openapi_extra=route.openapi_extra,
                tags=route.tags,
            )


def front_ends() -> int:
    """How many processes take requests for this server."""
    from sglang.srt.runtime_context import get_serving

    return int(get_serving().tokenizer_worker_num)


def check_layout(*, keep_cache: bool) -> None:
    """Refuse arrangements of ranks, models and caches that one leader can not update as one.

    Raises:
        ConfigError: This server has one.
    """
    from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel, get_spec

    for name, hint in (
        ("dp_size", "start a server for each replica"),
        ("pp_size", "pipeline stages are not supported: use --tp-size"),
    ):
        if getattr(get_parallel(), name) > 1:
            raise ConfigError(f"this server has {name} {getattr(get_parallel(), name)}", hint=hint)
    if get_spec().speculative_algorithm:
        raise ConfigError(
            "this server has a draft model, which follows no chain",
            hint="start it without --speculative-algorithm",
        )
    if get_disagg().disaggregation_mode != "null":
        raise ConfigError(
            "this server has other servers fill its caches, or fills theirs",
            hint="start it without --disaggregation-mode",
        )
    for name in OUTLIVING:
        if getattr(get_memory(), name) and not keep_cache:
            raise ConfigError(
                "cached prefixes of this server would outlive the weights that made them",
                hint=f"start it without --{name.replace('_', '-')}, or DELTACHAIN_KEEP_CACHE=1",
            )


class Server:
    """What is asked of a ``TokenizerManager``, on the loop that it lives on."""

    def __init__(self, manager: Any) -> None:  # noqa: ANN401
        self._manager = manager

    async def question(self, action: str) -> str:
        """Let every scheduler answer, as it checks its weights; it waits for no request."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        self._manager.auto_create_handle_loop()
        found = await self._manager.check_weights_communicator(CheckWeightsReqInput(action=action))
        return str(found[0].message)

    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        return bool(self._manager.is_pause)

    async def pause(self, mode: str) -> None:
        """Stop generating.

        SGLang's own ``abort`` aborts, and looks whether requests have ended, once a second. Once
        is not enough: some are not known yet, and some start others.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        manager = self._manager
        if mode != "abort":
            await manager.pause_generation(PauseGenerationReqInput(mode=mode))
            return
        async with manager.is_pause_cond:
            manager.is_pause = True
            while True:
                manager.abort_request(abort_all=True)
                if not await manager.model_update_lock.is_locked():
                    break
                await asyncio.sleep(ABORT_LOOK_S)

    async def resume(self) -> None:
        """Generate again."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        request = ContinueGenerationReqInput(torch_empty_cache=False)
        await self._manager.continue_generation(request)

    async def name(self, version: str) -> None:
        """Name the weights, for running requests from here on."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self._manager.update_weight_version(request)


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
