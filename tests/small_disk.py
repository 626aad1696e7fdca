"""A disk with little room, for one child process: where it is full, it is really full."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

_MOUNT: Final = {
    "tmpfs": 'mount -t tmpfs -o size="$1" tmpfs "$2"',
    "ext4": (
        'truncate -s "$1" "$2.img" && mkfs.ext4 -q -O ^has_journal "$2.img"'
        ' && mount -o loop "$2.img" "$2"'
    ),
}


def run_on_small_disk(
    kind: str, folder: Path, nbytes: int, code: str, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run Python code whose view of a folder is an empty file system of so many bytes.

    Nobody else sees what it writes there: it must look at that itself. Where nobody may mount, the
    folder is an ordinary one, and the code must find another way.

    Args:
        kind: ``tmpfs`` or ``ext4``; where that cannot be mounted, the next best is.
        folder: Where it is mounted; made if it is not there.
        nbytes: Its size.
        code: What is run.
        arguments: Of the code, from ``sys.argv[1]`` on.
    """
    python = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)]
    return subprocess.run(
        on_small_disk(kind, folder, nbytes, python),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def on_small_disk(kind: str, folder: Path, nbytes: int, command: Sequence[str]) -> list[str]:
    """A command whose view of a folder is an empty file system of so many bytes.

    Its process id is that of the command; others reach the folder below the root of that process.

    Args:
        kind: ``tmpfs`` or ``ext4``; where that cannot be mounted, the next best is.
        folder: Where it is mounted; made if it is not there.
        nbytes: Its size.
        command: What is run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [*_way(kind), str(nbytes), str(folder), *command]


def may_mount() -> bool:
    """Whether a small disk is a real one here, rather than an ordinary folder."""
    return _way("tmpfs")[0] == "unshare"


@cache
def _way(kind: str) -> tuple[str, ...]:
    """The command that makes a small disk and runs what follows it there."""
    for words in (_MOUNT[kind], _MOUNT["tmpfs"]):
        for unshare in (("unshare", "-m"), ("unshare", "-rm")):
            way = (*unshare, "bash", "-c", f'{words} && shift 2 && exec "$@"', "bash")
            if shutil.which("unshare") and _works(way):
                return way
    return ("bash", "-c", 'shift 2 && exec "$@"', "bash")


def _works(way: Sequence[str]) -> bool:
    trial = Path(os.environ.get("TMPDIR", "/tmp")) / f"deltachain-trial-{os.getpid()}"  # noqa: S108
    trial.mkdir()
    try:
        command = [*way, str(8 << 20), str(trial), "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    finally:
        shutil.rmtree(trial)
        trial.with_name(f"{trial.name}.img").unlink(missing_ok=True)
