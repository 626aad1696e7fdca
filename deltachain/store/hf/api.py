"""Client of the Hugging Face Hub's API: every request is counted, rate-limited and retried.

Requests go through the session of ``huggingface_hub``, with its proxies, certificates and token:
``HF_TOKEN``, or the one saved by ``hf auth login``. Its errors are converted here. Its own
functions for buckets are not used: they read a pinned object by a look-up of a path that may be
gone and a file on disk, upload and reveal together, and send requests that nobody counts.
"""

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deltachain import errors
from deltachain.redact import redacted_url
from deltachain.retry import Backoff, Deadline, shortly_after
from deltachain.store.base import MAX_DOCUMENT
from deltachain.store.calls import Calls, RetryError, within

_TRY_S: Final = 20.0  # seconds without a byte after which one attempt ends
_REDIRECTS: Final = 4  # largest number of requests in a chain of redirects, the first one included
PAUSES: Final = Backoff(0.5, 8.0, random_share=0.5)  # the Hub counts attempts: none follows at once

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
_NO_CONNECTION: Final = frozenset({"ConnectError", "ConnectTimeout"})  # of httpx and its successor

_ENDPOINT: Final = (
    "check host and port of the endpoint, the network, its proxy, and whether the server runs; it "
    "may be down for now"
)
_RATE: Final = (
    "the rate limit of this token is used up: let fewer followers share it, give them tokens of "
    "their own, or poll less often"
)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # headers by case-insensitive name
    words: str  # error message of the Hub, verbatim; never contains the token
    body: bytes
    following: str = ""  # URL of a listing's next page; empty on the last page

    def document(self) -> Any:  # noqa: ANN401 - JSON
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as exc:
            said = f"{self.words}: the answer is not JSON"
            raise RetryError(said, IN_BETWEEN, answered=True) from exc


@dataclass(slots=True, eq=False)
class Budget:
    """Limit of ``calls`` requests in any period of ``window_s`` seconds, over all threads.

    The period slides, so the limit holds in every fixed window of a server too.
    """

    calls: int
    window_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sent: deque[float] = field(default_factory=deque)

    def take(self, within_s: float) -> float:
        """Wait to count one more request; return the seconds until one is allowed if longer."""
        deadline = self.clock() + within_s
        while True:
            wait_s = self._try_take()
            if wait_s <= 0:
                return 0.0
            if self.clock() + wait_s > deadline:
                return wait_s
            self.sleep(wait_s)

    def charge(self, requests: int) -> None:
        """Count requests sent without ``take``; later requests wait for them."""
        with self._lock:
            self._sent.extend([self.clock()] * requests)

    def _try_take(self) -> float:
        """Count a request and return 0, or return the seconds until the oldest one expires."""
        with self._lock:
            now = self.clock()
            while self._sent and self._sent[0] + self.window_s <= now:
                self._sent.popleft()
            if len(self._sent) < self.calls:
                self._sent.append(now)
                return 0.0
            return self._sent[0] + self.window_s - now


@dataclass(frozen=True, slots=True)
class BucketLocation:
    endpoint: str
    bucket: str  # namespace and name of the bucket
    url: str  # URL of the store, for messages
    token: str | None = field(repr=False)  # None: huggingface_hub's own
    named_by: str = ""  # where the endpoint was given, for messages; empty for the Hub's own

    @property
    def endpoint_words(self) -> str:
        """The endpoint without credentials, and what names it if it is not the Hub's own."""
        return redacted_url(self.endpoint) + (self.named_by and f", the endpoint {self.named_by}")


class Hub:
    def __init__(self, place: BucketLocation, budget: Budget, *, deadline_s: float) -> None:
        try:
            import hf_xet  # noqa: PLC0415 - an extra
            import huggingface_hub.utils  # noqa: F401, PLC0415 - an extra, and takes a while
        except ImportError as exc:
            raise errors.ConfigError(
                "hf:// stores need huggingface_hub and hf-xet", hint="pip install 'deltachain[hf]'"
            ) from exc
        self.xet: Any = hf_xet
        self.place = place
        self.deadline_s = deadline_s
        self.calls: Final = Calls(place.url, PAUSES)
        self._budget = budget

    @property
    def root(self) -> str:
        return f"{self.place.endpoint}/api/buckets/{self.place.bucket}"

    def deadline(self, key: str = "", nbytes: int = 0) -> Deadline:
        return Deadline(key, self.place.url, self.deadline_s, nbytes)

    def admit(self, deadline: Deadline, key: str = "") -> None:
        wait_s = self._budget.take(deadline.left_s)
        if wait_s:
            raise errors.StoreUnavailableError(
                f"{self.place.url}: {self._budget.calls} requests in {self._budget.window_s:g} s "
                f"are spent; the next may leave in {wait_s:.0f} s",
                key=key,
                url=self.place.url,
                hint="try again then, or allow more by the option calls or DELTACHAIN_HF_CALLS",
            )

    def charge(self, requests: int) -> None:
        self._budget.charge(requests)

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
        """Send an idempotent request with retries.

        Returns a successful reply, of JSON type ``wanted``, or one with 422, or 404 of an entry.
        """
        from huggingface_hub.utils import build_hf_headers  # noqa: PLC0415

        url = route if "://" in route else f"{self.root}/{route}"
        headers = build_hf_headers(token=self.place.token, library_name="deltachain")
        headers["Content-Type"] = media
        deadline = self.deadline(key)

        def attempt() -> Reply:
            self.admit(deadline, key)
            self.calls.count()
            reply = self._send(method, url, body, headers)
            self.calls.hear(reply.headers.get("date"))
            self._check(reply, wanted, key)
            return reply

        return self.calls.repeat(attempt, deadline, key)

    def ask(self, url: str, token: str) -> tuple[int, Any]:
        """Send one request to the Xet storage, which the rate limit does not count."""
        headers = {"Authorization": f"Bearer {token}"}
        try:
            reply = within(lambda: self._send("GET", url, None, headers), self.deadline())
            return reply.status, reply.document()
        except (RetryError, TimeoutError) as exc:
            raise errors.StoreUnavailableError(
                f"{self.place.url}: {exc}", url=self.place.url
            ) from exc

    def _send(self, method: str, url: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        from huggingface_hub.errors import OfflineModeIsEnabled  # noqa: PLC0415
        from huggingface_hub.utils import get_session  # noqa: PLC0415

        try:
            session: Any = get_session()
            request = session.build_request(
                method,
                url,
                content=body,
                headers=headers | {"Accept-Encoding": "identity"},
                timeout=min(_TRY_S, self.deadline_s),
            )
            for redirects in range(_REDIRECTS):
                if redirects:
                    self.charge(1)
                    self.calls.count()
                response = session.send(request, stream=True, follow_redirects=False)
                try:
                    following = response.next_request
                    if following is None and not 300 <= response.status_code < 400:
                        return _reply(response)
                finally:
                    response.close()
                self._check_redirect(response.status_code, request.url, following)
                request = following
        except (RetryError, errors.DeltaChainError):
            raise
        except OfflineModeIsEnabled as exc:
            raise errors.ConfigError(str(exc), hint="unset HF_HUB_OFFLINE") from exc
        except Exception as exc:
            # No answer, or an unreadable one. Since 2.0, huggingface_hub uses another library than
            # httpx, and closes the session of all threads when one of them cannot connect.
            if type(exc).__name__ in _NO_CONNECTION:
                where = f"nothing answers at {self.place.endpoint_words}"
                raise RetryError(f"{_named(exc)}: {where}", _ENDPOINT) from exc
            raise RetryError(_named(exc)) from exc
        raise _redirected(response.status_code, "itself")

    def _check_redirect(self, status: int, url: Any, following: Any) -> None:  # noqa: ANN401 - of httpx
        """Raise unless a redirect repeats the request, with its body, at the same server."""
        if following is None:
            raise _redirected(status, "itself")
        where = following.url
        same = (where.scheme, where.host, where.port) == (url.scheme, url.host, url.port)
        if status not in (307, 308) or not same:
            host = f"{where.host}:{where.port}" if where.port else where.host
            raise _redirected(status, f"{where.scheme}://{host}")

    def _check(self, reply: Reply, wanted: type, key: str) -> None:
        if reply.status == 422 or (
            reply.status == 404 and reply.headers.get("X-Error-Code") == "EntryNotFound"
        ):
            return
        if 200 <= reply.status < 300:
            if not isinstance(reply.document(), wanted):
                said = f"{reply.words}: the answer is no {wanted.__name__}"
                raise RetryError(said, IN_BETWEEN, answered=True)
        elif reply.status == 429:
            wait_s = _told_to_wait(reply.headers)
            raise RetryError(reply.words, _RATE, wait_s=wait_s, answered=True)
        elif reply.status == 408 or reply.status >= 500:
            raise RetryError(reply.words, answered=True)
        else:
            raise self._refusal(reply, key)

    def _refusal(self, reply: Reply, key: str) -> errors.DeltaChainError:
        url, words = self.place.url, reply.words
        if reply.status in (401, 403):
            hint = _LOGIN if reply.status == 401 else _READ_ONLY
            return errors.StorePermissionError(f"{url}: {words}", key=key, url=url, hint=hint)
        if reply.status == 404:
            # Not ObjectNotFoundError: followers wait for a chain that does not exist yet.
            return errors.ConfigError(
                f"{url}: there is no bucket {self.place.bucket}, or the token may not see it",
                hint=f"make it: hf buckets create {self.place.bucket}",
            )
        return errors.StoreError(f"{url}: {words}", key=key, url=url)


def _reply(response: Any) -> Reply:  # noqa: ANN401 - of httpx or httpx2
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_DOCUMENT:
            raise RetryError(f"the answer has more than {MAX_DOCUMENT} bytes", answered=True)
    reason = response.headers.get("X-Error-Message") or response.reason_phrase
    return Reply(
        status=response.status_code,
        headers=response.headers,
        words=f"{response.request.method} {response.request.url.path}: "
        f"{response.status_code} {reason}",
        body=bytes(body),
        following=response.links.get("next", {}).get("url", ""),
    )


def _redirected(status: int, target: str) -> RetryError:
    return RetryError(
        f"answered by a redirect ({status})",
        f"the endpoint redirects to {target}: check HF_ENDPOINT or the option endpoint, its scheme "
        "too, and what is in between",
        answered=True,
    )


def _told_to_wait(headers: Mapping[str, str]) -> float:
    after = headers.get("Retry-After", "").strip()
    if after.isdigit():
        return shortly_after(float(after))
    limit = _SPENT.search(headers.get("RateLimit", ""))
    return shortly_after(float(limit["reset"])) if limit else 0.0


def _named(error: Exception) -> str:
    """Describe an error in one line; hide the token in an error about an invalid header."""
    words = str(error).partition("\n")[0]
    return type(error).__name__ if "Bearer" in words else f"{type(error).__name__}: {words}"
