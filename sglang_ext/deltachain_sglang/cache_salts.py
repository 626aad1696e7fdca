"""Prefix caches by version: in pause mode ``in_place``, no request reads those of earlier weights.

SGLang finds cached keys and values by tokens and ``cache_salt``. Each swap brings a new salt, for
requests that are queued later or have not started. Running requests keep theirs.
"""

from collections.abc import Callable
from typing import Any, Final

from . import compat

MARK: Final = "deltachain:"  # start of our salts, which a caller's own follows


def renew(scheduler: Any, salt: str) -> None:
    """Give requests that have not started a new salt, which was never used."""
    scheduler.deltachain_salt = salt
    for request in scheduler.waiting_queue:
        _salt(scheduler, request)


def salt_requests() -> None:
    compat.hook(compat.QUEUED, _on_queued)


def _on_queued(original: Callable[..., Any], scheduler: Any, request: Any, *rest: Any) -> Any:
    """Wrap the addition of a request, also of one that starts again, to the queue."""
    _salt(scheduler, request)
    return original(scheduler, request, *rest)


def _salt(scheduler: Any, request: Any) -> None:
    salt = getattr(scheduler, "deltachain_salt", "")
    if salt:
        given = request.cache_salt or ""
        if given.startswith(MARK):
            given = given.partition("/")[2]
        request.cache_salt = f"{MARK}{salt}/{given}"
