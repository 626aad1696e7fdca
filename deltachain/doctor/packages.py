"""Check of installed packages: Python, extras, and the lowest versions that work."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final, NamedTuple

import deltachain
from deltachain.doctor.finding import Finding, Role, fault, note, ok

PACKAGES: Final = "packages"

NEEDED: Final = {Role.PUBLISHER: ("torch",), Role.FOLLOWER: ()}
"""Extras that a role needs whatever its URL; the store names its own."""

_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?>=(?P<floor>[0-9.]+)"
    r"(?:.*extra == ['\"](?P<extra>[a-z0-9]+)['\"])?"
)


class _Requirement(NamedTuple):
    """A package, the lowest version that works, and the extra that it is part of."""

    name: str
    floor: str
    extra: str


def check_packages(role: Role) -> Iterator[Finding]:
    """Check that packages are there and new enough."""
    yield ok(PACKAGES, f"deltachain {deltachain.__version__}, Python {platform.python_version()}")
    present, absent = set[str](), set[str]()
    for requirement in _requirements():
        installed = _installed(requirement.name)
        if installed is None:
            absent.add(requirement.extra)
            continue
        present.add(requirement.extra)
        if _numbers(installed) < _numbers(requirement.floor):
            yield fault(
                PACKAGES,
                f"{requirement.name} {installed} is older than {requirement.floor}",
                f'pip install "{requirement.name}>={requirement.floor}"',
            )
    for extra in NEEDED[role]:
        if extra in absent:
            hint = f"pip install 'deltachain[{extra}]'"
            yield fault(PACKAGES, f"a {role} needs the extra {extra}, which is not installed", hint)
    yield from _check_torch(role)
    whole = sorted(present - absent - {""})
    if whole:
        yield ok(PACKAGES, f"extras: {', '.join(whole)}")
    if absent - {""}:
        yield note(PACKAGES, f"extras that are not installed: {', '.join(sorted(absent - {''}))}")


def _check_torch(role: Role) -> Iterator[Finding]:
    """Import torch: an installed one may lack a library, or be built for another machine."""
    if _installed("torch") is None:
        return
    try:
        import_module("torch")
    except Exception as exc:  # noqa: BLE001 - runs its code
        said = f"torch {_installed('torch')} cannot be imported: {type(exc).__name__}: {exc}"
        hint = "pip install --force-reinstall torch"
        is_needed = "torch" in NEEDED[role]
        yield fault(PACKAGES, said, hint) if is_needed else note(PACKAGES, said, hint)


def _requirements() -> Iterator[_Requirement]:
    for text in requires("deltachain") or ():
        match = _REQUIREMENT.match(text)
        if match and match["extra"] != "all":
            yield _Requirement(match["name"], match["floor"], match["extra"] or "")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release of a version, without trailing zeros."""
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
