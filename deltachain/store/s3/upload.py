"""Uploads of large objects in concurrent parts, each with its own retries."""

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
"""Size of one part, and of the largest object put by one request, in bytes."""

_PARTS: Final = 10_000
"""Largest number of parts of one object."""

_THREADS: Final = 8
_ABORT_S: Final = 5.0
"""Time limit of aborting an upload, in seconds: the upload has failed, and its caller waits."""

_T = TypeVar("_T")


class Uploader:
    """Uploader of large objects.

    Args:
        client: S3 client of boto3.
        calls: Sender of the client's requests.
    """

    def __init__(self, client: Client, calls: Calls) -> None:
        self._client = client
        self._calls = calls
        # boto3's default checksums of parts must be announced for the whole object, and repeated.
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
        """Write an object, visible once its last part is stored; abort the upload on failure.

        Args:
            at: Bucket and name of the object.
            key: Key of the object, for errors.
            view: Bytes of the object.
            deadline: Deadline of the call.
            holds: Function that returns whether the object exists with these bytes.

        Raises:
            StoreError: The server refused, or failed for too long.
        """
        for again in (True, False):
            try:
                with self._opened(at, key, deadline) as upload:
                    parts = self._send_parts(upload, key, view, deadline)
                    self._complete(upload, key, parts, deadline, holds)
            except StatusError:
                # Completed by an attempt without a response, or aborted by another client: the two
                # cannot be distinguished, and writing the object again is right for both.
                if not again:
                    raise deadline.error("its upload is cleared away while it goes on") from None
            else:
                return

    @contextmanager
    def _opened(self, at: dict[str, str], key: str, deadline: Deadline) -> Iterator[dict[str, str]]:
        """Start an upload; abort it unless it is completed."""

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
                    if sending[-1].done():  # ran already if there is no thread
                        sending[-1].result()
                return [each.result() for each in sending]
            finally:
                for each in sending:  # parts not yet started when one failed
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

        The time limit of retries begins with the first failure: the server needs time for a part
        before it responds, and gets as much once more.

        Raises:
            StatusError: Status 404: the upload does not exist.
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
            return  # its parts stay, invisible, until a lifecycle rule removes them
