"""Configuration of a quantised checkpoint: what engines read in ``config.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

from torch import nn

from deltachain.chain.chain import Chain
from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.publish.model.kept_files import CONFIG_FILE
from deltachain.publish.model.source import ModelTensors, TensorSource
from deltachain.publish.quantise.layers import (
    ALREADY,
    Choice,
    Layers,
    choose,
    layers_of_config,
    layers_of_source,
)
from deltachain.publish.quantise.recipe import Recipe
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.publish.quantise.tensors import quantise
from deltachain.publish.ranks.collectives import Collective, Ranks

logger = logging.getLogger(__name__)

CONFIG_KEY: Final = "quantization_config"

_VERSIONS: Final = frozenset({"version"})
"""Settings that name the library's release, and nothing that engines compute with."""


def with_quantization(
    assets: Mapping[str, bytes], recipe: Recipe, choice: Choice
) -> dict[str, bytes]:
    if CONFIG_FILE not in assets:
        logger.warning("without config.json, engines cannot load the checkpoint that is published")
        return dict(assets)
    config = read_config(assets)
    if config.get(CONFIG_KEY):
        raise ConfigError(f"{CONFIG_FILE} is of a quantised checkpoint", hint=ALREADY)
    config[CONFIG_KEY] = recipe.arithmetic.config(choice.ignored)
    return {**assets, CONFIG_FILE: json.dumps(config, indent=2).encode()}


def check_config(chain: Chain, files: Callable[[], Mapping[str, bytes]]) -> None:
    """Check that a checkpoint that others quantised is quantised as the chain's was.

    Its tensors alone do not show that: codes of another block size or packing may have the same
    shapes, and engines read the configuration with which the chain began.

    Raises:
        ChainMismatchError: ``quantization_config`` differs in more than a version.
    """
    mine = _quantization(files())
    if mine is None:
        return
    there = (asset for asset in chain.assets() if asset[0] == CONFIG_FILE)
    theirs = _quantization(dict(islice(there, 1)))  # assets behind it are not read
    if theirs is None:
        return
    known = (mine.keys() | theirs.keys()) - _VERSIONS
    differing = sorted(key for key in known if mine.get(key) != theirs.get(key))
    if not differing:
        return
    raise ChainMismatchError(
        f"{CONFIG_KEY} differs from that of the chain at {chain.store.url} in "
        f"{', '.join(map(repr, differing))}",
        hint="engines of this chain read its weights as the first checkpoint's: push this one to "
        "another URL",
    )


def _quantization(files: Mapping[str, bytes]) -> Mapping[str, Any] | None:
    if CONFIG_FILE not in files:
        return None
    found = read_config(files).get(CONFIG_KEY)
    return found if isinstance(found, dict) and found else None


def read_config(assets: Mapping[str, bytes]) -> dict[str, Any]:
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


Files: TypeAlias = Callable[[], Mapping[str, bytes]]
"""Function that collects the small files of a checkpoint, by name."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A model as its quantised checkpoint.

    Attributes:
        source: Codes, scales, and the weights that are published as they are.
        recipe: How they are quantised.
        choice: Which are.
    """

    source: ModelTensors
    recipe: Recipe
    choice: Choice

    def assets(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        return with_quantization(files, self.recipe, self.choice)


def quantised(
    source: ModelTensors, find: Callable[[], Layers], quantization: Quantization, ranks: Ranks
) -> Quantised:
    """Quantise the tensors of a model; every rank calls this.

    Args:
        source: The weights that this rank publishes.
        find: Function that finds the layers of this rank's weights.
        quantization: The recipe, and the layers to leave; the same on all ranks.
        ranks: All publishing ranks, as seen by the thread that takes diffs.
    """
    recipe = RECIPES[quantization.recipe]
    recipe.version()  # an absent library is named before any work
    with Collective(ranks, "layers") as collective:
        layers = Layers.joined(collective.all_gather(find(), Layers))
    choice = choose(source, layers, quantization)
    with Collective(ranks, "matrices") as collective:
        made = quantise(source, choice.names, recipe, ranks)
        collective.all_gather(True, bool)
    return Quantised(made, recipe, choice)


def find_layers(
    model: nn.Module | TensorSource | None, source: ModelTensors, files: Files
) -> Layers:
    """Find the layers of this rank's weights, of an export by its configuration."""
    if isinstance(model, nn.Module):
        return layers_of_source(model, source)
    return layers_of_config(read_config(files()))
