"""The methods of a store that follow from a few others, for stores without much of a network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from typing_extensions import override

from deltachain.store.base import (
    MAX_DOCUMENT,
    ObjectInfo,
    Store,
    check_key,
    check_limit,
    check_nbytes,
    check_range,
    find_each,
    too_short,
)

Choose: TypeAlias = Callable[[int], tuple[int, int]]
"""From the size of an object to the first byte to read, and how many; raises to read nothing."""


class SimpleStore(Store):
    """A store that reads a range of an object in one piece, and looks objects up one by one.

    A subclass has ``url``, ``capabilities``, ``put``, ``put_if_absent``, ``find``, ``list`` and
    ``delete``, and reads in ``_read``.
    """

    @abstractmethod
    def _read(self, key: str, choose: Choose) -> bytes:
        """Read a range of an object.

        Args:
            key: The object; a valid key.
            choose: Called with the size of the object, before memory is taken for the range.

        Raises:
            ObjectNotFoundError: No object has this key.
        """

    @property
    @override
    def requests(self) -> int:
        return 0

    @override
    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        def whole(nbytes: int) -> tuple[int, int]:
            check_limit(key, self.url, nbytes=nbytes, limit=limit)
            return 0, nbytes

        return self._read(check_key(key), whole)

    @override
    def read(self, key: str, *, nbytes: int, pin: str = "") -> bytes:
        check_range(0, nbytes)

        def whole(actual: int) -> tuple[int, int]:
            check_nbytes(key, self.url, expected=nbytes, actual=actual)
            return 0, nbytes

        return self._read(check_key(key), whole)

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)

        def some(nbytes: int) -> tuple[int, int]:
            if start + length > nbytes:
                raise too_short(key, self.url, nbytes=nbytes, end=start + length)
            return start, length

        return self._read(check_key(key), some)

    @override
    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        return find_each(self, keys)

    @override
    def close(self) -> None:
        """Do nothing: no connection is kept between calls."""
