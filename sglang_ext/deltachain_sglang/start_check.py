"""What keeps an SGLang server from following, found without an import of SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from deltachain.errors import ConfigError, UnsupportedEngineError
from deltachain.replica.engine import VersionRange, start_faults

TESTED: Final = VersionRange("SGLang", first=(0, 5, 23), beyond=(0, 5, 24))

PAUSES: Final = ("retract", "in_place", "abort")
"""Pause modes: running requests are recomputed afterwards, continue as they are, or are aborted."""


def check(installed: str, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Yield what keeps a server from following the chain of ``DELTACHAIN_URL``."""
    yield from start_faults(TESTED, PAUSES, installed, environment)
    named = [name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",")]
    if any(named) and "deltachain" not in named and environment.get("DELTACHAIN_URL"):
        yield UnsupportedEngineError(
            f"SGLang does not load deltachain: SGLANG_PLUGINS is {','.join(named)!r}",
            hint="add deltachain to it, or unset it",
        )
