"""Requests to an S3 server, one at a time: in bounded time, repeated while that may help."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from deltachain.errors import DeltaChainError
from deltachain.retry import Deadline
from deltachain.store.bounds import bounded
from deltachain.store.s3.client import Client
from deltachain.store.s3.errors import code_of, is_answer, is_transient, status_of, typed
from deltachain.store.s3.replies import AnswerError, redirects, target_of

_T = TypeVar("_T")

_body: Final[ContextVar[Any]] = ContextVar("deltachain_s3_body", default=None)
"""That of the answer to the request which this thread has under way."""

_REDIRECT: Final = (
    "the endpoint redirects to {}: check the endpoint URL, its scheme too, and what is in between"
)


class StatusError(Exception):
    """A status that the caller handles."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Calls:
    """Sends requests of a client, with retries; thread-safe.

    Args:
        client: A client that does not repeat requests itself.
        url: How errors name the store.
    """

    def __init__(self, client: Client, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._requests = 0
        client.meta.events.register("before-send.s3", self._count)
        refuse_redirects(client)

    @property
    def requests(self) -> int:
        """Every HTTP request that was sent, those that were repeated too."""
        return self._requests

    def repeat(
        self,
        call: Callable[[], _T],
        deadline: Deadline,
        key: str,
        *answers: int,
        nbytes: int = 0,
    ) -> _T:
        """Send one request, again and again while it fails for reasons that pass.

        Args:
            call: Sends it.
            deadline: When to give up.
            key: The object that it is about.
            answers: Statuses that the caller wants to be told of.
            nbytes: Bytes of the object that the answer brings.

        Raises:
            StatusError: The status is one of ``answers``.
        """
        attempt = 0
        answer: Exception | None = None
        while True:
            try:
                return once(call, deadline, nbytes=nbytes)
            except DeltaChainError:
                raise
            except Exception as exc:  # what an answer makes of its parser is not foreseeable
                if status_of(exc) in answers and code_of(exc) != "NoSuchBucket":
                    raise StatusError(status_of(exc)) from exc
                if is_answer(exc):
                    answer = exc.with_traceback(None)  # which would hold this frame, and so itself
                if not is_transient(exc) or not deadline.pause(attempt):
                    # That the last attempt came too late says less than the answer before it.
                    raise typed(answer or exc, key, self._url) from (answer or exc)
                attempt += 1

    def _count(self, **_: object) -> None:
        with self._lock:
            self._requests += 1


def once(call: Callable[[], _T], deadline: Deadline, *, nbytes: int = 0) -> _T:
    """Send one request, which ends with the deadline whatever the server does."""
    token = _body.set(None)
    with bounded(deadline, nbytes):
        try:
            return call()
        except Exception:
            # Of an answer that botocore cannot parse nobody else has the body to close.
            body: Any = _body.get()
            if hasattr(body, "close"):
                body.close()
            raise
        finally:
            _body.reset(token)


def refuse_redirects(client: Client) -> None:
    """Let requests of a client that are redirected end with an ``AnswerError``."""
    client.meta.events.register("before-parse.s3", _see_answer)


def _see_answer(*, response_dict: dict[str, Any], **_: object) -> None:
    """End a request that is redirected, before botocore goes after it.

    Raises:
        AnswerError: It is.
    """
    _body.set(response_dict.get("body"))
    if redirects(response_dict):
        where = target_of(str(response_dict["headers"].get("location", "")))
        raise AnswerError(f"a redirect ({response_dict['status_code']})", _REDIRECT.format(where))
