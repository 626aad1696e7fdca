"""Check of installed engines: version, plugin, and what a server would refuse at its start."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final, NamedTuple, Protocol

from deltachain.doctor.finding import Finding, failed, fault, note, ok
from deltachain.errors import ConfigError

ENGINE: Final = "engine"


class EnginePackage(NamedTuple):
    """An engine: its package, and the group of its entry points for plugins."""

    package: str
    group: str


ENGINES: Final = (
    EnginePackage("vllm", "vllm.general_plugins"),
    EnginePackage("sglang", "sglang.srt.plugins"),
)


class StartCheck(Protocol):
    """Function ``check`` in the module ``start_check`` of an engine's plugin.

    It yields what a server would refuse at its start, and imports no engine.
    """

    def __call__(self, installed: str, environment: Mapping[str, str], /) -> Iterator[ConfigError]:
        """Yield the errors, given the engine's version and the environment variables."""


def check_engines(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check each installed engine."""
    found = [(kind, _version(kind.package)) for kind in ENGINES]
    if not any(installed for _, installed in found):
        yield note(ENGINE, f"neither vLLM nor SGLang is installed for {sys.executable}")
    for kind, installed in found:
        if installed:
            yield from _check(kind, installed, environment)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check(
    kind: EnginePackage, installed: str, environment: Mapping[str, str]
) -> Iterator[Finding]:
    plugins = [one for one in entry_points(group=kind.group) if one.name == "deltachain"]
    if not plugins:
        yield fault(
            ENGINE,
            f"{kind.package} {installed} does not see deltachain's plugin",
            "install deltachain anew, into the environment of the engine",
        )
        return
    check: StartCheck = import_module(f"{plugins[0].module}.start_check").check
    wrong = list(check(installed, environment))
    yield from (failed(ENGINE, error) for error in wrong)
    if not wrong:
        yield ok(ENGINE, f"{kind.package} {installed} is a tested version, and loads the plugin")
