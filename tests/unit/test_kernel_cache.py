"""Compiled kernels where their cache has no room: they compute, and say so once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
