"""Whether a model's configuration describes its weights, as loading them needs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.config_fields import ID_END, LIBRARY, RUNTIME, differing_fields, settings_of
from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.made import Difference, refuse_difference
from deltachain.publish.model.refusals import is_of_peft
from deltachain.torch_names import named_tensors

logger = logging.getLogger(__name__)

_OTHER_FILES: Final = (
    "; or give PublishConfig.assets, a folder of the files to publish, if no follower loads them "
    "with from_pretrained"
)

_HINT: Final = (
    "set the fields of model.config to the model, such as num_labels, vocab_size or "
    f"num_hidden_layers{_OTHER_FILES}"
)


def refuse_other_config(model: nn.Module) -> None:
    """Refuse a model of transformers that its own configuration does not describe.

    Names of tensors are not compared if the model is quantised or has adapters: both rename them.

    Raises:
        ConfigError: A weight is not in a model made of the configuration, or has another shape
            there, or that has further weights; or the output embedding is tied where the
            configuration says otherwise.
    """
    config = getattr(model, "config", None)
    if not hasattr(model, "from_pretrained") or not hasattr(config, "save_pretrained"):
        return
    try:
        with torch.device("meta"):
            made = type(model)(copy.deepcopy(config))
    except Exception as exc:  # noqa: BLE001 - of any model's code
        logger.warning(
            "%s cannot be made of its configuration, so that they are not compared: %s",
            type(model).__name__,
            exc,
        )
        return
    _refuse_tie(model, made)
    have, wanted = dict(named_tensors(model)), dict(named_tensors(made))
    shapes = {
        name: (tuple(tensor.shape), tuple(wanted[name].shape))
        for name, tensor in have.items()
        if name in wanted and tensor.numel() and tensor.shape != wanted[name].shape
    }
    renamed = getattr(config, LIBRARY, None) or any(map(is_of_peft, model.modules()))
    refuse_difference(
        made,
        Difference(
            shapes,
            missing=() if renamed else wanted.keys() - have.keys(),
            extra=() if renamed else have.keys() - wanted.keys(),
        ),
        have,
        by="the model's configuration",
        hint=_HINT,
    )


def _refuse_tie(model: nn.Module, made: nn.Module) -> None:
    tied, by_config = _is_tied(model), _is_tied(made)
    if None not in (tied, by_config) and tied != by_config:
        raise UnsupportedModelError(
            f"the output embedding is {'tied' if tied else 'a weight of its own'}, and the model's "
            f"configuration says tie_word_embeddings={by_config}: what is published would load as "
            "another model",
            hint=f"set model.config.tie_word_embeddings = {tied}{_OTHER_FILES}",
        )


def _is_tied(model: nn.Module) -> bool | None:
    """Return whether the output embedding is the input's; ``None`` if it cannot be."""
    try:
        first = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
        last = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    if first is None or last is None or first.shape != last.shape:
        return None
    return first is last


def with_config_watched(
    model: nn.Module, live: Callable[[], Iterable[tuple[str, Tensor]]]
) -> Callable[[], Iterable[tuple[str, Tensor]]]:
    """Return ``live`` with a look at the model's configuration before each iteration.

    Generation settings that changed are logged: trainers change them as well, and weights do not
    depend on them.

    That function raises:
        ConfigError: The configuration changed, of which followers have the files.
    """
    then, generation = _settings(model), _generation(model)
    said: set[str] = set()

    def looked() -> Iterable[tuple[str, Tensor]]:
        if changed := differing_fields(then, _settings(model)):
            raise UnsupportedModelError(
                f"the model's configuration changed in {changed} since the publisher was attached",
                hint="followers have the files of that time: close this publisher, and attach "
                "another one at a URL of its own; or set the fields back",
            )
        changed = differing_fields(generation, _generation(model))
        if changed and changed not in said:
            said.add(changed)
            logger.warning(
                "the model's generation settings changed in %s since the publisher was attached: "
                "followers keep the earlier ones",
                changed,
            )
        return live()

    return looked


def _settings(model: nn.Module) -> dict[str, Any]:
    """Return the fields of a model's configuration that do not change while it is trained."""
    if not hasattr(model, "from_pretrained"):
        return {}
    found = settings_of(getattr(model, "config", None))
    return {k: v for k, v in found.items() if k not in RUNTIME and not k.endswith(ID_END)}


def _generation(model: nn.Module) -> dict[str, Any]:
    """Return what decides which tokens a model's followers sample, and where they stop.

    Each field has two values: of the configuration, and of the generation settings.
    """
    config = settings_of(getattr(model, "config", None))
    ids = {key: value for key, value in config.items() if key.endswith(ID_END)}
    settings = settings_of(getattr(model, "generation_config", None))
    both = {key: (ids.get(key), settings.get(key)) for key in ids.keys() | settings.keys()}
    return {key: values for key, values in both.items() if values != (None, None)}
