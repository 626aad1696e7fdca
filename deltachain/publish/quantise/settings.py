"""Choice of a recipe, and of the layers that it leaves alone."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deltachain.errors import ConfigError
from deltachain.name_registry import NameRegistry
from deltachain.publish.model.kept_files import CONFIG_FILE
from deltachain.publish.quantise import compressed
from deltachain.publish.quantise.finegrained import FP8_BLOCK, FP8_BLOCK_UE8M0
from deltachain.publish.quantise.recipe import Recipe
from deltachain.setting_types import check_kinds

GROUP: Final = "deltachain.recipes"
"""Entry point group of recipes; each object is a :class:`Recipe`."""


class RecipeRegistry(NameRegistry[Recipe]):
    def __init__(self, recipes: Iterable[Recipe]) -> None:
        super().__init__(GROUP, Recipe, "acme.ternary", recipes)

    def chosen(self, name: str) -> Recipe:
        found = self.find(name)
        if found is not None:
            return found
        failure, hint = self.failure(name), "repair that package"
        if failure is None:
            hint = f"expected one of: {', '.join(sorted(self))}; other recipes come with packages"
        raise ConfigError(f"quantization={name!r}: {failure or 'no such recipe'}", hint=hint)


RECIPES: Final = RecipeRegistry(
    (
        FP8_BLOCK,
        FP8_BLOCK_UE8M0,
        compressed.FP8_ROW,
        compressed.FP8_TENSOR,
        compressed.INT8_ROW,
        compressed.MXFP4,
        compressed.MXFP8,
        compressed.NVFP4A16,
    )
)
"""All recipes."""


PATTERN: Final = "re:"  # prefix of a regular expression, as in compressed-tensors


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantisation of the weights that a chain publishes.

    Attributes:
        recipe: Name of a recipe: ``fp8-block``, ``fp8-block-ue8m0``, ``fp8-row``, ``fp8-tensor``,
            ``int8-row``, ``mxfp4``, ``mxfp8``, ``nvfp4a16``, or one that an installed package adds.
        ignore: Linear layers and experts that are published as they are: the name of a layer in the
            checkpoint or its end, as in ``lm_head``, or a regular expression behind ``re:`` that
            matches from the start, as in ``re:visual``.

    Raises:
        ConfigError: There is no such recipe, ``ignore`` is no tuple of texts, or an entry is not a
            regular expression.

    Examples:
        >>> chosen = deltachain.Quantization("fp8-block", ignore=("lm_head", "re:visual"))
        >>> config = deltachain.PublishConfig(url=new_url, quantization=chosen)

        As a checkpoint that engines serve: ``Quantization.of("Qwen3-8B-FP8")``, its folder.
    """

    recipe: str
    ignore: tuple[str, ...] = ("lm_head",)

    def __post_init__(self) -> None:
        ignore: object = self.ignore
        if isinstance(ignore, list):
            object.__setattr__(self, "ignore", tuple(ignore))
        check_kinds(self)
        RECIPES.chosen(self.recipe)
        for entry in self.ignore:
            if entry.startswith(PATTERN):
                try:
                    re.compile(entry.removeprefix(PATTERN))
                except re.error as exc:
                    raise ConfigError(f"ignore has {entry!r}: {exc}") from exc

    @classmethod
    def chosen(cls, setting: "Quantization | str | None") -> "Quantization | None":
        """Return a setting with its recipe; a string names one."""
        return cls(setting) if isinstance(setting, str) else setting

    @classmethod
    def of(cls, checkpoint: Path | str) -> "Quantization":
        """Return the quantisation of a checkpoint that is quantised: its recipe and layers.

        Args:
            checkpoint: Its folder, or its ``config.json``.

        Raises:
            ConfigError: There is no such file, or no recipe makes such checkpoints.
        """
        file = Path(checkpoint)
        config = _quantization_config(file / CONFIG_FILE if file.is_dir() else file)
        for name in RECIPES:
            ignored = RECIPES.chosen(name).arithmetic.ignored(config)
            if ignored is not None:
                return cls(name, ignored)
        raise ConfigError(
            f"{checkpoint}: no recipe makes checkpoints of its quantization_config, of "
            f"quant_method {config.get('quant_method')!r}",
            hint=f"choose one of: {', '.join(sorted(RECIPES))}",
        )

    def ignores(self, layer: str) -> bool:
        """Return whether a layer of the checkpoint is published as it is."""
        return any(_matches(entry, layer) for entry in self.ignore)


def _quantization_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{file} cannot be read: {exc}", hint="give a checkpoint's folder, or its config.json"
        ) from exc
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{file} has no quantization_config", hint="give a checkpoint that is quantised"
        )
    return found


def _matches(entry: str, layer: str) -> bool:
    if entry.startswith(PATTERN):
        return re.match(entry.removeprefix(PATTERN), layer) is not None
    return layer == entry or layer.endswith(f".{entry}")
