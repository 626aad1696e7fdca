"""Base class of simple stores, which derives most methods from a few others."""

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
from deltachain.types import Buffer

Choose: TypeAlias = Callable[[int], tuple[int, int]]
"""Function from an object's size to the first byte and the length to read; raises to refuse."""


class SimpleStore(Store):
    """A store that reads a range of an object at once, and looks up objects one by one.

    A subclass implements ``url``, ``capabilities``, ``put``, ``put_if_absent``, ``find``, ``list``,
    ``delete`` and ``_read``.
    """

    @abstractmethod
    def _read(self, key: str, choose: Choose) -> bytes:
        """Read a range of an object.

        Args:
            key: Key of the object, already checked.
            choose: Called with the object's size, before memory is allocated for the range.

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
    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
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
        """Do nothing: no connection stays open between calls."""
