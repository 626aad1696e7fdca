"""Whether a module computes what the configuration of a chain says, with the chain's weights."""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from deltachain.chain.chain import Chain
from deltachain.chain.checks import asset_path
from deltachain.chain.identity import read_asset
from deltachain.config_fields import ID_END, LIBRARY, RUNTIME, fields, settings_of
from deltachain.torch_names import unwrapped

logger = logging.getLogger(__name__)

_CONFIG: Final = "config.json"

_NAMES: Final = frozenset(
    {*RUNTIME, LIBRARY, "id2label", "label2id", "finetuning_task", "task_specific_params"}
)
"""Fields on which the outputs do not depend: names, and what a caller chooses."""


def say_other_config(module: nn.Module, chain: Chain) -> None:
    """Warn if a module of transformers has another configuration than the chain.

    Its tensors may fit all the same: activations, epsilons and numbers of heads leave no trace in
    names and shapes.
    """
    config = getattr(unwrapped(module), "config", None)
    ref = next((one for one in chain.identity.assets if asset_path(one) == _CONFIG), None)
    if ref is None or not (mine := settings_of(config)):
        return
    theirs = _completed(config, read_asset(chain.store, ref))
    if found := differences(mine, theirs):
        logger.warning(
            "the module and the chain at %s have different configurations: %s; with the same "
            "weights the module may compute something else",
            chain.store.url,
            ", ".join(found),
        )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Describe the fields in which two configurations differ; a null is an absent field."""
    own, other = _deciding(mine), _deciding(theirs)
    return [
        f"{name} is {reprlib.repr(own.get(name))}, there {reprlib.repr(other.get(name))}"
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, at any depth, on which the outputs depend."""
    return {
        name: _deciding(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if value is not None
        and name not in _NAMES
        and not name.startswith("_")
        and not name.endswith(ID_END)
    }


def _completed(config: Any, data: bytes) -> dict[str, Any]:  # noqa: ANN401 - of transformers
    """Return the chain's configuration with the defaults of the module's class.

    Without them if the class does not read it; then of the fields that the file has.
    """
    plain = fields(data)
    if not isinstance(plain, dict):
        return settings_of(config)
    try:
        whole = settings_of(type(config).from_dict(json.loads(data)))
    except Exception as exc:  # noqa: BLE001 - of any library
        logger.debug("%s is compared as it is: %s", _CONFIG, exc)
        whole = settings_of(config)
    return {**whole, **{k: v for k, v in plain.items() if k == "model_type" or k not in whole}}
