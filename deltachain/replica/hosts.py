"""Hosts of a replica: the ranks that see one folder of spools, and the process that fetches there.

The leader fetches for the ranks that see its own folder. Elsewhere one rank of each host does, from
the same store, and every rank of the host reads what it has written.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltachain.replica.spool import PROBE, Spool, make_folder

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Host:
    """Ranks that share a folder of spools.

    Attributes:
        name: Host name, for messages.
        ranks: Numbers of the ranks, ascending.
        is_leaders: Whether the leader writes to the same folder.
    """

    name: str
    ranks: tuple[int, ...]
    is_leaders: bool


@contextmanager
def shown(parent: Path) -> Iterator[tuple[str, str]]:
    """Keep a probe in the folder of spools while open, and yield its name and content.

    Raises:
        ApplyError: The disk is full, or write permission is missing.
    """
    word = secrets.token_hex(16)
    probe = Spool.probe(parent, word)
    try:
        yield probe.folder.name, word
    finally:
        probe.close()


def sees_probe(folder: Path, word: str) -> bool:
    """Return whether this process reads the leader's probe in its own folder of spools."""
    try:
        return (folder / PROBE).read_bytes() == word.encode()
    except OSError:
        return False


def folder_id(parent: Path) -> str:
    """Return an id of the folder of spools, equal for all processes of a machine that share it.

    Raises:
        OSError: The folder cannot be created, or is another user's.
    """
    make_folder(parent)
    there = parent.stat()
    try:
        machine = _BOOT.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}:{there.st_dev}:{there.st_ino}"


def hosts_of(found: Sequence[tuple[str, str]]) -> tuple[Host, ...]:
    """Group ranks by host, the leader's first.

    Args:
        found: Host name and folder id of each rank; the id is empty for the leader's folder.
    """
    groups: dict[str, list[int]] = {}
    for number, (_, folder) in enumerate(found):
        groups.setdefault(folder, []).append(number)
    return tuple(
        Host(found[ranks[0]][0], tuple(ranks), is_leaders=not folder)
        for folder, ranks in sorted(groups.items())
    )
