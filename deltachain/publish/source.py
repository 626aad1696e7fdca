"""The weights of a live model, under the names and dtypes of its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import ConfigError, FormatError
from deltachain.manifest import Table
from deltachain.names import TORCH_DTYPES, WIRE_NAMES, named_tensors
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the model.

    Attributes:
        spec: Checkpoint name, wire dtype, shape.
        tensor: The parameter or buffer, as it was when the model was walked.
        frozen: Whether training leaves it alone: then it is in anchors and digests only.
    """

    spec: TensorSpec
    tensor: Tensor
    frozen: bool


@dataclass(frozen=True, slots=True)
class Source:
    """Every tensor that a checkpoint of the model holds, once.

    Attributes:
        weights: Sorted by name.
        aliases: Further names of tied weights, and the name each is published under.
    """

    weights: tuple[Weight, ...]
    aliases: Mapping[str, str]
    model: nn.Module

    def now(self) -> Iterator[Weight]:
        """The weights as the model has them now: loading a state may have replaced tensors.

        Raises:
            ConfigError: A weight is gone, has another shape or dtype, or is no longer frozen.
        """
        live = dict(named_tensors(self.model))
        for weight in self.weights:
            name, then, tensor = weight.spec.name, weight.tensor, live.get(weight.spec.name)
            if tensor is None or (tensor.shape, tensor.dtype) != (then.shape, then.dtype):
                raise ConfigError(f"{name!r} is not what it was when the publisher was attached")
            if weight.frozen and tensor.requires_grad:
                raise ConfigError(
                    f"{name!r} was frozen when the publisher was attached, and is trained now",
                    hint="decide what is frozen before attaching",
                )
            yield replace(weight, tensor=tensor)

    def table(self) -> Table:
        """The chain's tensor table."""
        rows = tuple((w.spec.name, w.spec.dtype, w.spec.shape) for w in self.weights)
        return Table(tensors=rows, aliases=dict(sorted(self.aliases.items())))


def walk(model: nn.Module, *, dtype: str | None = None, checkpoint: Path | None = None) -> Source:
    """Collect the weights of a model: parameters and persistent buffers, tied ones once.

    Args:
        model: Wrapped or not; on any device.
        dtype: Wire dtype of every floating point weight.
        checkpoint: Where the model's checkpoint lies, for the wire dtypes. Not given: where the
            model says that it was loaded from, if that is a folder.

    Raises:
        ConfigError: The model can not be published as it is; the hint says what to do instead.
    """
    wire = {} if dtype else _checkpoint_dtypes(checkpoint or origin(model))
    found: dict[int, Weight] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named_tensors(model):
        _refuse(name, tensor)
        if id(tensor) in found:
            aliases[name] = found[id(tensor)].spec.name
            continue
        spec = TensorSpec(name, _wire_dtype(name, tensor, dtype, wire), tuple(tensor.shape))
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        found[id(tensor)] = Weight(spec, tensor, frozen)
    weights = tuple(sorted(found.values(), key=lambda w: w.spec.name))
    names = [weight.spec.name for weight in weights]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two weights of the model are called {twice!r} once unwrapped")
    if not weights:
        raise ConfigError("the model has no weights")
    _refuse_renamed(model, weights)
    if not dtype and not wire and any(w.spec.dtype == "F32" for w in weights):
        logger.warning(
            "no checkpoint says otherwise: fp32 weights are published as fp32, nearly all of which "
            "change in a step; give dtype='BF16' if they are masters of a bf16 model"
        )
    return Source(weights, aliases, model)


def _refuse(name: str, tensor: Tensor) -> None:
    """Say what to do with weights that one process does not hold whole."""
    kind = type(tensor).__name__
    if kind == "DTensor" or "_flat_param" in name:
        raise ConfigError(
            f"{name!r} is sharded over ranks ({kind}), which this version can not publish",
            hint="gather a checkpoint and use `deltachain push CHECKPOINT URL`",
        )
    if ".lora_" in name:
        raise ConfigError(
            f"{name!r} is an adapter: its base weights do not change",
            hint="merge it into a copy of the model and publish that, or ship the adapter itself",
        )
    if tensor.is_meta:
        raise ConfigError(f"{name!r} has no data yet (meta device)", hint="attach after loading")
    if tensor.dtype not in WIRE_NAMES or not tensor.is_contiguous():
        raise ConfigError(
            f"{name!r} is {tensor.dtype}, contiguous: {tensor.is_contiguous()}",
            hint="quantised and strided weights have no bits of their own on the wire; publish a "
            "checkpoint with `deltachain push`",
        )


def _refuse_renamed(model: nn.Module, weights: tuple[Weight, ...]) -> None:
    """Refuse models whose checkpoint has other tensors than the module, such as fused experts."""
    try:
        from transformers import PreTrainedModel  # noqa: PLC0415 - only where it is there anyway
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415
    except ImportError:
        return
    if not isinstance(model, PreTrainedModel):
        return
    for weight in weights:
        meta = torch.empty(weight.spec.shape, dtype=weight.tensor.dtype, device="meta")
        names = set(revert_weight_conversion(model, {weight.spec.name: meta}))
        if names != {weight.spec.name}:
            raise ConfigError(
                f"{weight.spec.name!r} is {sorted(names)[:2]} in the checkpoint, which this "
                "version can not map",
                hint="save checkpoints and use `deltachain push CHECKPOINT URL`",
            )


def origin(model: nn.Module) -> Path | None:
    """The folder that the model was loaded from: a path, or the Hub's cache of its repository."""
    config = getattr(model, "config", None)
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
    except HFValidationError:  # a name that is neither a folder nor a repository
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _checkpoint_dtypes(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    try:
        checkpoint = Checkpoint(folder)
    except (ConfigError, FormatError):  # a folder of other files says nothing about dtypes
        return {}
    return {name: spec.dtype for name, spec in checkpoint.specs.items()}


def _wire_dtype(name: str, tensor: Tensor, dtype: str | None, wire: Mapping[str, str]) -> str:
    own = WIRE_NAMES[tensor.dtype]
    wanted = dtype if dtype and tensor.is_floating_point() else wire.get(name, own)
    if wanted not in TORCH_DTYPES:
        raise ConfigError(f"dtype {wanted!r} has no wire form", hint="for example dtype='BF16'")
    narrows = tensor.is_floating_point() and TORCH_DTYPES[wanted].is_floating_point
    if wanted != own and not (narrows and TORCH_DTYPES[wanted].itemsize <= tensor.element_size()):
        raise ConfigError(
            f"{name!r} is {own} in the model and {wanted} in its checkpoint",
            hint="give dtype= explicitly",
        )
    return wanted
