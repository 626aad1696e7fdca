"""Two real processes that are the two ranks of one tensor-parallel group."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

RENDEZVOUS: Final = "TEST_DELTACHAIN_RENDEZVOUS"
"""Environment variable with a path at which the ranks of a group find each other."""

RANKS: Final = 2
DEADLINE_S: Final = 300.0

_MODULE: Final = "tests.engines.two_ranks"
_ROOT: Final = Path(__file__).resolve().parents[2]
_GRACE_S: Final = 10.0
"""How long a rank may go on when the other has failed: it may wait in a collective for ever."""

_TAIL: Final = 4000


class RanksFailedError(RuntimeError):
    pass


def two_ranks(
    function: str, *arguments: object, deadline_s: float = DEADLINE_S, ranks: int = RANKS
) -> list[Any]:
    """Run ``MODULE:FUNCTION`` in both ranks, and return what it returned in each, as JSON."""
    with tempfile.TemporaryDirectory(prefix="deltachain-ranks-") as scratch:
        folder = Path(scratch)
        environment = _environment(folder)
        words = [function, *map(str, arguments)]
        processes = [_start(rank, words, folder, environment) for rank in range(ranks)]
        try:
            late = _wait(processes, time.monotonic() + deadline_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = [
            _outcome(rank, process, folder, late=process in late)
            for rank, process in enumerate(processes)
        ]
    failed = [f"rank {rank}: {one['error']}" for rank, one in enumerate(found) if one["error"]]
    if failed:
        raise RanksFailedError("\n\n".join(failed))
    return [one["result"] for one in found]


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": path,
        RENDEZVOUS: str(folder / "rendezvous"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_DIST_IDENT": uuid.uuid4().hex[:12],  # part of the name of shared memory
    }


def _start(
    rank: int, words: Sequence[str], folder: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", _MODULE, str(rank), str(folder)]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float
) -> list[subprocess.Popen[bytes]]:
    while running := [process for process in processes if process.poll() is None]:
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return running
        time.sleep(0.05)
    return []


def _outcome(rank: int, process: subprocess.Popen[bytes], folder: Path, *, late: bool) -> Any:
    file = folder / f"{rank}.json"
    if file.exists():
        return json.loads(file.read_bytes())
    said = (folder / f"{rank}.log").read_text(errors="replace")[-_TAIL:]
    how = "killed, it took too long" if late else f"died with {process.returncode}"
    return {"result": None, "error": f"{how}; its last words:\n{said}"}


def _be_rank(rank: int, folder: Path, function: str, arguments: Sequence[str]) -> int:
    """Run the function and leave what came of it in a file, which appears at once or never."""
    found: dict[str, Any] = {"result": None, "error": ""}
    try:
        module, _, name = function.partition(":")
        found["result"] = getattr(importlib.import_module(module), name)(rank, *arguments)
        text = json.dumps(found)
    except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
        found = {"result": None, "error": traceback.format_exc()}
        text = json.dumps(found)
    partial = folder / f"{rank}.partial"
    partial.write_text(text)
    partial.replace(folder / f"{rank}.json")
    return 1 if found["error"] else 0


if __name__ == "__main__":
    number, here, called, *given = sys.argv[1:]
    sys.exit(_be_rank(int(number), Path(here), called, given))
