"""Conditional writes to a bucket through the Hub's S3 gateway.

Only ``put_if_absent`` uses the gateway, since it routes every byte through one region.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from deltachain.errors import (
    ConfigError,
    DeltaChainError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.store.base import already_exists
from deltachain.store.hf.api import PAUSES, Hub

_TRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class GatewayKey:
    """Access key and endpoint of the gateway."""

    endpoint: str
    key_id: str
    secret: str = field(repr=False)


class Maybe(Exception):  # noqa: N818
    """The object exists; an earlier attempt of the same call may have written it."""


class Gateway:
    """Conditional writes to one bucket; thread-safe."""

    def __init__(self, hub: Hub, key: GatewayKey) -> None:
        try:
            import boto3  # noqa: PLC0415 - an extra
            import botocore.config  # noqa: PLC0415
        except ImportError as exc:
            raise ConfigError(
                "the S3 gateway of the Hub needs boto3", hint="pip install 'deltachain[s3]'"
            ) from exc
        from deltachain.store.s3.calls import refuse_redirects  # noqa: PLC0415 - needs boto3
        from deltachain.store.s3.client import bound_sockets, tls_arguments  # noqa: PLC0415

        timeout = min(_TRY_S, hub.deadline_s)
        verify, config = tls_arguments()
        self._hub = hub
        self._bucket = hub.place.bucket.partition("/")[2]
        self._client: Any = boto3.session.Session().client(
            "s3",
            endpoint_url=key.endpoint,
            aws_access_key_id=key.key_id,
            aws_secret_access_key=key.secret,
            region_name="us-east-1",
            **verify,
            config=config.merge(
                botocore.config.Config(
                    # One attempt only: the caller must know whether an attempt is a retry.
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    connect_timeout=timeout,
                    read_timeout=timeout,
                    s3={"addressing_style": "path"},
                    # The gateway does not support checksums in trailers, the newer default.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                )
            ),
        )
        bound_sockets(self._client)
        refuse_redirects(self._client)

    def put_if_absent(self, path: str, data: bytes, *, key: str) -> None:
        """Write an object if the path has none; exactly one of all concurrent callers returns.

        Raises:
            AlreadyExistsError: Another call wrote an object there.
            Maybe: The object exists, possibly written by this call; only a read can tell.
            StorePermissionError: The access key does not permit the write.
            StoreUnavailableError: No attempt succeeded before the deadline.
        """
        from deltachain.store.s3.calls import once, status_of, whole  # noqa: PLC0415 - an extra

        def put() -> None:
            at = {"Bucket": self._bucket, "Key": path}
            whole(self._client.put_object(**at, Body=data, IfNoneMatch="*"), "ETag")

        deadline, tries, unsure = self._hub.deadline(key), 0, False
        while True:
            self._hub.admit(deadline, key)
            try:
                once(put, deadline)
            except Exception as exc:
                status = status_of(exc)  # 0 without an answer of the gateway
                if status == 412:
                    raise (Maybe() if unsure else already_exists(key, self._hub.place.url)) from exc
                if 400 <= status < 500 and status not in (408, 409, 429):
                    raise self._refusal(status, exc, key) from exc
                trouble = exc
                unsure = unsure or not 400 <= status < 500
            else:
                return
            if not deadline.sleep(PAUSES.pause_s(tries)):
                url = self._hub.place.url
                raise StoreUnavailableError(
                    f"{url}: S3 gateway: {trouble}", key=key, url=url
                ) from trouble
            tries += 1

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _refusal(self, status: int, exc: Exception, key: str) -> DeltaChainError:
        url = self._hub.place.url
        message = f"{url}: S3 gateway: {exc}"
        if status in (401, 403):
            hint = "check HF_S3_ACCESS_KEY_ID and HF_S3_SECRET_ACCESS_KEY, and what they may do"
            return StorePermissionError(message, key=key, url=url, hint=hint)
        return ConfigError(message, hint="check the bucket and the option s3_endpoint")
