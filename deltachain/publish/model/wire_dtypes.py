"""Wire dtypes of live weights: those of the checkpoint, unless another was asked for."""

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import ConfigError, FormatError, UnsupportedModelError
from deltachain.publish.config import AS_IN_MODEL
from deltachain.torch_names import TORCH_DTYPES, WIRE_NAMES, unwrapped
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)

# Transformers leaves no trace of ``subfolder`` and ``variant``: of several sets of weights, the
# folder's own is known by its values.


_PLAIN: Final = frozenset({"F16", "BF16", "F32", "F64"})
"""Floating point dtypes of weights that are not quantised."""

_COMPARED: Final = 4  # number of matrices whose values tell one set of weights from another

_VARIANT: Final = re.compile(r"model\.([^.]+?)(-\d+-of-\d+)?\.safetensors")
"""Names of the files that ``save_pretrained(variant=...)`` writes."""

_PLACES: Final = ("*.safetensors", "[!.]*/*.safetensors", "[!.]*/[!.]*/*.safetensors")
"""Patterns of weight files in a folder and in folders below it."""

_RUN: Final = re.compile(r"(checkpoint-|global_step)\d+")
"""Names of the folders that a trainer writes; they hold masters, which a resumed run loads."""

_WHOLE: Final = "model"  # key of the weights of a folder that are no variant


Warn: TypeAlias = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of weights in a checkpoint, beside those of a model, by their names there."""

    label: str
    parts: tuple[Checkpoint, ...]
    own: Mapping[str, TensorSpec]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: spec for part in self.parts for name, spec in part.specs.items()}

    @property
    def shared(self) -> list[tuple[TensorSpec, TensorSpec]]:
        return [(spec, self.own[name]) for name, spec in self.specs.items() if name in self.own]

    @property
    def is_alike(self) -> bool:
        """Whether most tensors of equal names have equal shapes, or other rows."""
        shapes = [(one.shape, mine.shape) for one, mine in self.shared]
        alike = sum(len(one) == len(mine) and one[1:] == mine[1:] for one, mine in shapes)
        return bool(shapes) and 2 * alike >= len(shapes)

    @property
    def is_refused(self) -> bool:
        """Whether a weight is as wide as in the model, or wider, in another dtype."""
        both = ((TORCH_DTYPES[one.dtype], TORCH_DTYPES[mine.dtype]) for one, mine in self.shared)
        floats = (two for two in both if all(one.is_floating_point for one in two))
        return any(one != mine and one.itemsize >= mine.itemsize for one, mine in floats)

    @property
    def dtypes(self) -> dict[str, str]:
        return {one.name: one.dtype for one, _ in self.shared}

    def unquantised(self, warn: Warn) -> Mapping[str, str]:
        codes = [
            (one, mine)
            for one, mine in sorted(self.shared, key=lambda both: both[0].name)
            if mine.dtype in _PLAIN and one.dtype not in _PLAIN
        ]
        if not codes:
            return {name: spec.dtype for name, spec in self.specs.items()}
        first, mine = codes[0]
        warn(
            f"{len(codes)} weights such as {first.name!r} are {first.dtype} in the checkpoint that "
            "the model was loaded from, and dequantised in the model: all weights are published in "
            f"the dtypes of the model, this one as {mine.dtype}"
        )
        return {}

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        specs = self.specs
        names = [
            name
            for name, tensor in tensors.items()
            if name in specs
            and specs[name].dtype in _PLAIN
            and tensor.dim() > 1
            and tuple(tensor.shape) == specs[name].shape
            and tensor.is_floating_point()
            and type(tensor.detach()) is Tensor  # whole, and of no format of its own
            and not tensor.is_meta
        ]
        chosen = sorted(names, key=lambda name: (tensors[name].numel(), name))[:_COMPARED]
        try:
            return bool(chosen) and all(
                torch.equal(
                    self._values(name).to(tensors[name].dtype), tensors[name].detach().cpu()
                )
                for name in chosen
            )
        except (ConfigError, FormatError) as exc:
            logger.debug("%s is not compared with the model: %s", self.label, exc)
            return False

    def _values(self, name: str) -> Tensor:
        part = next(part for part in self.parts if name in part.specs)
        spec = part.specs[name]
        return torch.from_numpy(part.bits(name)).view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


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


def given_dtypes(folder: Path, own: Mapping[str, TensorSpec], warn: Warn) -> Mapping[str, str]:
    whole, fault = _whole(folder, own)
    if whole is not None:
        return whole.unquantised(warn)
    warn(fault)
    return {}


def origin_dtypes(
    folder: Path | None,
    own: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    warn: Warn,
) -> Mapping[str, str]:
    """Return the wire dtypes of the weights that a model was loaded from; none if unknown.

    Sets of weights in subfolders, and variants, count if the folder's own are not the model's.
    """
    if folder is None or not folder.is_dir():
        return {}
    whole, fault = _whole(folder, own)
    if whole is None:
        warn(fault)
        return {}
    if not whole.is_alike:
        return {}
    if whole.is_refused or not whole.holds(tensors):
        sets = [whole, *(one for one in _others(folder, own) if one.is_alike)]
        if any(one.dtypes != whole.dtypes for one in sets):
            said = " and ".join(sorted({dtype for one in sets for dtype in one.dtypes.values()}))
            warn(
                f"there are several sets of weights that may be the model's, in {said} "
                f"({', '.join(one.label for one in sets)}): its weights are published in the "
                "dtypes of the model; give dtype=, such as dtype='BF16', to publish them in "
                "another one"
            )
            return {}
    return whole.unquantised(warn)


def _whole(folder: Path, own: Mapping[str, TensorSpec]) -> tuple[_Set | None, str]:
    """Return the weights of a folder, and why they are unreadable; ``None`` without any."""
    if not any(folder.glob("*.safetensors*")):
        return None, ""
    try:
        return _Set(str(folder), (Checkpoint(folder),), own), ""
    except (ConfigError, FormatError) as exc:
        return None, (
            "the dtypes of the checkpoint that the model was loaded from are not known, so that "
            f"weights are published in the dtypes of the model: {exc}"
        )


def _others(folder: Path, own: Mapping[str, TensorSpec]) -> Iterator[_Set]:
    files = sorted(itertools.chain.from_iterable(map(folder.glob, _PLACES)))
    groups: dict[tuple[Path, str], list[Path]] = {}
    for file in files:
        variant = _VARIANT.fullmatch(file.name)
        groups.setdefault((file.parent, variant[1] if variant else _WHOLE), []).append(file)
    for (parent, kind), members in groups.items():
        if (parent, kind) == (folder, _WHOLE) or _RUN.fullmatch(parent.name):
            continue
        paths = [parent] if kind == _WHOLE else members
        try:
            yield _Set(str(paths[0]), tuple(map(Checkpoint, paths)), own)
        except (ConfigError, FormatError) as exc:
            logger.debug("%s does not count as the model's weights: %s", paths[0], exc)


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
    found = list(weights)
    if not dtype and known == {} and any(spec.dtype == "F32" for spec, _ in found):
        logger.warning(_FP32)
    narrow = [spec for spec, live in found if _is_narrower(TORCH_DTYPES[spec.dtype], live)]
    if narrow:
        limits = torch.finfo(TORCH_DTYPES[narrow[0].dtype])
        logger.warning(
            "%d weights, such as %r, are published as %s, in which values below %.1g become zero",
            len(narrow),
            narrow[0].name,
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
    """Return the names of weights that the model's class keeps in fp32 beside 16-bit weights."""
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
    """Return the wire dtype of all checkpoint tensors of a live tensor: given, or in ``wire``."""
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
