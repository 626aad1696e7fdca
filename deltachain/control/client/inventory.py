"""Inventory of a fleet: the addresses of its replicas, from a list, a file, or a DNS name."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.redact import redacted_path, redacted_url

DNS: Final = "dns://"
"""Scheme of a name that stands for all replicas at its addresses: ``dns://policy.default:8000``."""

_CLOUDS: Final = ("gs", "az", "abfs", "abfss")
"""Schemes of stores that fsspec opens."""

_HINT: Final = (
    "one address a line: http://HOST:PORT, dns://NAME:PORT, or the URL where replicas write their "
    "presence; # begins a comment"
)


def parse_inventory(text: str) -> tuple[str, ...]:
    """Parse a list of addresses with commas, or the path of a file with one a line.

    Raises:
        ConfigError: It names no address, or the file cannot be read.
    """
    if "://" in text:
        entries = tuple(part.strip() for part in text.split(",") if part.strip())
        return _checked(entries, "the list of engines")
    return read_inventory(Path(text))


def read_inventory(file: Path) -> tuple[str, ...]:
    """Read a file with one address a line; empty lines and comments after ``#`` are left out.

    Raises:
        ConfigError: It cannot be read, names no address, or has a line that is none.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "it is no text"
        raise ConfigError(f"{redacted_path(file)}: {why}", hint=_HINT) from exc
    entries = (line.partition("#")[0].strip() for line in lines)
    return _checked(tuple(entry for entry in entries if entry), str(file))


def _checked(entries: tuple[str, ...], where: str) -> tuple[str, ...]:
    if not entries:
        raise ConfigError(f"{where} names no engine", hint=_HINT)
    for number, entry in enumerate(entries, 1):  # not shown: it may be a line of a file of keys
        if "://" not in entry or " " in entry:
            raise ConfigError(f"{where}: entry {number} is no address", hint=_HINT)
    return entries


def split_entries(entries: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split entries into addresses and DNS names, each of them once, in the given order."""
    unique = dict.fromkeys(entry.rstrip("/") for entry in entries)
    names = [entry for entry in unique if entry.startswith(DNS)]
    return [entry for entry in unique if entry not in names], names


def split_boards(entries: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split entries into those of replicas, and URLs of stores where replicas write their presence.

    An entry is the latter if its scheme is that of a store.
    """
    every = list(entries)
    boards = [entry for entry in every if _is_board(entry)]
    return [entry for entry in every if entry not in boards], boards


def _is_board(entry: str) -> bool:
    scheme = entry.partition("://")[0].lower()
    if "://" not in entry or scheme in ("http", "https", "dns"):
        return False
    from deltachain.store.registry import schemes  # noqa: PLC0415 - imports numpy

    return scheme in {*schemes(), *_CLOUDS}


def parse_name(entry: str) -> tuple[str, int]:
    """Parse ``dns://NAME:PORT``.

    Raises:
        ConfigError: It has no name, no port, or a user.
    """
    name, _, port = entry.removeprefix(DNS).rpartition(":")
    is_port = port.isascii() and port.isdecimal() and int(port) < 1 << 16
    if not name or "@" in name or not is_port:
        what = "has a user" if "@" in name else "has no port"
        raise ConfigError(f"{redacted_url(entry)!r} {what}", hint="write dns://NAME:PORT")
    return name.strip("[]"), int(port)


def resolve(entry: str) -> Sequence[str]:
    """Look up the addresses behind ``dns://NAME:PORT``, in ascending order.

    Raises:
        ControlPlaneError: The name cannot be resolved.
        ConfigError: It has no name, no port, or a user.
    """
    name, port = parse_name(entry)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise ControlPlaneError(
            f"{redacted_url(entry)} cannot be resolved: {getattr(exc, 'strerror', None) or exc}",
            hint="see whether the name has addresses from here",
        ) from exc
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host in hosts]
