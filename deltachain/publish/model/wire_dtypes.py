"""Wire dtypes of live weights: those of the checkpoint, unless another was asked for."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.publish.config import AS_IN_MODEL
from deltachain.torch_names import TORCH_DTYPES, WIRE_NAMES
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)

_FP32: Final = (
    "no checkpoint says otherwise: fp32 weights are published as fp32, nearly all of which change "
    "in a step; give dtype='BF16' if they are masters of a bf16 model"
)


_KEPT: Final = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""Attributes of classes of transformers: patterns of names that stay fp32 at a load."""


def say_dtypes(
    weights: Iterable[tuple[TensorSpec, torch.dtype]],
    dtype: str | None,
    known: Mapping[str, str] | None,
) -> None:
    """Log what a user may not expect of the wire dtypes.

    Args:
        weights: Spec and live dtype of each weight.
        dtype: Wire dtype of every floating point weight, if given.
        known: Wire dtypes of the checkpoint by name, if any; ``None`` if none was looked for.
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
        _say_rounded(found)
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
            "others, such as %r: dtype=%r publishes each in its dtype in the model; without dtype, "
            "the checkpoint's dtype counts",
            dtype,
            len(rounded),
            rounded[0],
            AS_IN_MODEL,
        )


def _say_rounded(found: Sequence[tuple[TensorSpec, torch.dtype]]) -> None:
    """Log fp32 weights beside 16-bit ones that are rounded to the dtype of the checkpoint."""
    rounded = [
        spec for spec, live in found if live == torch.float32 and _is_half(TORCH_DTYPES[spec.dtype])
    ]
    if rounded and any(_is_half(live) for _, live in found):
        logger.warning(
            "%d weights such as %r are rounded to %s, their dtype in the checkpoint that the model "
            "was loaded from; a save of the model has them in F32, beside others in 16 bits: "
            "dtype=%r publishes each in its dtype in the model",
            len(rounded),
            rounded[0].name,
            rounded[0].dtype,
            AS_IN_MODEL,
        )


def _is_narrower(wanted: torch.dtype, live: torch.dtype) -> bool:
    """Return whether a wire dtype of 16 bits has no values as small as the live one."""
    if not wanted.is_floating_point or not live.is_floating_point or wanted.itemsize != 2:
        return False
    return torch.finfo(wanted).smallest_normal > 2 * torch.finfo(live).smallest_normal


def kept_in_fp32(model: nn.Module, weights: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of fp32 weights that the model's class keeps so beside 16-bit weights.

    None of a model that is wholly fp32: its weights are masters.

    Args:
        model: The model, unwrapped.
        weights: Its weights by name.
    """
    if not any(map(_is_half, (one.dtype for one in weights.values()))):
        return frozenset()
    kept = (getattr(one, name, None) or () for one in model.modules() for name in _KEPT)
    globs = sorted(set(itertools.chain.from_iterable(kept)))
    patterns = [re.compile(glob.replace("*", ".*")) for glob in globs]
    return frozenset(
        name
        for name, one in weights.items()
        if one.dtype == torch.float32 and any(pattern.search(name) for pattern in patterns)
    )


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


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
