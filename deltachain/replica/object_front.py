"""Front of an object: enough of it to know which ranges hold some elements, and to read those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from deltachain.codec import Part
from deltachain.codec.stored_ranges import Range, check_ranges, joined, stored_ranges
from deltachain.errors import DigestMismatchError
from deltachain.format.documents import ObjectRef
from deltachain.store import Store
from deltachain.types import Buffer

FRONT: Final = 1 << 20
"""Bytes read at first: header and directory of most objects."""

WORTH: Final = 0.8
"""Share of an object above which it is fetched whole: one request, and one digest for all."""


class ObjectFront:
    """Front of one object of a store, read by ranges.

    Args:
        store: The store.
        ref: The object.

    Raises:
        DigestMismatchError: The object has another directory than the chain says.
        MalformedError: The object violates FORMAT.md.
    """

    def __init__(self, store: Store, ref: ObjectRef) -> None:
        self._store, self._ref = store, ref
        self._read: Sequence[tuple[int, Buffer]] = ()
        self._front = memoryview(store.get_range(ref.key, 0, min(FRONT, ref.nbytes)))
        self._part = Part(self._read_at, ref.nbytes, key=ref.key)
        if self._part.digest != ref.directory:
            raise DigestMismatchError(
                f"{ref.key}: directory",
                expected=ref.directory,
                actual=self._part.digest,
                key=ref.key,
            )

    def ranges(self, wanted: Mapping[str, Range]) -> Sequence[Range] | None:
        """Return the ranges of the object to read; ``None`` if the whole object is worth it.

        Args:
            wanted: Range of flat indices of each tensor to be read, by name.
        """
        front = self._part.front_nbytes
        found = joined([(0, front), *stored_ranges(self._part, wanted)])
        whole = sum(stop - start for start, stop in found) > WORTH * self._ref.nbytes
        return None if whole else found

    def read(
        self, ranges: Sequence[Range], wanted: Mapping[str, Range]
    ) -> Sequence[tuple[int, Buffer]]:
        """Read ranges, and verify the frames of what is wanted; return bytes with their offsets.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
        """
        self._read = [(start, self._read_at(start, stop - start)) for start, stop in ranges]
        check_ranges(self._part, wanted)
        return self._read

    def _read_at(self, start: int, length: int) -> Buffer:
        for at, data in ((0, self._front), *self._read):
            if at <= start and start + length <= at + len(data):
                return memoryview(data)[start - at : start - at + length]
        return self._store.get_range(self._ref.key, start, length)
