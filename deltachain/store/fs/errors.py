"""Conversion of fsspec's errors and metadata to those of deltachain.

Most file systems raise an ``OSError``. Some pass on errors of the library below them; such classes
are looked up in the loaded modules, because none of these libraries needs to be installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
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
    return StoreUnavailableError(message, key=key, url=url)


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
