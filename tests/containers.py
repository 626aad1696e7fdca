"""What a container gives an entrypoint, where there are none: a user, a home, and little else."""

import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
USER: Final = 1000

VARIABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1"},
}
"""What an engine needs on a CPU, and the images do not set."""

ARGUMENTS: Final[Mapping[str, str]] = {
    "vllm": "--enforce-eager --dtype bfloat16",
    "sglang": "--device cpu --attention-backend torch_native --dtype bfloat16 "
    "--mem-fraction-static 0.6 --disable-cuda-graph --skip-server-warmup --sleep-on-idle",
}
"""The same for its command line."""


def as_user(*command: str) -> list[str]:
    """A command as user 1000, or as whoever runs the tests.

    Drops everything but reading: an interpreter may lie where only its owner looks.
    """
    if os.geteuid() != 0:
        return list(command)
    drop = f"setpriv --reuid {USER} --regid {USER} --clear-groups"
    rights = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
    return [*shlex.split(f"{drop} {rights}"), *command]


@contextmanager
def home_of(python: Path) -> Iterator[Path]:
    """Where the user may write; ``bin`` has the interpreter, by its names in images.

    Not below pytest's folders: they are shut to others.
    """
    with tempfile.TemporaryDirectory(prefix="deltachain-space-") as name:
        home = Path(name)
        if os.geteuid() == 0:
            os.chown(home, USER, USER)
        # bash looks for a command with less rights than it starts it with, and passes by a link
        # to where only root looks.
        (home / "bin").mkdir()
        for called in ("python", "python3"):
            file = home / "bin" / called
            file.write_text(f'#!/bin/sh\nexec {python} "$@"\n', encoding="utf-8")
            file.chmod(0o755)
        yield home


def environment_in(home: Path, python: Path) -> dict[str, str]:
    """As in a new container: nothing of whoever runs the tests but the way to the packages."""
    return {
        "PATH": f"{home}/bin:{python.parent}:{os.environ['PATH']}",
        # The plugins of this tree too: those that are installed may be of another one.
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "vllm_ext", ROOT / "sglang_ext"))),
        "HOME": str(home),
    }
