"""Everything that may differ between versions of vLLM, and the range that was tested."""

from __future__ import annotations

import re
from typing import Any, Final

from deltachain.errors import ConfigError, EngineVersionError

FIRST: Final = (0, 32)
BEYOND: Final = (0, 33)
"""The tested range: from FIRST up to, not including, BEYOND."""

PAUSES: Final = ("keep", "wait", "abort")
"""Pause modes: running requests go on afterwards, are waited for, or end early."""

DERIVED: Final = re.compile(
    r"(^|\.)(cos_sin_cache|\w*inv_freq|alibi_slopes|normalizer|embed_scale|kv_cache"
    r"|_?[qkvp](rob)?_scale(_float|_cpu)?|_tensor_constant\d+|position_ids|lora_\w+|qk_norm\.weight)$"
)
"""Live floating-point tensors that vLLM makes itself, from the configuration alone. Llama 4's
``qk_norm`` has a weight of ones that no checkpoint fills."""


def check_version() -> str:
    """The version of the vLLM that is installed.

    Raises:
        EngineVersionError: It was not tested.
    """
    import vllm  # noqa: PLC0415

    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not FIRST <= version < BEYOND:
        raise EngineVersionError(
            f"vLLM {vllm.__version__} was not tested with this deltachain: "
            f"{_text(FIRST)} up to, not including, {_text(BEYOND)} was",
            hint=f'pip install "vllm>={_text(FIRST)},<{_text(BEYOND)}", or another deltachain',
        )
    return str(vllm.__version__)


def layerwise() -> Any:  # noqa: ANN401 - vLLM's module
    """The layerwise reload that comes with vLLM.

    Raises:
        EngineVersionError: This vLLM has none that we know.
    """
    try:
        from vllm.model_executor.model_loader.reload import layerwise as module  # noqa: PLC0415
    except ImportError as exc:
        raise EngineVersionError(f"this vLLM has no layerwise reload: {exc}") from exc
    return module


def linears() -> tuple[type, ...]:
    """Classes of layers that multiply by a parameter called ``weight``."""
    from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: PLC0415
        VocabParallelEmbedding,
    )

    return LinearBase, VocabParallelEmbedding


def pause_mode(named: str) -> str:
    """The pause mode of a name; the default for none.

    Raises:
        ConfigError: vLLM has no such mode.
    """
    if named and named not in PAUSES:
        raise ConfigError(f"pause mode {named!r} is none of {', '.join(PAUSES)}")
    return named or PAUSES[0]


def mode_in_doubt(mode: str) -> str:
    """The pause mode for weights that nothing more may be generated with."""
    return "keep" if mode == "wait" else mode


async def pause(client: Any, mode: str, *, clear: bool) -> None:  # noqa: ANN401 - vLLM's client
    """Pause the scheduler, and return once it stands still.

    vLLM's own ``pause_generation`` does this and then sleeps for 20 ms, so that those who wait for
    requests that it aborted are answered first. Nothing here waits for them, and the sleep was
    half of all that a swap took in a server.

    Args:
        client: vLLM's ``AsyncLLM``, or any other ``EngineClient``.
        mode: One of vLLM's.
        clear: Whether cached prefixes go.
    """
    scheduler = getattr(getattr(client, "engine_core", None), "pause_scheduler_async", None)
    front = getattr(getattr(client, "renderer", None), "clear_mm_cache_async", None)
    if scheduler is None or front is None:
        await client.pause_generation(mode=mode, clear_cache=clear)
        return
    if clear:
        await front()
    await scheduler(mode=mode, clear_cache=clear)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
