"""Phases of a version before its commit, in the ``ext`` of its manifest (FORMAT.md 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from deltachain.format.documents import Manifest

NAMES: Final = ("diff", "encode", "upload")

LONGEST_S: Final = 1e9
"""Largest time that is believed, in seconds."""

_FIELD: Final = "deltachain.phases"


def phases_mark(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the ``ext`` of a manifest that tells how long each phase took, to a millisecond."""
    return {_FIELD: {name: round(seconds[name], 3) for name in NAMES if name in seconds}}


def phases_of(manifest: Manifest) -> dict[str, float]:
    """Return the seconds of each phase before the commit; without those that are invalid."""
    found = manifest.ext.get(_FIELD)
    return valid_times(found, NAMES) if isinstance(found, dict) else {}


def valid_times(given: Mapping[str, object], names: Iterable[str]) -> dict[str, float]:
    """Return the times under some names, in seconds; without those that are invalid."""
    found = {name: given.get(name) for name in names}
    return {name: float(value) for name, value in found.items() if _is_time(value)}  # type: ignore[arg-type]


def _is_time(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value <= LONGEST_S  # type: ignore[arg-type,operator]
