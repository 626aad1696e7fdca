"""Ranks of a trainer on this machine: processes that talk by gloo."""

import atexit
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import distributed, multiprocessing
from torch._C._distributed_c10d import TCPStore

HOST: Final = "127.0.0.1"
DEADLINE_S: Final = 180.0

Trial: TypeAlias = Callable[[int, str, str], None]

PRELOADED: Final = (
    *(f"tests.ranks.test_{name}" for name in ("faults", "layouts", "settings", "transformers")),
    "numba",
)
"""Modules that ranks find imported: they are forked from a process that has started no thread."""


def on_ranks(count: int) -> Callable[[Trial], Callable[[Path], None]]:
    """Make a test of what each of some ranks does with its number, a chain's URL and a folder."""

    def made(trial: Trial) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            run(trial, count, (tmp_path / "chain").as_uri(), str(tmp_path))

        test.trial = trial  # type: ignore[attr-defined]
        return test

    return made


def run(trial: Callable[..., None], ranks: int, *arguments: Any, deaths: int = 0) -> None:
    """Call a function of a module on each rank, with the rank's number and these arguments."""
    function = (trial.__module__, trial.__name__)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # As torchrun has it: the store is none of the ranks', so it outlives each of them.
    meeting = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(
            target=_rank, args=(dict(os.environ), function, rank, ranks, meeting.port, arguments)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    try:
        alive = list(processes)
        while alive and time.monotonic() < deadline:
            wait([process.sentinel for process in alive], timeout=1.0)
            alive = [process for process in alive if process.is_alive()]
            failed = [p for p in processes if p.exitcode not in (None, 0, -9)]
            assert not failed, f"ranks {[processes.index(p) for p in failed]} failed"
        assert not alive, f"ranks {[processes.index(p) for p in alive]} hang"
        killed = [process for process in processes if process.exitcode == -9]
        assert len(killed) == deaths, f"{len(killed)} ranks died, {deaths} should have"
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    environ: dict[str, str],
    function: tuple[str, str],
    rank: int,
    ranks: int,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    module, name = function
    meeting = TCPStore(HOST, port, is_master=False)
    distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    found = getattr(importlib.import_module(module), name)
    getattr(found, "trial", found)(rank, *arguments)
    gc.collect()  # a DDP model would keep threads of its group until the interpreter is gone
    distributed.destroy_process_group()
    _leave()


def _leave() -> NoReturn:
    """End as Python does, but for what comes after it.

    torch 2.13 keeps groups in caches of DTensor, and their threads until the interpreter is gone.
    Now and then that aborts a rank whose work is done: "terminate called without an active
    exception".
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
