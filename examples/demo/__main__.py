"""Train a small model while a second process follows it bit for bit.

Takes minutes on a laptop and downloads nothing. With a local S3 server:
``python -m examples.demo --store s3``.
"""

import argparse
import sys
from pathlib import Path

from deltachain.cli import console
from deltachain.errors import DeltaChainError
from examples.demo.run import run_demo


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--workdir", type=Path, metavar="DIR", help="keep all files there; else a temporary folder"
    )
    parser.add_argument(
        "--store",
        default="file",
        metavar="WHERE",
        help="file: a folder; s3: a local SeaweedFS server; hf: a local emulation of the Hub; or "
        "the URL of an empty store",
    )
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="training steps, 2 or more"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    if asked.steps < 2:
        parser.error("--steps: expected 2 or more")
    try:
        return run_demo(
            workdir=asked.workdir, store=asked.store, steps=asked.steps, json_output=asked.json
        )
    except DeltaChainError as error:
        console.say_error(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
