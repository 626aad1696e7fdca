"""Writes the frozen signed chain, once and never again: ``python -m tests.format.freeze_signed``.

Its parts are not compressed, so that its bytes depend on nothing but the format.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from deltachain.chain.trust import SigningKey, Trust, TrustedKeys
from deltachain.format.documents import Edge
from deltachain.format.keys import digest_key
from deltachain.kernels import reference
from deltachain.types import Bits
from tests.format.freeze import TINY, Builder, absolute, dense, write

FOLDER: Final = Path(__file__).parent / "signed"
KEY: Final = SigningKey.of(bytes(range(32)))
OWNER: Final = Trust(key=KEY, trusted=TrustedKeys((KEY.public,)))


def version(number: int) -> Bits:
    bits = np.arange(0x3F80, 0x3F88, dtype=np.uint16)
    if number >= 1:
        bits[[0, 5]] += np.array([1, 0xFFFF], np.uint16)
    return bits


def build() -> Iterator[tuple[str, bytes]]:
    builder = Builder([TINY], {}, trust=Trust())
    states = [reference.digest(digest_key(TINY), version(number)) for number in range(2)]
    first = builder.put("anchor", None, 0, [dense(TINY, version(0))], raw=True)
    builder.commit(0, first, states[0], nnz=TINY.numel)
    builder.chain = type(builder.chain).open(builder.store, OWNER.unchecked())
    for key, data in builder.chain.sign_identity().items():
        builder.store.put(key, data)
    delta = builder.put("delta", 0, 1, [absolute(TINY, version(0), version(1))], raw=True)
    builder.commit(1, delta, states[1], nnz=2)
    assert builder.parent is not None
    anchor = builder.put("anchor", None, 1, [dense(TINY, version(1))], raw=True)
    builder.added = [builder.chain.add_edge(builder.parent, anchor, "")]
    builder.commit(2, Edge(kind="delta", base=1), states[1], nnz=0, epoch=1)
    for info in builder.store.list():
        yield info.key, builder.store.get(info.key)


if __name__ == "__main__":
    write(FOLDER, dict(build()))
