"""Everything that may differ between versions of SGLang, and the range that was tested."""

# ruff: noqa: PLC0415 - SGLang is imported where it is used: it takes seconds
from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from fastapi import APIRouter
from torch import Tensor, nn

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

_SCHEDULER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_RUNNER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

ASKED: Final = f"{_SCHEDULER}.SchedulerWeightUpdaterManager.check_weights"
WRITTEN: Final = f"{_RUNNER}.WeightUpdater.update_weights_from_disk"
TOLD: Final = f"{_TOKENIZER}.update_weights_from_disk"
CHECKED: Final = f"{_TOKENIZER}.check_weights"
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


def checkpoint() -> tuple[str, str | None]:
    """What this server loads: a folder or a repository, and its revision."""
    from sglang.srt.runtime_context import get_model

    return get_model().model_path, get_model().revision


def exposure() -> tuple[str, bool]:
    """The host that this server listens on, and whether it asks for a key."""
    from sglang.srt.runtime_context import get_serving

    return get_serving().host, bool(get_serving().api_key or get_serving().admin_api_key)


def guard_routes(router: APIRouter) -> None:
    """Let SGLang ask for its key on our routes as on its own that write weights."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for route in router.routes:
        auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint)  # type: ignore[attr-defined]


def check_layout() -> None:
    """Refuse arrangements of ranks and models that one leader can not update as one.

    Raises:
        ConfigError: This server has one.
    """
    from sglang.srt.runtime_context import get_parallel, get_spec

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

    async def update(self, path: str, *, flush: bool) -> str:
        """Update from a path of ours, as from disk; the model keeps its own path and name.

        Args:
            path: What is asked of the ranks.
            flush: Whether caches go, if all ranks have written. SGLang's own ``flush_cache`` would
                also give memory back to the device, or collect garbage where there is none: half a
                second in which nobody generates.
        """
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        manager = self._manager
        before = manager.model_path, manager.served_model_name
        load_format = manager.config_value("load_format")
        request = UpdateWeightFromDiskReqInput(
            model_path=path, load_format=load_format, flush_cache=flush
        )
        try:
            _, message, _ = await manager._wait_for_model_update_from_disk(request)
        finally:
            manager.model_path, manager.served_model_name = before
        return str(message)

    async def pause(self, mode: str) -> None:
        """Stop generating.

        SGLang's own ``abort`` looks once a second whether requests have ended.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        manager = self._manager
        if mode != "abort":
            await manager.pause_generation(PauseGenerationReqInput(mode=mode))
            return
        async with manager.is_pause_cond:
            manager.is_pause = True
            manager.abort_request(abort_all=True)
            while await manager.model_update_lock.is_locked():  # noqa: ASYNC110 - has no event
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
