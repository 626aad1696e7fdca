"""``python -m tests.bench SUBJECT``: sizes and speeds on this machine, as ratios of one run.

For example ``python -m tests.bench codec --json``, or
``python -m tests.bench store s3://bucket/tmp --mb 256``, which cleans up after itself.
"""

import argparse
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from deltachain.errors import DeltaChainError
from tests.bench import anchor, apply, codec, counts, detect, store

SUBJECTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "codec": "bits per change, encode and decode speed, beside other systems' layouts",
        "detect": "finding changes",
        "apply": "writing changes",
        "anchor": "whole versions, from attaching to joining",
        "counts": "launches, copies and Python of the device path, without a card",
        "store": "puts and gets of objects",
    }
)


def main() -> int:
    asked = _parser().parse_args()
    megabyte = 1_000_000
    if asked.subject == "store":
        nbytes = (asked.mb or 64) * megabyte
        return store.main(asked.url, json_output=asked.json, nbytes=nbytes)
    if asked.subject == "anchor":
        nbytes = asked.mb * megabyte if asked.mb else anchor.NBYTES
        return anchor.main(json_output=asked.json, nbytes=nbytes)
    mains = {"codec": codec.main, "detect": detect.main, "apply": apply.main, "counts": counts.main}
    return mains[asked.subject](json_output=asked.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    subjects = "; ".join(f"{name}: {what}" for name, what in SUBJECTS.items())
    parser.add_argument("subject", choices=SUBJECTS, help=subjects)
    parser.add_argument("url", nargs="?", help="of an empty store, for store")
    parser.add_argument("--mb", type=int, help="size of a version, for store (64) and anchor (256)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DeltaChainError as error:
        sys.exit(f"error: {error}")
