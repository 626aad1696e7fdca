"""Baseline of an S3 store: boto3 alone, moving the same bytes the fastest documented way."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import urlsplit

PIECE: Final = 16 << 20
THREADS: Final = 8


class BareS3:
    """One bucket through boto3, configured by the environment."""

    def __init__(self, url: str) -> None:
        import boto3  # noqa: PLC0415 - an extra
        from boto3.s3.transfer import TransferConfig  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        plain: Any = "when_required"
        config = Config(
            max_pool_connections=2 * THREADS,
            request_checksum_calculation=plain,
            response_checksum_validation=plain,
        )
        self._client: Any = boto3.client("s3", config=config)
        self._transfer = TransferConfig(
            multipart_threshold=PIECE, multipart_chunksize=PIECE, max_concurrency=THREADS
        )

    def put(self, key: str, data: bytes) -> None:
        body = io.BytesIO(data)
        self._client.upload_fileobj(body, self._bucket, self._at(key), Config=self._transfer)

    def get(self, key: str, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)

        def get_piece(start: int) -> None:
            stop = min(start + PIECE, nbytes)
            wanted = f"bytes={start}-{stop - 1}"
            reply = self._client.get_object(Bucket=self._bucket, Key=self._at(key), Range=wanted)
            raw = reply["Body"]._raw_stream
            while start < stop:
                count = raw.readinto(view[start:stop])
                if not count:
                    raise EOFError(f"{key}: ends at byte {start} of {stop}")
                start += count

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(get_piece, range(0, nbytes, PIECE)))
        return buffer

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key
