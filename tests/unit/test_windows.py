"""Parts that give windows of one tensor, as the ranks of a sharded trainer write them."""

from __future__ import annotations

import numpy as np
import pytest

from deltachain.chain.chain import Chain
from deltachain.chain.fetch import fetch
from deltachain.codec import Change, Part, encode_part
from deltachain.delta import ABSOLUTE, TensorDelta
from deltachain.errors import ConfigError, MalformedError
from deltachain.format.documents import Edge, ObjectRef, Table
from deltachain.format.keys import digest_key, payload_key
from deltachain.kernels import reference
from deltachain.publish.writer import Writer
from deltachain.store import MemoryStore
from deltachain.types import Bits, Indices, TensorSpec
from deltachain.verify import verify

WINDOWED = TensorSpec("w", "BF16", (6, 4))
BITS: Bits = np.arange(100, 124, dtype=np.uint16)
COLUMNS = np.arange(24).reshape(6, 4)


def window(indices: Indices) -> Change:
    delta = TensorDelta(spec=WINDOWED, indices=indices, values=BITS[indices], absolute=ABSOLUTE)
    return Change(
        delta, reference.digest_at(digest_key(WINDOWED), indices, BITS[indices]), windows=True
    )


def chain_of(*windows: Indices) -> Chain:
    """A chain whose only version is an anchor in as many parts."""
    store = MemoryStore()
    table = Table(tensors=((WINDOWED.name, WINDOWED.dtype, WINDOWED.shape),))
    chain = Chain.create(store, table, chain_id="0" * 32, time=0.0, assets={})
    writer = Writer(chain, numel=WINDOWED.numel, metadata={}, parent=None)
    refs = []
    for number, indices in enumerate(windows):
        part = encode_part([window(indices)])
        key = payload_key("anchor", 0, 0, f"{number:032x}", 0)
        store.put(key, part.data)
        nbytes, directory = len(part.data), part.directory
        refs.append(ObjectRef(key=key, nbytes=nbytes, blake3=part.digest, directory=directory))
    edge = Edge(kind="anchor", encodings=("dense",), parts=tuple(refs))
    state = reference.digest(digest_key(WINDOWED), BITS)
    writer.commit(writer.draft(state=state, step=None, nnz=WINDOWED.numel), edge)
    return chain


@pytest.mark.parametrize(
    "windows",
    [
        [np.arange(0, 8), np.arange(8, 24)],
        [np.arange(8, 24), np.arange(0, 8)],
        [COLUMNS[:, :1].reshape(-1), COLUMNS[:, 1:].reshape(-1)],
        [np.arange(0, 7), np.arange(7, 9), np.arange(9, 24)],
    ],
)
def test_windows_add_up_to_the_tensor(windows: list[Indices]) -> None:
    chain = chain_of(*windows)
    head = chain.head()
    assert head is not None
    delta = fetch(chain, chain.plan(None, head)).read("w")
    assert delta.is_dense
    assert delta.values.tolist() == BITS.tolist()
    assert len(list(verify(chain))) == 1


def test_an_element_that_two_parts_give_is_refused() -> None:
    chain = chain_of(np.arange(0, 9), np.arange(8, 24))
    with pytest.raises(MalformedError, match="'w' twice"):
        list(verify(chain))


def test_a_window_is_a_segment_for_each_run_and_never_raw() -> None:
    part = Part.from_bytes(encode_part([window(COLUMNS[:, 1:3].reshape(-1))]).data)
    assert part.directory.segments.start == (1, 5, 9, 13, 17, 21)
    assert part.directory.segments.length == (2,) * 6
    with pytest.raises(ConfigError, match="windows"):
        encode_part([window(np.arange(3))], raw=True)
