"""Failures of requests to an S3 server: which may pass, and what to do about the others."""

import os
import re
from typing import Any, Final
from urllib.parse import urlsplit

from botocore import exceptions

from deltachain.errors import ConfigError, StorePermissionError, StoreUnavailableError
from deltachain.store.calls import RetryError

_RETRIED_STATUS: Final = frozenset({408, 429, 500, 502, 503, 504})
_CONFLICT: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_RETRIED_CODE: Final = _CONFLICT | {
    "InternalError",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
_FULL: Final = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_CREDENTIALS: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_NO_CONNECTION: Final = (exceptions.ConnectTimeoutError, exceptions.EndpointConnectionError)
_BROKEN: Final = (
    exceptions.ConnectionError,
    exceptions.HTTPClientError,
    exceptions.IncompleteReadError,
)
_NO_CREDENTIALS: Final = (
    exceptions.CredentialRetrievalError,
    exceptions.NoAuthTokenError,
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.SSOError,
    exceptions.TokenRetrievalError,
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
_HINT_REDIRECT: Final = (
    "the endpoint redirects to {}: check the endpoint URL, its scheme too, and what is in between"
)
_HINT_BETWEEN: Final = (
    "something between here and the server answers in its place: a portal, a proxy, a cache"
)

_REGION: Final = re.compile(r"[a-z]{2}[a-z0-9-]{1,30}")
_HOST: Final = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")


def answered_by(reason: str, hint: str = _HINT_BETWEEN) -> RetryError:
    """Return the error for an answer that is cut, or does not come from the server."""
    return RetryError(f"answered by {reason}", hint, answered=True)


def whole(reply: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Return an answer that has all given fields.

    A portal that answers 200 to a write names no ETag; a head that was cut lacks its last fields.
    """
    missing = [field for field in fields if field not in reply]
    if missing:
        raise answered_by(f"an answer without {', '.join(missing)}")
    return reply


def refuse_redirect(response: dict[str, Any]) -> None:
    """Refuse a redirect without the name of a region.

    For a bucket in another region, S3 names the region, and botocore asks there once. Without that
    name, botocore looks the bucket up by a request that is redirected too, until it runs out of
    stack: 82 requests of 1.44.
    """
    status, headers = response["status_code"], response["headers"]
    if 300 <= status < 400 and not _region(headers):
        try:
            parts = urlsplit(str(headers.get("location", "")))
        except ValueError:
            parts = urlsplit("")
        known = parts.scheme in ("http", "https") and _HOST.fullmatch(parts.netloc)
        where = f"{parts.scheme}://{parts.netloc}" if known else "elsewhere"
        raise answered_by(f"a redirect ({status})", _HINT_REDIRECT.format(where))


def _region(headers: Any) -> str:  # noqa: ANN401 - botocore has several
    said = str(headers.get("x-amz-bucket-region", ""))
    return said if _REGION.fullmatch(said) else ""


def status_of(failure: Exception) -> int:
    """Return the HTTP status of the answer; 0 without an answer."""
    if isinstance(failure, exceptions.ClientError):
        return int(failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def code_of(failure: Exception) -> str:
    """Return the S3 error code; without an answer, the kind of failure."""
    if isinstance(failure, exceptions.ClientError):
        return str(failure.response.get("Error", {}).get("Code", ""))
    return type(failure).__name__


def wrote_nothing(failure: Exception) -> bool:
    """Return whether a write that failed has surely not been done."""
    return code_of(failure) in _CONFLICT or 400 <= status_of(failure) < 500


def typed(failure: Exception, key: str, url: str) -> Exception:
    """Return what to raise for a failed request: ``RetryError`` if another attempt may succeed.

    It names only the error's code: messages of the server or of boto3 may contain parts of a
    request, and so credentials. An answer that cannot be parsed may pass, whatever its parser
    raised.
    """
    status, code = status_of(failure), code_of(failure)
    if (again := _retry(failure)) is not None:
        return again
    said = f"{status} {code}" if status else code
    message = f"object {key!r} in {url}: {said}" if key else f"{url}: {said}"
    if code == "NoSuchBucket":
        return no_bucket(url)
    if (about_rights := _refused(failure)) is not None:
        return StorePermissionError(message, key=key, url=url, hint=about_rights)
    if (hint := _unavailable(failure)) is not None:
        return StoreUnavailableError(message, key=key, url=url, hint=hint)
    return ConfigError(message, hint="the server does not take such a request: see its log")


def _retry(failure: Exception) -> RetryError | None:
    """Return the reason to send a request again; ``None`` if that would not help."""
    status, code = status_of(failure), code_of(failure)
    if isinstance(failure, exceptions.ClientError):
        passes = code not in _FULL and (code in _RETRIED_CODE or status in _RETRIED_STATUS)
        return RetryError(f"{status} {code}", answered=True) if passes else None
    if isinstance(failure, _NO_CONNECTION):
        where = urlsplit(failure.kwargs.get("endpoint_url", ""))
        origin = f"{where.scheme}://{where.netloc.rpartition('@')[2]}"
        named = _named_by(where.hostname or "")
        return RetryError(f"{code}: nothing answers at {origin}{named}", _HINT_ENDPOINT)
    if isinstance(failure, TimeoutError):  # of our own deadline
        return RetryError(f"{code}: {failure}")
    lasts = exceptions.BotoCoreError | RecursionError | MemoryError
    broken = isinstance(failure, _BROKEN) and not isinstance(failure, exceptions.SSLError)
    return None if isinstance(failure, lasts) and not broken else RetryError(code)


def _refused(failure: Exception) -> str | None:
    """Return the hint about credentials; ``None`` for other failures."""
    if isinstance(failure, _NO_CREDENTIALS):
        return _HINT_CREDENTIALS
    code = code_of(failure)
    if code in _FULL or (status_of(failure) not in (401, 403) and code not in _CREDENTIALS):
        return None
    return _HINT_CLOCK if code == "RequestTimeTooSkewed" else _HINT_REFUSED


def _unavailable(failure: Exception) -> str | None:
    """Return the hint for a failure that needs a person; ``None`` for a wrong request."""
    if code_of(failure) in _FULL or status_of(failure) == 507:
        return _HINT_FULL
    if isinstance(failure, exceptions.ClientError) and 300 <= status_of(failure) < 400:
        headers = failure.response["ResponseMetadata"].get("HTTPHeaders", {})
        return _HINT_REGION.format(_region(headers) or "that its answers name")
    if isinstance(failure, exceptions.SSLError):
        return _HINT_CA
    return "" if isinstance(failure, RecursionError | MemoryError) else None


def _named_by(host: str) -> str:
    """Return what names an endpoint, if it is not AWS's own."""
    if is_aws(host):
        return ""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        named = urlsplit(os.environ.get(name, "")).hostname
        if named and (host == named or host.endswith(f".{named}")):
            return f", the endpoint in {name}"
    return ", the endpoint of the option endpoint_url or of the profile"


def is_aws(host: str) -> bool:
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def no_bucket(url: str) -> ConfigError:
    return ConfigError(
        f"the bucket of {url} does not exist",
        hint=f"create it (aws s3 mb s3://{url.split('/')[2]}), or correct the URL, the endpoint or "
        "the region",
    )
