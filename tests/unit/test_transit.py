"""Documents with a bit that flipped on the way are fetched again, once."""

from __future__ import annotations

from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError, FormatError
from deltachain.format.keys import CHAIN_KEY, TABLE_KEY, manifest_key
from deltachain.store import MemoryStore
from tests.support.faults import FaultyStore
from tests.unit.manifest_chains import SingleWriterStore, WideStore, create, extend

KEYS = [CHAIN_KEY, TABLE_KEY, manifest_key(1)]


class Flipping(FaultyStore):
    """Flips one bit of one object, the first times that it is read."""

    def __init__(self, inner: MemoryStore, key: str, bit: int, times: int) -> None:
        super().__init__(inner)
        self.key, self.bit, self.times = key, bit, times

    def get(self, key: str, **limits: Any) -> bytes:
        return self._flip(key, super().get(key, **limits))

    def read(self, key: str, *, nbytes: int, pin: str = "") -> bytes:
        return self._flip(key, super().read(key, nbytes=nbytes, pin=pin))

    def _flip(self, key: str, data: bytes) -> bytes:
        if key != self.key or not self.times:
            return data
        self.times -= 1
        flipped = bytearray(data)
        flipped[self.bit // 8 % len(data)] ^= 1 << self.bit % 8
        return bytes(flipped)


@pytest.mark.parametrize("store", [MemoryStore, SingleWriterStore, WideStore])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("bit", [5, 8 * 10 + 1, 8 * 12 + 6])
def test_a_bit_that_flips_once_is_of_no_consequence(
    store: type[MemoryStore], key: str, bit: int
) -> None:
    """The first bit breaks the syntax, the second the digest or a name, the third a number."""
    inner = store()
    made = extend(create(inner), 3)
    assert Chain.open(Flipping(inner, key, bit, 1)).read(1) == made[1]


@pytest.mark.parametrize("key", KEYS)
def test_an_object_that_stays_corrupt_is_refused(key: str) -> None:
    inner = MemoryStore()
    extend(create(inner), 3)
    with pytest.raises(FormatError) as caught:
        Chain.open(Flipping(inner, key, 5, 1000)).read(1)
    assert isinstance(caught.value, DeltaChainError)
    assert key in str(caught.value)
