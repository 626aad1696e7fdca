"""Large objects in parts, several at a time, each part repeated by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from deltachain.errors import DeltaChainError
from deltachain.retry import Deadline
from deltachain.store.s3.body import Upload
from deltachain.store.s3.calls import Calls, StatusError, once
from deltachain.store.s3.client import Client
from deltachain.store.s3.replies import whole, wrote_nothing
from deltachain.threads import Pool

PART_NBYTES: Final = 16 << 20
"""Bytes of one part, and of the largest object that is put by one request."""

_PARTS: Final = 10_000
"""Parts of one object, at most."""

_THREADS: Final = 8
_ABORT_S: Final = 5.0
"""Seconds for aborting an upload: it is given up already, and its caller waits."""

_T = TypeVar("_T")


class Uploader:
    """Sends large objects to a server.

    Args:
        client: Of boto3.
        calls: What its requests go through.
    """

    def __init__(self, client: Client, calls: Calls) -> None:
        self._client = client
        self._calls = calls
        # What boto3 adds to each part by default must be announced for the whole, and repeated.
        checked = client.meta.config.request_checksum_calculation != "when_required"
        self._checksum = {"ChecksumAlgorithm": "CRC32"} if checked else {}

    def upload(
        self,
        at: dict[str, str],
        key: str,
        view: memoryview,
        deadline: Deadline,
        holds: Callable[[], bool],
    ) -> None:
        """Write an object; visible once its last part is there, or aborted.

        Args:
            at: Bucket and name of the object.
            key: How errors name it.
            view: Its bytes.
            deadline: When to give up.
            holds: Whether the object is there with these bytes.

        Raises:
            StoreError: The server refused, or failed for too long.
        """
        for again in (True, False):
            try:
                with self._opened(at, key, deadline) as upload:
                    parts = self._send_parts(upload, key, view, deadline)
                    self._complete(upload, key, parts, deadline, holds)
            except StatusError:
                # Completed by an attempt that went unanswered, or cleared away by others: the two
                # cannot be told apart, and writing the object again is right for both.
                if not again:
                    raise deadline.error("its upload is cleared away while it goes on") from None
            else:
                return

    @contextmanager
    def _opened(self, at: dict[str, str], key: str, deadline: Deadline) -> Iterator[dict[str, str]]:
        """An upload that is aborted unless it is completed."""

        def create(_: Deadline) -> Any:  # noqa: ANN401
            return whole(self._client.create_multipart_upload(**at, **self._checksum), "UploadId")

        upload = {**at, "UploadId": self._send(create, deadline, key)["UploadId"]}
        try:
            yield upload
        except BaseException:
            self._abort(upload, key, deadline)
            raise

    def _send_parts(
        self, upload: dict[str, str], key: str, view: memoryview, deadline: Deadline
    ) -> list[dict[str, Any]]:
        nbytes = max(PART_NBYTES, -(-view.nbytes // _PARTS))

        def send(start: int) -> dict[str, Any]:
            number, part = 1 + start // nbytes, view[start : start + nbytes]

            def put(own: Deadline) -> Any:  # noqa: ANN401
                body = Upload(part, own)
                return whole(
                    self._client.upload_part(
                        **upload, **self._checksum, PartNumber=number, Body=body
                    ),
                    "ETag",
                )

            reply = self._send(put, deadline, key)
            told = {name: reply[name] for name in ("ETag", "ChecksumCRC32") if name in reply}
            return {"PartNumber": number, **told}

        with Pool(_THREADS, "deltachain-upload") as pool:
            sending: list[Future[dict[str, Any]]] = []
            try:
                for start in range(0, view.nbytes, nbytes):
                    sending.append(pool.submit(send, start))
                    if sending[-1].done():  # at once, where there is no thread: it may have failed
                        sending[-1].result()
                return [each.result() for each in sending]
            finally:
                for each in sending:  # what was not begun when one failed
                    each.cancel()

    def _complete(
        self,
        upload: dict[str, str],
        key: str,
        parts: list[dict[str, Any]],
        deadline: Deadline,
        holds: Callable[[], bool],
    ) -> None:
        def complete(_: Deadline) -> None:
            reply = self._client.complete_multipart_upload(
                **upload, MultipartUpload={"Parts": parts}
            )
            if not reply.get("ETag") and not holds():
                raise wrote_nothing()

        self._send(complete, deadline, key)

    def _send(self, call: Callable[[Deadline], _T], deadline: Deadline, key: str) -> _T:
        """Send a request of an upload.

        The time in which it may fail begins with its first failure: the server takes some for a
        part before it answers, and gets as much once more.

        Raises:
            StatusError: 404, where the upload is not there.
        """
        first = deadline.own()
        try:
            return once(lambda: call(first), first)
        except DeltaChainError:
            raise
        except Exception:  # noqa: BLE001 - typed below, if it stays
            again = deadline.own()
            return self._calls.repeat(lambda: call(again), again, key, 404)

    def _abort(self, upload: dict[str, str], key: str, deadline: Deadline) -> None:
        last = deadline.shorter(_ABORT_S)
        try:
            self._calls.repeat(
                lambda: self._client.abort_multipart_upload(**upload), last, key, 404
            )
        except (DeltaChainError, StatusError):
            return  # what there is of it stays, invisible, until a lifecycle rule removes it
