"""Writes the frozen prune record, once: ``python -m tests.format.freeze_prunes``.

It is the second of a chain of which nothing else is frozen; FORMAT.md 8.3 shows its bytes.
"""

from pathlib import Path
from typing import Final

from deltachain.format.documents import PrunedRange, PruneRecord, seal
from deltachain.format.keys import prune_key
from tests.format.freeze import write

FOLDER: Final = Path(__file__).parent / "v1_prunes"

RECORD: Final = PruneRecord(
    chain="00000000000000000000000000000007",
    number=1,
    head=1040,
    maintainer="00000000000000000000000000000009",
    time=1700000000.5,
    pruned=(
        PrunedRange(kind="anchor", span=0, first=0, last=0, after=1700000000.25),
        PrunedRange(kind="delta", span=1, first=1, last=8, after=1700000000.25),
        PrunedRange(kind="delta", span=1, first=9, last=15, after=1700003600.5),
        PrunedRange(kind="skip", span=8, first=8, last=16, after=1700003600.5),
    ),
)


def build() -> dict[str, bytes]:
    return {prune_key(RECORD.number): seal(RECORD)}


if __name__ == "__main__":
    write(FOLDER, build())
