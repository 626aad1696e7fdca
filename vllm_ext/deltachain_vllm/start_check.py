"""What a vLLM server refuses at its start, found without an import of vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from deltachain.errors import ConfigError, UnsupportedEngineError
from deltachain.replica.engine import VersionRange, start_faults

TESTED: Final = VersionRange("vLLM", first=(0, 32), beyond=(0, 34))
"""Tested versions. 0.33 has no CPU build: its used parts were imported and read, but not run."""

PAUSES: Final = ("keep", "wait", "abort")
"""Pause modes: running requests continue afterwards, are waited for, or are aborted."""

ROUTES: Final = "deltachain_http"
"""Name of deltachain's endpoint plugin in ``VLLM_PLUGINS``."""


def check(installed: str, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Yield what a server would refuse that follows the chain of ``DELTACHAIN_URL``."""
    yield from start_faults(TESTED, PAUSES, installed, environment)
    if environment.get("DELTACHAIN_URL"):
        try:
            check_listed(environment.get("VLLM_PLUGINS", ""))
        except ConfigError as exc:
            yield exc


def check_listed(named: str) -> None:
    """Refuse a list of plugins without our routes: vLLM's endpoint plugins must be listed."""
    if ROUTES not in named.split(","):
        raise UnsupportedEngineError(
            f"vLLM loads no routes of deltachain: VLLM_PLUGINS is {named!r}",
            hint=f"VLLM_PLUGINS=deltachain,{ROUTES}",
        )
