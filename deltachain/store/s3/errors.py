"""Conversion of boto3's errors to those of deltachain."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - its name
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)

from deltachain.errors import (
    ConfigError,
    DeltaChainError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.store.s3.replies import AnswerError, region_of

_RETRIED_STATUS: Final = frozenset({408, 429, 500, 502, 503, 504})
_RETRIED_CODE: Final = frozenset(
    {
        "InternalError",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
    }
)
_CONFLICT: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_FULL: Final = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_CREDENTIALS: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})

_NO_CONNECTION: Final = (ConnectTimeoutError, EndpointConnectionError)
_NO_CREDENTIALS: Final = (
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)

_HINT_CREDENTIALS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give the store options "
    "key and secret, or profile"
)
_HINT_REFUSED: Final = (
    "check the credentials and what they may do at this URL; AWS refuses to say that an object is "
    "absent to those who may not list the bucket (s3:ListBucket)"
)
_HINT_CLOCK: Final = "set the clock of this machine: the server refuses signatures of another time"
_HINT_CA: Final = (
    "name the certificate of the CA that signed the server's in SSL_CERT_FILE or AWS_CA_BUNDLE"
)
_HINT_ENDPOINT: Final = (
    "check host and port of the endpoint, and whether the server runs; it may be down for now"
)
_HINT_FULL: Final = "the server is full, or the quota is used up: free some space, then try again"
_HINT_REGION: Final = "the bucket is in the region {}: set AWS_REGION or the store option region"


def status_of(failure: Exception) -> int:
    """Return the HTTP status of the response; 0 without a response."""
    if isinstance(failure, ClientError):
        return int(failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def code_of(failure: Exception) -> str:
    """Return the S3 error code; without a response, the kind of failure."""
    if isinstance(failure, ClientError):
        return str(failure.response.get("Error", {}).get("Code", ""))
    return type(failure).__name__


def is_answer(failure: Exception) -> bool:
    """Return whether the request got a response."""
    return isinstance(failure, ClientError | AnswerError)


def is_conflict(failure: Exception) -> bool:
    """Return whether a concurrent write of the key caused the failure: none was done, retry."""
    return code_of(failure) in _CONFLICT


def given_up(failure: Exception) -> StoreUnavailableError | None:
    """Return our own error if it ended the request and boto3 wrapped it as a send failure."""
    error = failure.kwargs.get("error") if isinstance(failure, HTTPClientError) else None
    return error if isinstance(error, StoreUnavailableError) else None


def is_transient(failure: Exception) -> bool:
    """Return whether a retry of the request may succeed.

    An unparsable response counts as transient, whatever its parser raised.
    """
    if isinstance(failure, ClientError):
        if code_of(failure) in _FULL:
            return False
        known = code_of(failure) in _RETRIED_CODE or is_conflict(failure)
        return known or status_of(failure) in _RETRIED_STATUS
    if given_up(failure) or isinstance(failure, SSLError):
        return False  # an invalid certificate stays invalid
    if isinstance(failure, BotoCoreError):
        return isinstance(failure, ConnectionError | HTTPClientError | IncompleteReadError)
    return not isinstance(failure, RecursionError | MemoryError)


def typed(failure: Exception, key: str, url: str) -> DeltaChainError:
    """Convert a failure to an error of deltachain, with a hint.

    It repeats only the error's code: messages of the server or boto3 may contain parts of a
    request, and so credentials.
    """
    ours = given_up(failure)
    if ours is not None:
        return ours
    status, code = status_of(failure), code_of(failure)
    answer = f"{status} {code}" if status else code
    if isinstance(failure, _NO_CONNECTION):
        where = failure.kwargs.get("endpoint_url", "")
        answer += f": nothing answers at {_origin(where)}{_said_by(where)}"
    if isinstance(failure, AnswerError):
        answer = f"answered by {failure.reason}"
    message = f"object {key!r} in {url}: {answer}" if key else f"{url}: {answer}"
    refused = _refused(failure)
    if refused:
        return StorePermissionError(message, key=key, url=url, hint=refused)
    if code == "NoSuchBucket":
        return no_bucket(url)
    hint = _unavailable(failure)
    if hint is not None:
        return StoreUnavailableError(message, key=key, url=url, hint=hint)
    return ConfigError(message, hint="the server does not take such a request: see its log")


def _origin(url: str) -> str:
    """Return scheme, host and port: the rest names an object, and may hold a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _said_by(url: str) -> str:
    """Return what names the endpoint of a URL, if it is not AWS's own."""
    host = urlsplit(url).hostname or ""
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return ""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        named = urlsplit(os.environ.get(name, "")).hostname
        if named and (host == named or host.endswith(f".{named}")):
            return f", the endpoint in {name}"
    return ", the endpoint of the option endpoint_url or of the profile"


def _refused(failure: Exception) -> str:
    """Return the hint about credentials; empty for other failures."""
    if isinstance(failure, _NO_CREDENTIALS):
        return _HINT_CREDENTIALS
    code = code_of(failure)
    if code in _FULL or (status_of(failure) not in (401, 403) and code not in _CREDENTIALS):
        return ""
    return _HINT_CLOCK if code == "RequestTimeTooSkewed" else _HINT_REFUSED


def _unavailable(failure: Exception) -> str | None:
    """Return the hint for a temporary failure; None for a permanent one."""
    if isinstance(failure, AnswerError):
        return failure.hint
    if code_of(failure) in _FULL or status_of(failure) == 507:
        return _HINT_FULL
    if isinstance(failure, ClientError) and 300 <= status_of(failure) < 400:
        headers = failure.response["ResponseMetadata"].get("HTTPHeaders", {})
        return _HINT_REGION.format(region_of(headers) or "that its answers name")
    if isinstance(failure, SSLError):
        return _HINT_CA
    if isinstance(failure, _NO_CONNECTION):
        return _HINT_ENDPOINT
    foreseen = isinstance(failure, ClientError | BotoCoreError)
    return "" if is_transient(failure) or not foreseen else None


def no_bucket(url: str) -> ConfigError:
    """Build the error for an absent bucket."""
    return ConfigError(
        f"the bucket of {url} does not exist",
        hint=f"create it (aws s3 mb s3://{url.split('/')[2]}), or correct the URL, the endpoint or "
        "the region",
    )
