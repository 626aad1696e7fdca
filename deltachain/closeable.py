"""Protocol of objects that are closed at the end of a ``with`` block."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class Closeable(Protocol):
    """An object that is closed at the end of its ``with`` block."""

    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
