"""``python run_example.py EXAMPLE [PACKAGES ...]``: an example as its user runs it, on a CPU.

Each folder of packages is of another environment: what is missing in this one is found there. TRL's
asynchronous trainer has a CUDA kernel for attention alone, in place of which ours is put.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    example, *packages = sys.argv[1:]
    sys.path += packages
    if "async" in example:
        from examples.demo.online.cpu import run_on_cpu  # noqa: PLC0415 - takes seconds

        run_on_cpu()
    sys.argv = [example]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main()
