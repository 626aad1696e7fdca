"""Wire dtypes of live weights: those of the checkpoint, unless another was asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import ConfigError, FormatError, UnsupportedModelError
from deltachain.torch_names import TORCH_DTYPES, WIRE_NAMES, unwrapped
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)

_FP32: Final = (
    "no checkpoint says otherwise: fp32 weights are published as fp32, nearly all of which change "
    "in a step; give dtype='BF16' if they are masters of a bf16 model"
)


def say_dtypes(
    weights: Iterable[tuple[TensorSpec, torch.dtype]],
    dtype: str | None,
    known: Mapping[str, str] | None,
) -> None:
    """Log what a user may not expect of the wire dtypes.

    Args:
        weights: Spec and live dtype of each weight.
        dtype: Wire dtype of every floating point weight, if given.
        known: Wire dtypes of the checkpoint by name, if any; ``None`` for an export.
    """
    found = list(weights)
    if not dtype and known == {} and any(spec.dtype == "F32" for spec, _ in found):
        logger.warning(_FP32)
    narrow = [spec for spec, live in found if _is_narrower(TORCH_DTYPES[spec.dtype], live)]
    if narrow:
        limits = torch.finfo(TORCH_DTYPES[narrow[0].dtype])
        logger.warning(
            "%r and %d more weights are published as %s, in which values below %.1g become zero",
            narrow[0].name,
            len(narrow) - 1,
            narrow[0].dtype,
            limits.smallest_normal * limits.eps / 2,
        )
    if not dtype:
        return
    wide = TORCH_DTYPES[dtype].itemsize
    is_mixed = any(live.is_floating_point and live.itemsize <= wide for _, live in found)
    rounded = [
        spec.name
        for spec, live in found
        if live.is_floating_point
        and live.itemsize > wide
        and (
            is_mixed or TORCH_DTYPES.get((known or {}).get(spec.name, dtype), live).itemsize > wide
        )
    ]
    if rounded:
        logger.warning(
            "dtype=%r rounds %d weights that the model or its checkpoint has in a wider dtype than "
            "others, such as %r: leave dtype out to publish each in its own",
            dtype,
            len(rounded),
            rounded[0],
        )


def _is_narrower(wanted: torch.dtype, live: torch.dtype) -> bool:
    """Return whether a wire dtype of 16 bits has no values as small as the live one."""
    if not wanted.is_floating_point or not live.is_floating_point or wanted.itemsize != 2:
        return False
    return torch.finfo(wanted).smallest_normal > 2 * torch.finfo(live).smallest_normal


def origin(model: nn.Module) -> Path | None:
    """Return the folder the model was loaded from: a path, or the cache of its Hub repository."""
    config = getattr(unwrapped(model), "config", None)
    name = getattr(config, "_name_or_path", "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - if it is there
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    except ImportError:
        return None
    try:
        commit = getattr(config, "_commit_hash", None)
        cached = try_to_load_from_cache(name, "config.json", revision=commit)
    except HFValidationError:  # neither a folder nor a repository
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def checkpoint_dtypes(folder: Path | None) -> dict[str, str]:
    """Return the wire dtypes of a checkpoint by name; none if the folder has no weights.

    Weights files that cannot be read are named in the log.
    """
    if folder is None or not any(folder.glob("*.safetensors*")):
        return {}
    try:
        checkpoint = Checkpoint(folder)
    except (ConfigError, FormatError) as exc:
        logger.warning(
            "the dtypes of the checkpoint that the model was loaded from are not known, so that "
            "weights are published in the dtypes of the model: %s",
            exc,
        )
        return {}
    return {name: spec.dtype for name, spec in checkpoint.specs.items()}


def wire_dtype(
    names: Sequence[str], tensor: Tensor, dtype: str | None, wire: Mapping[str, str]
) -> str:
    """Return the wire dtype of all checkpoint tensors of a live tensor.

    Args:
        names: Names of the checkpoint tensors.
        tensor: The live one.
        dtype: Wire dtype of every floating point weight, if given.
        wire: Wire dtypes of the checkpoint, by name.

    Raises:
        ConfigError: It has no wire form, or it must be said which cast is meant.
    """
    own, name = WIRE_NAMES[tensor.dtype], names[0]
    found = {wire.get(one, own) for one in names}
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{name!r} and tensors fused with it are {sorted(found)} in the checkpoint",
            hint="give dtype= explicitly",
        )
    wanted = dtype if dtype and tensor.is_floating_point() else found.pop()
    if wanted not in TORCH_DTYPES:
        raise ConfigError(f"dtype {wanted!r} has no wire form", hint="for example dtype='BF16'")
    narrows = tensor.is_floating_point() and TORCH_DTYPES[wanted].is_floating_point
    # fp16 as bf16, or the reverse, loses bits or range: only if it was asked for.
    limit = tensor.element_size() + (wanted == dtype)
    if wanted != own and not (narrows and TORCH_DTYPES[wanted].itemsize < limit):
        raise UnsupportedModelError(
            f"{name!r} is {own} in the model and {wanted} in its checkpoint",
            hint=f"give dtype= explicitly: dtype={own!r} publishes what is trained",
        )
    return wanted
