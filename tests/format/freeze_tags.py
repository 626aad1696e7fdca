"""Writes the frozen records of tags, once: ``python -m tests.format.freeze_tags``.

They name versions of the frozen chain in ``v1/``.
"""

from pathlib import Path
from typing import Final

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.store.memory import MemoryStore
from tests.format import freeze

FOLDER: Final = Path(__file__).parent / "v1_tags"

TIME: Final = 1700000100.25


def chain() -> Chain:
    store, root = MemoryStore(), freeze.FOLDER / "chain"
    for file in root.rglob("*"):
        if file.is_file():
            store.put(str(file.relative_to(root)), file.read_bytes())
    return Chain.open(store)


def build() -> dict[str, bytes]:
    found = chain()
    tags.set_(found, "best", found.read(1), time=TIME)
    tags.set_(found, "best", found.read(3), time=TIME + 1)
    tags.set_(found, "eval-step-10", found.read(1), time=TIME + 2)
    tags.remove(found, "eval-step-10", time=TIME + 3)
    return {info.key: found.store.get(info.key) for info in found.store.list("tags/")}


if __name__ == "__main__":
    freeze.write(FOLDER, build())
