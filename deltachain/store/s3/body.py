"""Request and response bodies of boto3."""

from __future__ import annotations

import io
from typing import Any

from deltachain.errors import DeltaChainError
from deltachain.retry import Deadline
from deltachain.store.ranges import CutError


class Download:
    """The body of an answer, whose failures are all a ``CutError``.

    Args:
        body: A ``StreamingBody`` of botocore.
    """

    def __init__(self, body: Any) -> None:  # noqa: ANN401 - untyped
        self._body = body

    def readinto(self, buffer: memoryview, /) -> int:
        """Read into ``buffer`` and return the number of bytes; 0 at the end.

        Raises:
            CutError: The rest will not come.
        """
        try:
            return int(self._body.readinto(buffer))
        except DeltaChainError:
            raise
        except Exception as exc:  # some of what a broken body raises is of no documented class
            raise CutError from exc

    def close(self) -> None:
        """Leave the rest, and the connection with it unless all was read."""
        self._body.close()


class Upload(io.RawIOBase):
    """A view as a file, of which only the pieces asked for are copied.

    Bytes would be sent in one call of the socket, whose timeout a slow network cannot keep.

    Args:
        view: Flat bytes.
        deadline: Ends a request that goes on for too long, by raising from ``read``.
    """

    def __init__(self, view: memoryview, deadline: Deadline) -> None:
        super().__init__()
        self._view = view
        self._deadline = deadline
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is, so that a request can be repeated."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Let the next read begin elsewhere."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to ``size`` bytes, all that are left by default.

        Raises:
            StoreUnavailableError: The time is over.
        """
        self._deadline.moved()  # what was read before has left
        stop = len(self._view) if size is None or size < 0 else self._at + size
        data = bytes(self._view[self._at : stop])
        self._at += len(data)
        return data
