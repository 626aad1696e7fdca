"""``python -m tests.property loaders 0 300``: examine random engines, and tell what is wrong."""

import logging
import sys
import tempfile
from pathlib import Path

from tests.property.test_discovery import KINDS, examine, told
from tests.property.trial_run import run


def main() -> None:
    kind, start = sys.argv[1], int(sys.argv[2])
    stop = int(sys.argv[3]) if len(sys.argv) > 3 else start + 1
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "engine"
        if len(sys.argv) == 3:
            recipe = KINDS[kind](start)
            print(recipe, told(recipe, run(recipe, folder), folder), sep="\n")  # noqa: T201
        for seed in range(start, stop):
            found = examine(kind, seed, folder)
            if found:
                print(found, end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main()
