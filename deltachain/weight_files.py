"""Which files of a checkpoint folder hold the weights of the model."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deltachain.errors import ConfigError, MalformedError, UnsupportedModelError

WEIGHTS_FILE: Final = "model.safetensors"
ADAPTER_FILE: Final = "adapter_model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_SHARD: Final = re.compile(r"(.*\D|)(\d+)([-_]of[-_])(\d+)(.*)")
"""Name of a shard: what is before its number, the number, and how many shards there are."""

_MODEL_SHARDS: Final = "model-{}.safetensors"
"""Key of the set of shards that ``save_pretrained`` writes."""

_OTHER_SETS: Final = re.compile(r"(consolidated|optimizer|.*\.(ema|fp16|fp32|bf16)[-_.]).*")
"""Names of files with tensors in another form, or with tensors of an optimizer."""

_INCOMPLETE: Final = (
    "the checkpoint is incomplete, or of two saves: save or download it again, or name one "
    "safetensors file"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files of a checkpoint's weights: the file of each tensor too, if an index names them."""

    paths: list[Path]
    index: str = ""
    places: dict[str, str] = field(default_factory=dict)


def find_weights(path: Path) -> WeightFiles:
    """Find the files of a checkpoint's weights, of a folder or of one safetensors file.

    Raises:
        ConfigError: There are none, one is missing, or there are several sets of which none is the
            model's by its name or by an index.
        MalformedError: An index is unreadable.
    """
    if path.is_file():
        return WeightFiles([path])
    there = sorted(file.name for file in path.glob("[!.]*.safetensors")) if path.is_dir() else []
    index, places = _index_of(path, there)
    names = sorted(set(places.values())) or _whole_set(path, there)
    missing = [name for name in names if not (path / name).is_file()]
    if not names or missing:
        raise ConfigError(
            f"{path}: no safetensors checkpoint"
            + (f", {missing[0]} is missing" if missing else ""),
            hint=_INCOMPLETE
            if missing
            else "give a folder with model.safetensors, or one safetensors file",
        )
    left_out = [name for name in there if name not in names]
    if index != INDEX_FILE and (path / INDEX_FILE).is_file():
        left_out.append(INDEX_FILE)
    if left_out:
        logger.warning(
            "%s: reading weights from %s; ignoring %s",
            path,
            index or (names[0] if len(names) == 1 else f"{len(names)} files"),
            ", ".join(left_out),
        )
    return WeightFiles([path / name for name in names], index, places)


def _index_of(path: Path, there: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the index of a folder: the model's, or the only one of a folder without ``model*``."""
    if (path / INDEX_FILE).is_file() and not _is_stale(path / INDEX_FILE, there):
        return INDEX_FILE, _read_index(path / INDEX_FILE)
    sets = _sets(there)
    if WEIGHTS_FILE in sets or _MODEL_SHARDS in sets or ADAPTER_FILE in sets:
        return "", {}
    read = ((file.name, _read_index(file)) for file in path.glob("[!.]*.safetensors.index*.json"))
    found = [(name, places) for name, places in read if not set(there).isdisjoint(places.values())]
    return found[0] if len(found) == 1 else ("", {})


def _is_stale(index: Path, there: Sequence[str]) -> bool:
    """Return whether an index is of an earlier save: ``from_pretrained`` prefers the whole file.

    A save into one file leaves the index of an earlier one in shards.
    """
    return WEIGHTS_FILE in there and set(_read_index(index).values()) != {WEIGHTS_FILE}


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor by an index."""
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise MalformedError(f"{index}: weight_map is missing", key=str(index)) from exc
    for name in places.values():
        if not isinstance(name, str) or "/" in name or name.startswith("."):
            raise MalformedError(f"{index}: names a file outside the folder", key=str(index))
    if not places:
        raise MalformedError(f"{index}: weight_map is empty", key=str(index))
    return places


def _sets(there: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of each set of files; a file that is no shard is a set of its own."""
    sets: dict[str, list[str]] = {}
    for name in there:
        shard = _SHARD.fullmatch(name)
        sets.setdefault(f"{shard[1]}{{}}{shard[5]}" if shard else name, []).append(name)
    return sets


def _whole_set(path: Path, there: Sequence[str]) -> list[str]:
    """Return the weight files of a folder without an index."""
    sets = _sets(there)
    for own in (WEIGHTS_FILE, _MODEL_SHARDS, ADAPTER_FILE):
        if own in sets:
            return _checked(path, sets[own])
    known = [names for names in sets.values() if not _OTHER_SETS.fullmatch(names[0])]
    known = known or list(sets.values())
    if len(known) > 1:
        raise UnsupportedModelError(
            f"{path} has several sets of weights, and none is named as the model's: "
            + ", ".join(names[0] for names in known),
            hint=f"move the files away that are not the model's, or write {INDEX_FILE}, whose "
            "weight_map has the file of each tensor",
        )
    return _checked(path, known[0]) if known else []


def _checked(path: Path, names: list[str]) -> list[str]:
    """Return the names of a set, if all of its shards are there, and no others."""
    shards = [shard for name in names if (shard := _SHARD.fullmatch(name))]
    if not shards:
        return names
    counts, numbers = {int(shard[4]) for shard in shards}, {int(shard[2]) for shard in shards}
    first = 0 if 0 in numbers else 1
    absent = next(n for n in itertools.count(first) if n not in numbers)
    if counts == {len(shards)} and absent == first + len(shards):
        return names
    one, wanted = shards[0], " and ".join(map(str, sorted(counts)))
    missing = f"{one[1]}{absent:0{len(one[2])}}{one[3]}{one[4]}{one[5]}"
    raise UnsupportedModelError(
        f"{path} has {len(shards)} shards, whose names say {wanted}"
        + (f": {missing} is missing" if len(counts) == 1 else ""),
        hint=_INCOMPLETE,
    )
