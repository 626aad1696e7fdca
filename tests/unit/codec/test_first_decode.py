"""Threads that are the first of a process to open a part."""

from __future__ import annotations

import subprocess
import sys

RACE = """
import sys, threading
import msgspec
from deltachain.codec import container as directory
from deltachain.format.documents import decode

sys.setswitchinterval(1e-6)
empty = {name: [] for name in directory.Directory.__struct_fields__}
row = {"tensors": [{"name": "a", "dtype": "BF16", "shape": [1], "nnz": 1}]}
documents = [msgspec.json.encode(one) for one in (empty, row)]
start = threading.Barrier(16)

def race():
    start.wait()
    for document in documents:
        try:
            decode(document, directory.Directory)
        except msgspec.MsgspecError:
            pass

threads = [threading.Thread(target=race) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_first_parts_of_a_process_are_opened_by_many_threads() -> None:
    """With ``msgspec.json.decode(document, type=Directory)`` one run of six ends with SIGSEGV."""
    codes = [
        subprocess.run([sys.executable, "-c", RACE], check=False).returncode for _ in range(12)
    ]
    assert codes == [0] * 12
