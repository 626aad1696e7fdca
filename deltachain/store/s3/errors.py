"""From boto3's errors to those of deltachain."""

from __future__ import annotations

from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - its name
    CredentialRetrievalError,
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
_HINT_FULL: Final = "the server is full, or the quota is used up: free some space, then try again"
_HINT_REGION: Final = "the bucket is in the region {}: set AWS_REGION or the store option region"


def status_of(failure: Exception) -> int:
    """The HTTP status of the server's answer; 0 where it gave none."""
    if isinstance(failure, ClientError):
        return int(failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def code_of(failure: Exception) -> str:
    """What S3 calls the error; for a lost answer, what kind of failure it was."""
    if isinstance(failure, ClientError):
        return str(failure.response.get("Error", {}).get("Code", ""))
    return type(failure).__name__


def is_answer(failure: Exception) -> bool:
    """Whether somebody answered the request."""
    return isinstance(failure, ClientError | AnswerError)


def is_conflict(failure: Exception) -> bool:
    """Whether another write of the same key was under way: nothing was written, try again."""
    return code_of(failure) in _CONFLICT


def given_up(failure: Exception) -> StoreUnavailableError | None:
    """Our own error, where a request was ended by it and boto3 wrapped it as a failure to send."""
    error = failure.kwargs.get("error") if isinstance(failure, HTTPClientError) else None
    return error if isinstance(error, StoreUnavailableError) else None


def is_transient(failure: Exception) -> bool:
    """Whether the same request may well succeed a moment later.

    So may one whose answer was read by no parser, whatever it raised.
    """
    if isinstance(failure, ClientError):
        if code_of(failure) in _FULL:
            return False
        known = code_of(failure) in _RETRIED_CODE or is_conflict(failure)
        return known or status_of(failure) in _RETRIED_STATUS
    if given_up(failure) or isinstance(failure, SSLError):
        return False  # a certificate does not get better
    if isinstance(failure, BotoCoreError):
        return isinstance(failure, ConnectionError | HTTPClientError | IncompleteReadError)
    return not isinstance(failure, RecursionError | MemoryError)


def typed(failure: Exception, key: str, url: str) -> DeltaChainError:
    """Build the error of deltachain that says what to do now.

    Nothing that the server or boto3 wrote is repeated but the name of the error: it may hold parts
    of a request, and so of its credentials.
    """
    ours = given_up(failure)
    if ours is not None:
        return ours
    status, code = status_of(failure), code_of(failure)
    answer = f"{status} {code}" if status else code
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


def _refused(failure: Exception) -> str:
    """What to do about the credentials; empty where they are not what is wrong."""
    if isinstance(failure, _NO_CREDENTIALS):
        return _HINT_CREDENTIALS
    code = code_of(failure)
    if code in _FULL or (status_of(failure) not in (401, 403) and code not in _CREDENTIALS):
        return ""
    return _HINT_CLOCK if code == "RequestTimeTooSkewed" else _HINT_REFUSED


def _unavailable(failure: Exception) -> str | None:
    """What to do where the server cannot do it now; None where it never will."""
    if isinstance(failure, AnswerError):
        return failure.hint
    if code_of(failure) in _FULL or status_of(failure) == 507:
        return _HINT_FULL
    if isinstance(failure, ClientError) and 300 <= status_of(failure) < 400:
        headers = failure.response["ResponseMetadata"].get("HTTPHeaders", {})
        return _HINT_REGION.format(region_of(headers) or "that its answers name")
    if isinstance(failure, SSLError):
        return "check the server's certificate: see AWS_CA_BUNDLE"
    foreseen = isinstance(failure, ClientError | BotoCoreError)
    return "" if is_transient(failure) or not foreseen else None


def no_bucket(url: str) -> ConfigError:
    """Build the error for a bucket that does not exist."""
    return ConfigError(
        f"the bucket of {url} does not exist",
        hint=f"create it (aws s3 mb s3://{url.split('/')[2]}), or correct the URL, the endpoint or "
        "the region",
    )
