"""Ranks of a trainer on this machine: processes that talk by gloo."""

import atexit
import gc
import importlib
import os
import sys
import threading
import time
from multiprocessing.connection import wait
from typing import Any, Final, NoReturn

import torch
from torch import distributed, multiprocessing
from torch._C._distributed_c10d import TCPStore

HOST: Final = "127.0.0.1"
DEADLINE_S: Final = 180.0

PRELOADED: Final = ("tests.ranks.trials", "tests.ranks.transformers_trials", "numba")
"""Modules that ranks find imported: they are forked from a process that has started no thread."""


def run(function: str, ranks: int, *arguments: Any, deaths: int = 0) -> None:
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
    function: str,
    rank: int,
    ranks: int,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    module, _, name = function.partition(":")
    meeting = TCPStore(HOST, port, is_master=False)
    distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    getattr(importlib.import_module(module), name)(rank, *arguments)
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


if __name__ == "__main__":  # with the Python of another environment
    run(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
