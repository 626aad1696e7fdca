"""Check of the environment: every variable, and every file that one names."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from deltachain.chain.trust import SigningKey, Trust
from deltachain.control.replica_client import make_client
from deltachain.control.roster import parse_inventory
from deltachain.doctor.finding import Finding, failed, note, ok
from deltachain.environment import FROM_FILE, PREFIX, mistakes, read
from deltachain.errors import ConfigError
from deltachain.redact import redacted_path, redacted_url
from deltachain.tls import TlsFiles
from deltachain.tokens import Tokens

_URLS: Final = ("URL", "PRESENCE_URL")
"""Variables with one URL."""

ENVIRONMENT: Final = "environment"
FILES: Final = "files"
TRANSPORT: Final = "transport"


def check_names(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check names and values of the ``DELTACHAIN_*`` variables."""
    wrong = dict(mistakes(environment))
    yield from (failed(ENVIRONMENT, error) for error in wrong.values())
    given = read({name: text for name, text in environment.items() if name not in wrong})
    if given:
        shown = (f"{PREFIX}{name}={_shown(name, value)}" for name, value in given.items())
        yield ok(ENVIRONMENT, " ".join(shown))
    elif not wrong:
        yield note(ENVIRONMENT, "no DELTACHAIN_* variable is set")


def check_files(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the files and folders that the environment names.

    Args:
        environment: Environment variables without mistakes.
    """
    given = read(environment)
    for name in FROM_FILE:
        file = given.get(f"{name}_FILE")
        if file is not None:
            yield from _tried(FILES, partial(_tokens, file))
    signing = given.get("SIGNING_KEY")
    if signing is not None:
        yield from _tried(
            FILES, lambda: f"{redacted_path(signing)}: key {SigningKey.load(signing).public}"
        )
        yield from _exposed(signing)
    if "TRUSTED_KEYS" in given or "MAX_HEARTBEAT_AGE_S" in given:
        yield from _tried(FILES, lambda: _trusted(environment))
    if "ENGINES" in given:
        yield from _tried(FILES, lambda: _engines(given["ENGINES"]))
    base = given.get("BASE")
    if base is not None and not base.is_dir():
        hint = "name the folder of the base checkpoint on this machine"
        yield failed(
            FILES,
            ConfigError(f"{PREFIX}BASE is {redacted_path(base)}, which is no folder", hint=hint),
        )


def check_transport(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check certificates, keys and proxies.

    Args:
        environment: Environment variables of this process, without mistakes.
    """
    yield from _tried(TRANSPORT, lambda: _transport(environment))


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


def _tried(check: str, attempt: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield ok(check, attempt())
    except ConfigError as exc:
        yield failed(check, exc)


def _shown(name: str, value: Any) -> str:  # noqa: ANN401 - as it is parsed
    """Return a value, unless it is a secret, or a text that may be one by mistake."""
    if isinstance(value, Path):
        return redacted_path(value)
    if not isinstance(value, str):
        return str(int(value)) if isinstance(value, bool) else str(value)
    if name in _URLS:
        return redacted_url(value)
    return value if name == "DECODE" else "(set)"
