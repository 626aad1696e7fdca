"""Compiled kernels where their cache has no room: they compute, and say so once."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltachain.kernels import compiling
from tests.small_disk import run_on_small_disk

COMPUTE = """
import logging, os, resource, sys
from pathlib import Path
disk, cache = Path(sys.argv[1]), sys.argv[2]
os.environ["NUMBA_CACHE_DIR"] = cache
if not disk.is_mount():  # nobody may mount here: files can at least be limited
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
else:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "other").write_bytes(bytes(free - 8192))
logging.basicConfig(level=logging.WARNING, format="%(message)s")
import numpy as np
from deltachain.kernels import jit, reference
bits, key = np.arange(999, dtype=np.uint16), (1, 2)
assert jit.digest(key, bits) == reference.digest(key, bits)
assert list(jit.gather(bits, np.array([3, 5]))) == [3, 5]
"""


COMPILE = """
import gc, sys, time
from pathlib import Path
import numpy as np
from numba.core.registry import CPUDispatcher
from deltachain.kernels import jit
mine, other = map(Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.001)
assert list(jit.gather(np.arange(9, dtype=np.uint16), np.array([3, 5]))) == [3, 5]
kernels = [one for one in gc.get_objects() if type(one) is CPUDispatcher]
print(sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels))
"""


def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path) -> None:
    here = (tmp_path / "one", tmp_path / "other")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE, *map(str, places)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for places in (here, here[::-1])
    ]  # fmt: skip
    missed = sorted(int(process.communicate(timeout=120)[0]) for process in processes)
    assert missed[0] == 0 < missed[1]


def test_a_process_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "WAIT_S", 0.1)
    lock = tmp_path / "kernel.lock"
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert compiling._in_turn(lambda sig: f"compiled {sig}", lock)(3) == "compiled 3"
    (tmp_path / "file").touch()
    assert compiling._in_turn(lambda sig: sig, tmp_path / "file" / "kernel.lock")(4) == 4


def test_kernels_compute_where_nothing_can_be_kept(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done = run_on_small_disk("tmpfs", disk, 1 << 20, COMPUTE, disk, disk / "cache")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiled kernels are not kept") == 1, done.stderr


def test_the_first_compilation_on_a_machine_is_told(tmp_path: Path) -> None:
    code = "from deltachain.cli.console import show_warnings\nshow_warnings()\n"
    code += "import numpy as np\nfrom deltachain.kernels import jit\n"
    code += "jit.gather(np.arange(9, dtype=np.uint16), np.array([3, 5]))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stderr.count("compiling kernels")
        for _ in range(2)
    ]
    assert told == [1, 0]
