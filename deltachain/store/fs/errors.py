"""Conversion of fsspec's errors and metadata to those of deltachain.

Most file systems raise an ``OSError``. Some pass on errors of the library below them; such classes
are looked up in the loaded modules, because none of these libraries needs to be installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from socket import gaierror
from typing import Any, Final

from deltachain.errors import StoreError, StorePermissionError, StoreUnavailableError

_FOREIGN: Final = (
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("gcsfs.retry", "ChecksumError"),
    ("gcsfs.retry", "HttpError"),
    ("google.api_core.exceptions", "GoogleAPIError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("paramiko.ssh_exception", "SSHException"),
    ("smbprotocol.exceptions", "SMBException"),
)
_REFUSALS: Final = frozenset({"AuthenticationException", "DefaultCredentialsError"})
_BUSY: Final = frozenset({408, 425, 429})
_NO_HOST: Final = "there is no such host, or no name server: check the host in the URL"
_CODES: Final = ("status_code", "status", "code")
_TIMES: Final = ("mtime", "last_modified", "LastModified", "updated", "modified", "created")
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s]*@|\?[^\s'\"]*")


def failures() -> tuple[type[BaseException], ...]:
    """Return all error classes by which the loaded file systems report storage failures."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _FOREIGN)
    return (OSError, *(kind for kind in found if kind is not None))


def store_error(error: BaseException, key: str, url: str) -> StoreError:
    """Build the error for a failure, access denied or unavailable, without credentials in it."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    words = _CREDENTIALS.sub("", str(words).partition("\n")[0])
    message = f"object {key!r} in {url}: {words}" if key else f"{url}: {words}"
    if _is_refusal(error):
        return StorePermissionError(message, key=key, url=url)
    hint = _NO_HOST if isinstance(getattr(error, "os_error", error), gaierror) else ""
    return StoreUnavailableError(message, key=key, url=url, hint=hint)


def unanswered(absence: BaseException) -> BaseException | None:
    """Return the failure that a file system took for an absent object; ``None`` if it is absent.

    fsspec's HTTP raises ``FileNotFoundError`` for whatever fails, from the failure itself. Servers
    that answer 403 for what is absent are believed.
    """
    cause, kinds = absence.__cause__, failures()
    while cause is not None and (
        isinstance(cause, FileNotFoundError) or not isinstance(cause, kinds)
    ):
        cause = cause.__cause__
    status = getattr(cause, "status", None)
    is_answer = isinstance(status, int) and 400 <= status < 500 and status not in _BUSY
    return None if is_answer else cause


def _is_refusal(error: BaseException) -> bool:
    codes = {str(getattr(error, name, "")) for name in _CODES}
    return (
        isinstance(error, PermissionError)
        or type(error).__name__ in _REFUSALS
        or not codes.isdisjoint({"401", "403"})
        or str(error).startswith("Forbidden: ")  # the only sign of a 403 from gcsfs
    )


def modified(info: Mapping[str, Any]) -> float | None:
    """Return the time of an object's write, from any field and format that fsspec uses."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value) if isinstance(value, int | float) else None
