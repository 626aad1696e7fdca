"""Large objects in parts, several at a time, each part repeated by itself."""

from __future__ import annotations

import time
from typing import Any, Final

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from deltachain.store.retry import Deadline, jitter
from deltachain.store.s3_body import Upload
from deltachain.store.s3_client import Client
from deltachain.store.s3_errors import code_of, given_up, is_transient

PART_NBYTES: Final = 16 << 20
"""Bytes of one part, and of the largest object that is put by one request."""

_THREADS: Final = 8
_ABORTS: Final = 3
"""Attempts to abort an upload: it is given up already, and its caller waits."""

_BEGAN: Final = "deltachain_began"

_CONFIG: Final = TransferConfig(
    multipart_threshold=PART_NBYTES,
    multipart_chunksize=PART_NBYTES,
    max_concurrency=_THREADS,
    preferred_transfer_client="classic",  # the other one knows neither our retries nor our counts
)


class Uploader:
    """Sends large objects through s3transfer.

    Its threads call the client by themselves, so their requests are repeated by a hook of the
    client: each while it fails for reasons that pass, for ``stall_s``.

    Args:
        client: A client that does not repeat requests itself.
        stall_s: Seconds for which one part may fail.
    """

    def __init__(self, client: Client, stall_s: float) -> None:
        self._client = client
        self._stall_s = stall_s
        for operation in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"):
            client.meta.events.register(f"needs-retry.s3.{operation}", self._delay)
        client.meta.events.register("needs-retry.s3.AbortMultipartUpload", self._abort_delay)

    def upload(self, bucket: str, name: str, view: memoryview, deadline: Deadline) -> None:
        """Write an object; visible once its last part is there, or aborted.

        Raises:
            ClientError: The server refused, or failed for too long.
            BotoCoreError: It was not reached for too long.
            StoreUnavailableError: It took too long.
        """
        for again in (True, False):
            try:
                self._client.upload_fileobj(
                    Upload(view, deadline),
                    bucket,
                    name,
                    Config=_CONFIG,
                    Callback=lambda _: deadline.moved(),
                )
            except ClientError as exc:
                # Completed by an attempt that went unanswered, or cleared away by others: both can
                # not be told apart, and writing the object again is right for both.
                if not again or code_of(exc) != "NoSuchUpload":
                    raise
            else:
                return

    def _delay(
        self,
        *,
        attempts: int,
        response: tuple[object, dict[str, Any]] | None,
        caught_exception: Exception | None,
        request_dict: dict[str, Any],
        **_: object,
    ) -> float | None:
        """Seconds until a request of an upload is repeated; None if it is not."""
        if not _is_transient(response, caught_exception):
            return None
        began = request_dict["context"].setdefault(_BEGAN, time.monotonic())
        left = began + self._stall_s - time.monotonic()
        return min(jitter(attempts - 1), left) if left > 0 else None

    def _abort_delay(
        self,
        *,
        attempts: int,
        response: tuple[object, dict[str, Any]] | None,
        caught_exception: Exception | None,
        **_: object,
    ) -> float | None:
        if attempts < _ABORTS and _is_transient(response, caught_exception):
            return jitter(attempts - 1)
        return None


def _is_transient(response: tuple[object, dict[str, Any]] | None, caught: Exception | None) -> bool:
    """Whether what one attempt ended with is worth another one."""
    if response is not None:
        parsed: Any = response[1]
        return "Error" in parsed and is_transient(ClientError(parsed, "upload"))
    return caught is not None and given_up(caught) is None and is_transient(caught)
