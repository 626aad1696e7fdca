"""Settings of a trainer's ranks: those that must be the same on all are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from deltachain.errors import ConfigError
from deltachain.publish.config import PublishConfig
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.publish.ranks.collectives import Collective, Ranks
from deltachain.version import __version__

SettingScope: TypeAlias = Literal["all ranks", "rank 0", "each rank"]
"""Whose a setting is: the same on all ranks, that of rank 0 alone, or of each rank its own."""

SCOPES: Final[Mapping[str, SettingScope]] = {
    "url": "all ranks",
    "storage_options": "each rank",
    "encoding": "all ranks",
    "dtype": "all ranks",
    "quantization": "all ranks",
    "base": "all ranks",
    "assets": "rank 0",
    "trust_remote_code": "rank 0",
    "snapshot": "each rank",
    "anchor_factor": "rank 0",
    "anchor_every": "rank 0",
    "maintain": "rank 0",
    "anchor_memory": "each rank",
    "continue_reverted": "rank 0",
    "take_over": "rank 0",
    "when_busy": "all ranks",
    "on_error": "all ranks",
    "deadline_s": "all ranks",
    "part_nbytes": "each rank",
    "signing_key": "rank 0",
    "metrics": "rank 0",
    "metadata": "rank 0",
}
"""Scope of each field of :class:`PublishConfig`.

Those of all ranks decide what is written (a chain of two recipes can never be read), or when ranks
wait for each other.
"""

MOST_NAMED: Final = 8
"""Most values of a setting, and most ranks of a value, that an error names."""


def agree(
    config: PublishConfig,
    ranks: Ranks,
    *,
    url: str,
    further: Mapping[str, object] | None = None,
) -> None:
    """Compare the settings of all ranks; every rank calls this before anything is written.

    Args:
        config: Settings of this rank.
        ranks: All publishing ranks.
        url: URL of the open store.
        further: Settings beyond the configuration that must be the same on all ranks, by name.

    Raises:
        ConfigError: Settings differ; on every rank.
        RankError: Another rank failed, or did not answer in time.
    """
    if ranks.count == 1:
        return
    with Collective(ranks, "settings") as collective:
        mine = common_settings(config, url=url, further=further or {})
        settings = collective.all_gather(mine, dict[str, str])
    check_settings(settings)


def common_settings(
    config: PublishConfig, *, url: str, further: Mapping[str, object]
) -> dict[str, str]:
    """Return the settings that must be the same on all ranks, as text by name.

    The folder of the base may differ: its bits are compared with the model's.

    Raises:
        ConfigError: The library of the recipe is not installed.
    """
    names = [name for name, scope in SCOPES.items() if scope == "all ranks"]
    plain = {name: repr(getattr(config, name)) for name in names}
    return {
        **plain,
        "url": url,
        "base": "None" if config.base is None else "given",
        "quantization": _described(Quantization.chosen(config.quantization)),
        **{name: repr(value) for name, value in further.items()},
        "deltachain": __version__,
    }


def _described(quantization: Quantization | None) -> str:
    """Return recipe, layers to leave, and library with its version; all decide the bits."""
    if quantization is None:
        return "None"
    recipe = RECIPES[quantization.recipe]
    ignore = ", ".join(sorted(set(quantization.ignore))) or "nothing"
    return f"{recipe.name!r} of {recipe.library} {recipe.version()} (ignore {ignore})"


def check_settings(settings: Sequence[Mapping[str, str]]) -> None:
    """Check that the common settings of all ranks, in their order, are the same.

    Raises:
        ConfigError: Some differ; the message names them, their values and the ranks.
    """
    names = list(dict.fromkeys(name for one in settings for name in one))
    found = {name: _ranks_by_value([one.get(name, "absent") for one in settings]) for name in names}
    different = [
        f"{name} is {_listed(by_value)}" for name, by_value in found.items() if len(by_value) > 1
    ]
    if different:
        raise ConfigError(
            f"the ranks have different settings: {'; '.join(different)}",
            hint="give every rank the same settings, and install the same packages for all",
        )


def _ranks_by_value(values: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def _listed(by_value: Mapping[str, Sequence[int]]) -> str:
    """Return values with their ranks: ``'BF16' on ranks 0, 1, None on rank 2``."""
    named = [f"{value} on {_named(ranks)}" for value, ranks in by_value.items()]
    if len(named) > MOST_NAMED:
        named[MOST_NAMED:] = [f"and {len(named) - MOST_NAMED} more values"]
    return ", ".join(named)


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - MOST_NAMED
    first = ", ".join(map(str, ranks[:MOST_NAMED]))
    return f"ranks {first}" + (f" and {more} more" if more > 0 else "")
