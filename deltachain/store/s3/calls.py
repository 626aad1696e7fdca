"""Requests to an S3 server, in bounded time and with retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from deltachain.errors import DeltaChainError
from deltachain.retry import Deadline
from deltachain.store.bounds import bounded
from deltachain.store.clock import ServerClock
from deltachain.store.outage import Outage
from deltachain.store.s3.client import Client
from deltachain.store.s3.errors import code_of, is_answer, is_transient, status_of, typed
from deltachain.store.s3.replies import AnswerError, redirects, target_of

_T = TypeVar("_T")

_body: Final[ContextVar[Any]] = ContextVar("deltachain_s3_body", default=None)
"""Response body of the thread's current request."""

_REDIRECT: Final = (
    "the endpoint redirects to {}: check the endpoint URL, its scheme too, and what is in between"
)


class StatusError(Exception):
    """An HTTP status handled by the caller."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Calls:
    """Sender of a client's requests, with retries; thread-safe.

    Args:
        client: Client without retries of its own.
        url: URL of the store, for errors.

    Attributes:
        clock: Clock of the server.
        outage: Whether it answers.
    """

    def __init__(self, client: Client, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._requests = 0
        self.clock: Final = ServerClock()
        self.outage: Final = Outage()
        client.meta.events.register("before-send.s3", self._count)
        client.meta.events.register("before-parse.s3", self._hear)
        refuse_redirects(client)

    @property
    def requests(self) -> int:
        """Number of HTTP requests so far, retries included."""
        return self._requests

    def repeat(
        self,
        call: Callable[[], _T],
        deadline: Deadline,
        key: str,
        *answers: int,
        nbytes: int = 0,
    ) -> _T:
        """Send one request; retry after transient failures.

        Args:
            call: Function that sends the request.
            deadline: Deadline of the call.
            key: Key of the object, for errors.
            answers: Statuses handled by the caller.
            nbytes: Size of the object in the response, in bytes.

        Raises:
            StatusError: The status is one of ``answers``.
        """
        attempt, began = 0, time.monotonic()
        answer: Exception | None = None
        while True:
            try:
                return self._once(call, deadline, nbytes)
            except DeltaChainError:
                raise
            except Exception as exc:  # a response may cause any error in its parser
                if status_of(exc) in answers and code_of(exc) != "NoSuchBucket":
                    raise StatusError(status_of(exc)) from exc
                if is_answer(exc):
                    answer = exc.with_traceback(None)  # a reference cycle with this frame otherwise
                is_lost = self.outage.is_lost(began)
                if is_lost or not is_transient(exc) or not deadline.pause(attempt):
                    # A timeout of the last attempt says less than the response before it.
                    raise typed(answer or exc, key, self._url) from (answer or exc)
                attempt += 1
                error = typed(answer or exc, "", self._url)
                self.outage.report(error.args[0], began, deadline.left_s)

    def _once(self, call: Callable[[], _T], deadline: Deadline, nbytes: int) -> _T:
        """Send one request, and record whether it was answered."""
        sent = time.monotonic()
        try:
            found = once(call, deadline, nbytes=nbytes)
        except Exception as exc:
            if is_answer(exc):
                self.outage.answered()
            else:
                self.outage.unanswered(sent)
            raise
        self.outage.answered()
        return found

    def _count(self, **_: object) -> None:
        with self._lock:
            self._requests += 1

    def _hear(self, *, response_dict: dict[str, Any], **_: object) -> None:
        self.outage.is_known = True
        self.clock.hear(response_dict["headers"].get("date"))


def once(call: Callable[[], _T], deadline: Deadline, *, nbytes: int = 0) -> _T:
    """Send one request, which ends by the deadline whatever the server does."""
    token = _body.set(None)
    with bounded(deadline, nbytes):
        try:
            return call()
        except Exception:
            # The body of a response that botocore cannot parse has no other owner to close it.
            body: Any = _body.get()
            if hasattr(body, "close"):
                body.close()
            raise
        finally:
            _body.reset(token)


def refuse_redirects(client: Client) -> None:
    """Make redirected requests of a client fail with an ``AnswerError``."""
    client.meta.events.register("before-parse.s3", _see_answer)


def _see_answer(*, response_dict: dict[str, Any], **_: object) -> None:
    """Fail a redirected request before botocore follows the redirect.

    Raises:
        AnswerError: The response is a redirect.
    """
    _body.set(response_dict.get("body"))
    if redirects(response_dict):
        where = target_of(str(response_dict["headers"].get("location", "")))
        raise AnswerError(f"a redirect ({response_dict['status_code']})", _REDIRECT.format(where))
