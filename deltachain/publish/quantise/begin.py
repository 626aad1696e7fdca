"""Start of a publisher that quantises: layers are chosen, and live weights become their codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from deltachain.publish.model.source import ModelTensors, TensorSource
from deltachain.publish.quantise.checkpoint_config import read_config, with_quantization
from deltachain.publish.quantise.layers import (
    Choice,
    Layers,
    choose,
    layers_of_config,
    layers_of_source,
)
from deltachain.publish.quantise.recipe import Recipe
from deltachain.publish.quantise.registry import RECIPES
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.quantise.tensors import quantise
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import Collective

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
        """Return the small files of the quantised checkpoint."""
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

    Raises:
        ConfigError: The model cannot be quantised so, or the recipe's library is absent.
        RankError: Another rank failed, or did not answer in time.
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
    """Find the layers of this rank's weights.

    Args:
        model: The model; an export or no model if its configuration shows the layers.
        source: The weights that this rank publishes.
        files: Function that collects the small files of the checkpoint.

    Raises:
        ConfigError: The model is quantised already, or there is no configuration.
    """
    if isinstance(model, nn.Module):
        return layers_of_source(model, source)
    return layers_of_config(read_config(files()))
