"""Checks of this machine: packages, engines, environment variables, files and transport."""

from __future__ import annotations

import platform
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any, Final, Protocol

import deltachain
from deltachain.chain.trust import SigningKey, Trust
from deltachain.control.replica_client import make_client
from deltachain.control.roster import parse_inventory
from deltachain.doctor import Finding, Role, failed, fault, note, ok, tried
from deltachain.environment import FROM_FILE, PREFIX, mistakes, read
from deltachain.errors import ConfigError
from deltachain.redact import redacted_path, redacted_url
from deltachain.tls import TlsFiles
from deltachain.tokens import Tokens

PACKAGES: Final = "packages"
ENGINE: Final = "engine"
ENVIRONMENT: Final = "environment"
FILES: Final = "files"
TRANSPORT: Final = "transport"

NEEDED: Final = {Role.PUBLISHER: ("torch",), Role.FOLLOWER: ()}  # extras, whatever the URL

ENGINES: Final = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}

_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?>=(?P<floor>[0-9.]+)"
    r"(?:.*extra == ['\"](?P<extra>[a-z0-9]+)['\"])?"
)


class StartCheck(Protocol):
    """``start_check.check`` of an engine's plugin: yields what a server refuses at its start."""

    def __call__(self, installed: str, environment: Mapping[str, str], /) -> Iterator[ConfigError]:
        """Yield the errors, given the engine's version and the environment variables."""


def check_packages(role: Role) -> Iterator[Finding]:
    yield ok(PACKAGES, f"deltachain {deltachain.__version__}, Python {platform.python_version()}")
    present, absent = set[str](), set[str]()
    matches = map(_REQUIREMENT.match, requires("deltachain") or ())
    for match in (one for one in matches if one and one["extra"] != "all"):
        installed = _installed(match["name"])
        (absent if installed is None else present).add(match["extra"] or "")
        if installed is not None and _numbers(installed) < _numbers(match["floor"]):
            wanted = f"{match['name']}>={match['floor']}"
            said = f"{match['name']} {installed} is older than {match['floor']}"
            yield fault(PACKAGES, said, f'pip install "{wanted}"')
    for extra in NEEDED[role]:
        if extra in absent:
            hint = f"pip install 'deltachain[{extra}]'"
            yield fault(PACKAGES, f"a {role} needs the extra {extra}, which is not installed", hint)
    yield from _check_torch(role)
    if whole := sorted(present - absent - {""}):
        yield ok(PACKAGES, f"extras: {', '.join(whole)}")
    if absent - {""}:
        yield note(PACKAGES, f"extras that are not installed: {', '.join(sorted(absent - {''}))}")


def _check_torch(role: Role) -> Iterator[Finding]:
    """Import torch, if installed: it may lack a library, or be built for another machine."""
    installed = _installed("torch")
    try:
        if installed is not None:
            import_module("torch")
    except Exception as exc:  # noqa: BLE001 - runs its code
        said = f"torch {installed} cannot be imported: {type(exc).__name__}: {exc}"
        graded = fault if "torch" in NEEDED[role] else note
        yield graded(PACKAGES, said, "pip install --force-reinstall torch")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release of a version, without trailing zeros."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_engines(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check each installed engine: version, plugin, and what a server would refuse at its start."""
    releases = {name: release for name in ENGINES if (release := _installed(name))}
    if not releases:
        yield note(ENGINE, f"neither vLLM nor SGLang is installed for {sys.executable}")
    for name, release in releases.items():
        plugins = [one for one in entry_points(group=ENGINES[name]) if one.name == "deltachain"]
        if not plugins:
            yield fault(
                ENGINE,
                f"{name} {release} does not see deltachain's plugin",
                "install deltachain anew, into the environment of the engine",
            )
            continue
        check: StartCheck = import_module(f"{plugins[0].module}.start_check").check
        wrong = list(check(release, environment))
        yield from (failed(ENGINE, error) for error in wrong)
        if not wrong:
            yield ok(ENGINE, f"{name} {release} is a tested version, and loads the plugin")


def check_names(environment: Mapping[str, str]) -> Iterator[Finding]:
    wrong = dict(mistakes(environment))
    yield from (failed(ENVIRONMENT, error) for error in wrong.values())
    given = read({name: text for name, text in environment.items() if name not in wrong})
    if given:
        shown = (f"{PREFIX}{name}={_shown(name, value)}" for name, value in given.items())
        yield ok(ENVIRONMENT, " ".join(shown))
    elif not wrong:
        yield note(ENVIRONMENT, "no DELTACHAIN_* variable is set")


def _shown(name: str, value: Any) -> str:  # noqa: ANN401 - as it is parsed
    """Return a value, unless it is a secret, or a text that may be one by mistake."""
    if isinstance(value, Path):
        return redacted_path(value)
    if not isinstance(value, str):
        return str(int(value)) if isinstance(value, bool) else str(value)
    if name in ("URL", "PRESENCE_URL"):
        return redacted_url(value)
    return value if name == "DECODE" else "(set)"


def check_files(environment: Mapping[str, str]) -> Iterator[Finding]:
    given = read(environment)
    for name in FROM_FILE:
        if (file := given.get(f"{name}_FILE")) is not None:
            yield from tried(FILES, partial(_tokens, file))
    if (signing := given.get("SIGNING_KEY")) is not None:
        shown = redacted_path(signing)
        yield from tried(FILES, lambda: f"{shown}: key {SigningKey.load(signing).public}")
        yield from _exposed(signing)
    if "TRUSTED_KEYS" in given or "MAX_HEARTBEAT_AGE_S" in given:
        yield from tried(FILES, lambda: _trusted(environment))
    if "ENGINES" in given:
        yield from tried(FILES, lambda: _engines(given["ENGINES"]))
    if (base := given.get("BASE")) is not None and not base.is_dir():
        said = f"{PREFIX}BASE is {redacted_path(base)}, which is no folder"
        yield fault(FILES, said, "name the folder of the base checkpoint on this machine")


def _tokens(file: Path) -> str:
    count = len(Tokens(file).current)
    return f"{file}: {count} token{'s' if count > 1 else ''}"


def _engines(text: str) -> str:
    try:
        return f"DELTACHAIN_ENGINES names {len(parse_inventory(text))}"
    except ConfigError as exc:
        raise ConfigError(f"DELTACHAIN_ENGINES: {exc.args[0]}", hint=exc.hint) from exc


def _trusted(environment: Mapping[str, str]) -> str:
    trusted = Trust.of_reader(environment=environment).trusted
    keys = trusted.keys if trusted else ()
    return f"trusted keys: {', '.join(key.key_id for key in keys)}"


def _exposed(file: Path) -> Iterator[Finding]:
    try:
        mode = file.stat().st_mode
    except OSError:
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield note(FILES, f"{file} is open to other users of this machine", f"chmod 600 {file}")


def check_transport(environment: Mapping[str, str]) -> Iterator[Finding]:
    yield from tried(TRANSPORT, lambda: _transport(environment))


def _transport(environment: Mapping[str, str]) -> str:
    files = TlsFiles.of(environment)
    files.context()
    make_client().close()
    cas = files.ca_file or files.ca_folder or "the public ones"
    proxies = sorted(
        name
        for name in environment
        if name.upper() in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") and environment[name]
    )
    through = f"proxies by {', '.join(proxies)}" if proxies else "no proxy"
    client = f", client certificate {files.client_cert}" if files.client_cert else ""
    return f"trusted CAs: {cas}; {through}{client}"
