"""Configuration of a quantised checkpoint: what engines read in ``config.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from deltachain.errors import ConfigError
from deltachain.publish.quantise.layers import ALREADY, Choice
from deltachain.publish.quantise.recipe import Recipe
from deltachain.publish.quantise.settings import CONFIG_FILE

logger = logging.getLogger(__name__)

CONFIG_KEY: Final = "quantization_config"


def with_quantization(
    assets: Mapping[str, bytes], recipe: Recipe, choice: Choice
) -> dict[str, bytes]:
    """Return the small files of a checkpoint with the recipe in its configuration.

    Raises:
        ConfigError: The configuration is of a quantised checkpoint.
    """
    if CONFIG_FILE not in assets:
        logger.warning("without config.json, engines cannot load the checkpoint that is published")
        return dict(assets)
    config = read_config(assets)
    if config.get(CONFIG_KEY):
        raise ConfigError(f"{CONFIG_FILE} is of a quantised checkpoint", hint=ALREADY)
    config[CONFIG_KEY] = recipe.arithmetic.config(choice.ignored)
    return {**assets, CONFIG_FILE: json.dumps(config, indent=2).encode()}


def read_config(assets: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the configuration among the small files of a checkpoint.

    Raises:
        ConfigError: It is missing or no JSON object.
    """
    try:
        config = json.loads(assets[CONFIG_FILE])
    except KeyError as exc:
        raise ConfigError(
            f"no {CONFIG_FILE} shows which layers to quantise",
            hint="give the folder of the checkpoint: assets= of PublishConfig, or what is pushed",
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"{CONFIG_FILE}: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{CONFIG_FILE} is no JSON object")
    return config
