"""Client of the Hugging Face Hub's API: every request is counted, rate-limited and retried.

Requests go through the session of ``huggingface_hub``, with its proxies, certificates and token:
``HF_TOKEN``, or the one saved by ``hf auth login``. Its errors are converted here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from deltachain.errors import (
    ConfigError,
    DeltaChainError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.redact import redacted_url
from deltachain.retry import Backoff, Deadline, shortly_after
from deltachain.store.clock import ServerClock
from deltachain.store.hf.rate_limit import Budget
from deltachain.store.hf.reply import (
    RedirectedError,
    Reply,
    ReplyError,
    Until,
    check_redirect,
    read_reply,
)
from deltachain.store.outage import Outage

_TRY_S: Final = 20.0
"""Timeout of one attempt, in seconds."""

_REDIRECTS: Final = 4
"""Largest number of requests in a chain of redirects, the first one included."""

PAUSES: Final = Backoff(0.5, 8.0, random_share=0.5)
"""Pauses between attempts: the Hub counts attempts, so none follows immediately."""

_SPENT: Final = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(?P<reset>\d+)")
"""Match in a RateLimit header: no requests left, and seconds until the reset."""

_LOGIN: Final = "log in with `hf auth login`, or set HF_TOKEN"
_READ_ONLY: Final = (
    "a token with read access can follow but not publish; make one with write access to this "
    "bucket at https://huggingface.co/settings/tokens"
)
IN_BETWEEN: Final = (
    "something between here and the Hub answers in its place: a portal, a proxy, a cache; check "
    "HF_ENDPOINT, or the option endpoint"
)
_NO_CONNECTION: Final = frozenset({"ConnectError", "ConnectTimeout"})
"""Errors of a request that reached no server, of httpx and of its successor."""

_ENDPOINT: Final = (
    "check host and port of the endpoint, the network, its proxy, and whether the server runs; it "
    "may be down for now"
)
_RATE: Final = (
    "the rate limit of this token is used up: let fewer followers share it, give them tokens of "
    "their own, or poll less often"
)


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """Address of a bucket, and the token for it.

    Attributes:
        endpoint: URL of the Hub.
        bucket: Namespace and name of the bucket.
        url: URL of the store, for messages.
        token: Access token; None for the default of ``huggingface_hub``.
        named_by: Where the endpoint was given, for messages; empty for the Hub's own.
    """

    endpoint: str
    bucket: str
    url: str
    token: str | None = field(repr=False)
    named_by: str = ""

    @property
    def endpoint_words(self) -> str:
        """The endpoint without credentials, and what names it if it is not the Hub's own."""
        return redacted_url(self.endpoint) + (self.named_by and f", the endpoint {self.named_by}")


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Reason to retry a request; empty if there is none."""

    said: str = ""
    hint: str = ""
    wait_s: float = 0.0
    cause: Exception | None = None


class Hub:
    """Client of the API of one bucket; thread-safe.

    Attributes:
        clock: Clock of the Hub.
    """

    def __init__(self, place: BucketLocation, budget: Budget, *, deadline_s: float) -> None:
        try:
            import huggingface_hub.utils  # noqa: F401, PLC0415 - an extra, and takes a while
        except ImportError as exc:
            raise ConfigError(
                "hf:// stores need huggingface_hub and hf-xet",
                hint="pip install 'deltachain[hf]'",
            ) from exc
        self.place = place
        self.deadline_s = deadline_s
        self._budget = budget
        self.clock: Final = ServerClock()
        self.outage: Final = Outage()
        self._lock = threading.Lock()
        self._requests = 0

    @property
    def requests(self) -> int:
        """Number of requests so far, retries included."""
        return self._requests

    def deadline(self, key: str = "") -> Deadline:
        """Begin the time limit of one call."""
        return Deadline(key, self.place.url, self.deadline_s)

    def admit(self, deadline: Deadline, key: str = "") -> None:
        """Wait until the rate limit allows one more request, and count it.

        Raises:
            StoreUnavailableError: The limit allows none before the deadline.
        """
        wait_s = self._budget.take(deadline.left_s)
        if wait_s:
            raise StoreUnavailableError(
                f"{self.place.url}: {self._budget.calls} requests in {self._budget.window_s:g} s "
                f"are spent; the next may leave in {wait_s:.0f} s",
                key=key,
                url=self.place.url,
                hint="try again then, or allow more by the option calls or DELTACHAIN_HF_CALLS",
            )
        with self._lock:
            self._requests += 1

    def _charge(self, redirects: int) -> None:
        """Count the requests of redirects beyond the admitted one."""
        self._budget.charge(redirects)
        with self._lock:
            self._requests += redirects

    def call(
        self,
        method: str,
        route: str,
        wanted: type,
        *,
        key: str = "",
        body: bytes | None = None,
        media: str = "application/json",
    ) -> Reply:
        """Send a request with retries; raise for an error status.

        Every request must be idempotent: a response may be lost after the request was served.

        Args:
            method: HTTP method.
            route: Path after the bucket's name, or the full URL of a listing's next page.
            wanted: Expected JSON type of a successful response, ``dict`` or ``list``. Any other
                document comes from a proxy or a captive portal.
            key: Key of the object, for errors.
            body: Body of the request.
            media: Media type of the body.

        Returns:
            A successful reply, one with status 422, or one with 404 for an entry.

        Raises:
            ConfigError: The bucket does not exist, or the Hub rejected the request as invalid.
            StorePermissionError: The token does not permit the request.
            StoreUnavailableError: No attempt succeeded before the deadline.
        """
        url = route if "://" in route else f"{self.root}/{route}"
        deadline, began = self.deadline(key), time.monotonic()
        tries = 0
        before = _Trouble()
        while True:
            self.admit(deadline, key)
            sent = time.monotonic()
            reply, trouble = self._try(method, url, body, media, deadline)
            if reply is None and before.said and deadline.left_s <= 0:
                # The limit of this call cut it off: the failure before says more.
                trouble = before
            if reply is None:
                self.outage.unanswered(sent)
            else:
                self.outage.answered()
            if reply is not None and not trouble.said:
                self.clock.hear(reply.headers.get("date"))
                trouble = self._judge(reply, wanted, key)
                if not trouble.said:
                    return reply
            self.outage.report(f"{self.place.url}: {trouble.said}", began, deadline.left_s)
            pause_s = max(PAUSES.pause_s(tries), trouble.wait_s)
            if self.outage.is_lost(began) or not deadline.sleep(pause_s):
                raise StoreUnavailableError(
                    f"{self.place.url}: {trouble.said}",
                    key=key,
                    url=self.place.url,
                    hint=trouble.hint,
                ) from trouble.cause
            tries += 1
            before = trouble

    def ask(self, url: str, token: str) -> tuple[int, Any]:
        """Send one request to the Xet storage; return its status and document.

        The request does not count towards the rate limit.

        Raises:
            StoreUnavailableError: The storage did not answer.
        """
        headers = {"Authorization": f"Bearer {token}"}
        try:
            reply = self._send("GET", url, None, headers, min(_TRY_S, self.deadline_s))
            return reply.status, reply.document()
        except Exception as exc:  # see _try
            raise StoreUnavailableError(
                f"{self.place.url}: {_named(exc)}", url=self.place.url
            ) from exc

    @property
    def root(self) -> str:
        """URL of the bucket's routes."""
        return f"{self.place.endpoint}/api/buckets/{self.place.bucket}"

    def _try(
        self, method: str, url: str, body: bytes | None, media: str, deadline: Deadline
    ) -> tuple[Reply | None, _Trouble]:
        """Send a request once; return the reply, or the reason to retry."""
        from huggingface_hub.errors import OfflineModeIsEnabled  # noqa: PLC0415
        from huggingface_hub.utils import build_hf_headers  # noqa: PLC0415

        headers = build_hf_headers(token=self.place.token, library_name="deltachain")
        headers["Content-Type"] = media
        try:
            timeout_s = max(0.1, min(_TRY_S, deadline.left_s))
            return self._send(method, url, body, headers, timeout_s), _Trouble()
        except OfflineModeIsEnabled as exc:
            raise ConfigError(str(exc), hint="unset HF_HUB_OFFLINE") from exc
        except RedirectedError as exc:
            return None, _Trouble(str(exc), hint=exc.hint, cause=exc)
        except Exception as exc:  # noqa: BLE001
            # No answer, or an unreadable one. Since 2.0, huggingface_hub uses another library than
            # httpx, and closes the session of all threads when one of them cannot connect.
            if type(exc).__name__ in _NO_CONNECTION:
                where = f"nothing answers at {self.place.endpoint_words}"
                return None, _Trouble(f"{_named(exc)}: {where}", hint=_ENDPOINT, cause=exc)
            return None, _Trouble(_named(exc), cause=exc)

    def _send(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> Reply:
        """Send a request; follow redirects to other paths of the same server.

        Raises:
            RedirectedError: The request is redirected to another server, or too often.
        """
        from huggingface_hub.utils import get_session  # noqa: PLC0415

        session: Any = get_session()
        until = Until(timeout_s)
        # Not a number: see Until. Connecting has a plain timeout, as it reads no bytes.
        timeouts = {"connect": timeout_s, "pool": timeout_s, "read": until, "write": until}
        request = session.build_request(
            method,
            url,
            content=body,
            headers=headers | {"Accept-Encoding": "identity"},
            extensions={"timeout": timeouts},
        )
        for _ in range(_REDIRECTS):
            with closing(session.send(request, stream=True, follow_redirects=False)) as response:
                following = response.next_request
                if following is None and not 300 <= response.status_code < 400:
                    return read_reply(response, until)
            check_redirect(response)
            self._charge(1)
            request = following
        raise RedirectedError(response.status_code, "")

    def _judge(self, reply: Reply, wanted: type, key: str) -> _Trouble:
        """Find a reason to retry in a reply; empty if it is a valid answer.

        Raises:
            DeltaChainError: A retry would not help.
        """
        if self._is_answer(reply):
            return _Trouble()
        if 200 <= reply.status < 300:
            try:
                document = reply.document()
            except ReplyError as exc:
                return _Trouble(f"{reply.words}: {exc}", hint=IN_BETWEEN, cause=exc)
            if isinstance(document, wanted):
                return _Trouble()
            return _Trouble(f"{reply.words}: the answer is no {wanted.__name__}", hint=IN_BETWEEN)
        if not _may_pass(reply.status):
            raise self._refusal(reply, key)
        if reply.status == 429:
            return _Trouble(reply.words, hint=_RATE, wait_s=told_to_wait(reply.headers))
        return _Trouble(reply.words)

    def _is_answer(self, reply: Reply) -> bool:
        if reply.status == 404:
            return reply.headers.get("X-Error-Code") == "EntryNotFound"
        return reply.status == 422

    def _refusal(self, reply: Reply, key: str) -> DeltaChainError:
        """Build the error for a reply that a retry would not change."""
        url, words = self.place.url, reply.words
        if reply.status == 401:
            return StorePermissionError(f"{url}: {words}", key=key, url=url, hint=_LOGIN)
        if reply.status == 403:
            return StorePermissionError(f"{url}: {words}", key=key, url=url, hint=_READ_ONLY)
        if reply.status == 404:
            # Not ObjectNotFoundError: followers wait for a chain that does not exist yet.
            return ConfigError(
                f"{url}: there is no bucket {self.place.bucket}, or the token may not see it",
                hint=f"make it: hf buckets create {self.place.bucket}",
            )
        return StoreError(f"{url}: {words}", key=key, url=url)


def _may_pass(status: int) -> bool:
    return status in (408, 429) or status >= 500


def told_to_wait(headers: Mapping[str, str]) -> float:
    """Return the seconds to wait by Retry-After, else by the RateLimit header."""
    after = headers.get("Retry-After", "").strip()
    if after.isdigit():
        return shortly_after(float(after))
    limit = _SPENT.search(headers.get("RateLimit", ""))
    return shortly_after(float(limit["reset"])) if limit else 0.0


def _named(error: Exception) -> str:
    """Describe an error in one line; hide the token in an error about an invalid header."""
    words = str(error).partition("\n")[0]
    return type(error).__name__ if "Bearer" in words else f"{type(error).__name__}: {words}"


def parse_reply(reply: Reply, url: str) -> Any:  # noqa: ANN401 - JSON
    """Return the document in a reply.

    Raises:
        StoreUnavailableError: It is not JSON: a proxy or a captive portal answered instead.
    """
    try:
        return reply.document()
    except ReplyError as exc:
        raise StoreUnavailableError(f"{url}: {exc}", url=url, hint=IN_BETWEEN) from exc
