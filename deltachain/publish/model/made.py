"""Comparison of weights with a model made of a configuration, as loading them makes it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.config_fields import LIBRARY
from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.touched import read_config
from deltachain.publish.quantise.settings import CONFIG_FILE
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)

_CODES: Final = ("F8", "U8", "I8")
"""Beginnings of the dtypes that a quantised checkpoint has, by whatever file it says so."""

_HINT: Final = (
    f"correct the fields of {CONFIG_FILE}, such as num_hidden_layers, vocab_size or architectures, "
    f"or save the checkpoint again; weights in a folder without {CONFIG_FILE} are published as "
    "they are"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between weights and a model made of a configuration.

    Attributes:
        shapes: Shape of a weight and that in the model, by name, where they differ.
        missing: Names in the model only.
        extra: Names among the weights only.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    missing: Collection[str]
    extra: Collection[str]


def refuse_other_folder(files: Mapping[str, bytes], specs: Mapping[str, TensorSpec]) -> None:
    """Refuse a checkpoint whose ``config.json`` describes other weights than it has.

    The weights are loaded into a model without data, by the class of transformers that the file
    names. Where it knows none, or the checkpoint is quantised, nothing is compared.

    Args:
        files: Small files of the checkpoint.
        specs: Its tensors.

    Raises:
        ConfigError: Loading would leave out a weight, or make one up.
    """
    if CONFIG_FILE not in files or any(one.dtype.startswith(_CODES) for one in specs.values()):
        return
    try:
        found = _loaded(files[CONFIG_FILE], specs)
    except Exception as exc:  # noqa: BLE001 - absent, or of any model's code
        logger.debug("%s is not compared with the weights: %s", CONFIG_FILE, exc)
        return
    if found is not None:
        made, difference, state = found
        refuse_difference(made, difference, state, by=CONFIG_FILE, hint=_HINT)


def refuse_difference(
    made: nn.Module, difference: Difference, weights: Mapping[str, Tensor], *, by: str, hint: str
) -> None:
    """Refuse weights that a model made of a configuration does not load as they are.

    Weights outside of it, such as a value head or heads for later tokens, are told in a warning.

    Raises:
        ConfigError: A weight has another shape, is missing, or belongs into a part of the model
            that does not have it.
    """
    for name, (mine, wanted) in sorted(difference.shapes.items()):
        raise UnsupportedModelError(
            f"{name!r} has shape {mine}, and by {by} {wanted}: what is published could not be "
            "loaded",
            hint=hint,
        )
    for name in sorted(difference.missing):
        raise UnsupportedModelError(
            f"{name!r} is not among the weights, and a model made of {by} has it: what is "
            "published would load with random values there",
            hint=hint,
        )
    outside = []
    for name in sorted(difference.extra):
        if _is_outside(name, made) or (name in weights and not weights[name].is_floating_point()):
            outside.append(name)
            continue
        raise UnsupportedModelError(
            f"{name!r} is not in a model made of {by}: what is published would load without it",
            hint=hint,
        )
    if outside:
        logger.warning(
            "%d tensors such as %r are not in a model made of %s: they are published, and "
            "from_pretrained leaves them out",
            len(outside),
            outside[-1],
            by,
        )


def _is_outside(name: str, made: nn.Module) -> bool:
    """Return whether a tensor belongs to no part of a model, such as a value head."""
    modules, holder = dict(made.named_modules()), name.rpartition(".")[0]
    while holder not in modules:
        holder = holder.rpartition(".")[0]
    later = getattr(getattr(made, "config", None), "num_nextn_predict_layers", None)
    if later and isinstance(modules[holder], nn.ModuleList):
        return True
    return holder in ("", getattr(made, "base_model_prefix", ""))


def _loaded(
    data: bytes, specs: Mapping[str, TensorSpec]
) -> tuple[nn.Module, Difference, Mapping[str, Tensor]] | None:
    """Load weights without data into the model of a configuration; ``None`` without a class."""
    import transformers  # noqa: PLC0415 - slow, and only for the first version of a chain

    config = read_config(data)
    kind: Any = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if kind is None or getattr(config, LIBRARY, None):
        return None
    state = {
        name: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        for name, spec in specs.items()
    }
    with _quiet(transformers.utils.logging):
        made, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    shapes = {name: (tuple(one), tuple(other)) for name, one, other in info["mismatched_keys"]}
    return made, Difference(shapes, info["missing_keys"], info["unexpected_keys"]), state


@contextmanager
def _quiet(log: Any) -> Iterator[None]:  # noqa: ANN401 - a module of transformers
    """Silence the report of a loading and its progress bar."""
    level, shows = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shows:
            log.enable_progress_bar()
