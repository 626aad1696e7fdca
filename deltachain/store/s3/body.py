"""Request and response bodies of boto3."""

from __future__ import annotations

import io
from typing import Any

from typing_extensions import override

from deltachain.errors import DeltaChainError
from deltachain.retry import Deadline
from deltachain.store.ranges import CutError


class Download:
    """Body of a response, all of whose failures become a ``CutError``.

    Args:
        body: A ``StreamingBody`` of botocore.
    """

    def __init__(self, body: Any) -> None:  # noqa: ANN401 - untyped
        self._body = body

    def readinto(self, buffer: memoryview, /) -> int:
        """Read into ``buffer`` and return the number of bytes; 0 at the end.

        Raises:
            CutError: The remaining bytes cannot be read.
        """
        try:
            return int(self._body.readinto(buffer))
        except DeltaChainError:
            raise
        except Exception as exc:  # errors of a broken body have no documented class
            raise CutError from exc

    def close(self) -> None:
        """Discard the remaining bytes, and with them the connection, unless all were read."""
        self._body.close()


class Upload(io.RawIOBase):
    """A memory view as a file, copied piece by piece.

    A ``bytes`` object would be sent in one socket call, which times out on a slow network.

    Args:
        view: Flat bytes.
        deadline: Time limit of the request, enforced by ``read``.
    """

    def __init__(self, view: memoryview, deadline: Deadline) -> None:
        super().__init__()
        self._view = view
        self._deadline = deadline
        self._at = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to ``size`` bytes; all remaining ones by default.

        Raises:
            StoreUnavailableError: The deadline passed.
        """
        self._deadline.moved()  # the bytes of earlier reads were sent
        stop = len(self._view) if size is None or size < 0 else self._at + size
        data = bytes(self._view[self._at : stop])
        self._at += len(data)
        return data
