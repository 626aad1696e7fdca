"""The one door to the API of the Hugging Face Hub: every request is counted, budgeted and retried.

Requests go through the session of ``huggingface_hub``, with its proxies and certificates, and with
its token: ``HF_TOKEN``, or the one that ``hf auth login`` saved. Its errors end here.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from deltachain.errors import (
    ConfigError,
    DeltaChainError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.store.budget import Budget

_TRY_S: Final = 20.0
"""Seconds that one try may wait for an answer."""

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 8.0

_SPENT: Final = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(?P<reset>\d+)")
"""In a RateLimit header: no requests left, and seconds until there are."""

_LOGIN: Final = "log in with `hf auth login`, or set HF_TOKEN"
_READ_ONLY: Final = (
    "a token with read access can follow but not publish; make one with write access to this "
    "bucket at https://huggingface.co/settings/tokens"
)
_RATE: Final = (
    "the rate limit of this token is used up: let fewer followers share it, give them tokens of "
    "their own, or poll less often"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Which bucket, where, and by whose leave.

    Attributes:
        endpoint: Of the Hub.
        bucket: Namespace and name.
        url: How messages name the store.
        token: None for the one that ``huggingface_hub`` finds.
    """

    endpoint: str
    bucket: str
    url: str
    token: str | None = field(repr=False)


class Deadline:
    """A moment by which something must have worked."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._at - time.monotonic()


def pause_s(tries: int) -> float:
    """How long to wait after so many tries failed: longer each time, and never in step."""
    most = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**tries)
    return random.uniform(most / 2, most)  # noqa: S311 - spreads load, hides nothing


class Hub:
    """Requests to the API of one bucket. Safe to use from any thread."""

    def __init__(self, place: Place, budget: Budget, *, deadline_s: float) -> None:
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
        self._lock = threading.Lock()
        self._requests = 0

    @property
    def requests(self) -> int:
        """Requests sent so far, each try of each call among them."""
        return self._requests

    def admit(self, deadline: Deadline, key: str = "") -> None:
        """Wait until the budget has room for one more request, and count it.

        Raises:
            StoreUnavailableError: It has none before the deadline.
        """
        wait_s = self._budget.take(deadline.left)
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
        """Count requests that a redirect took beyond the one that was admitted."""
        self._budget.charge(redirects)
        with self._lock:
            self._requests += redirects

    def call(
        self,
        method: str,
        route: str,
        *,
        key: str = "",
        body: bytes | None = None,
        media: str = "application/json",
    ) -> httpx.Response:
        """Send a request until it is answered: refusals by status are raised, others tried again.

        Every request has to be idempotent: an answer may be lost after the request was served.

        Args:
            method: Of HTTP.
            route: Behind the name of the bucket, or a whole URL as a listing names its next page.
            key: What errors name.
            body: What is sent.
            media: Type of that.

        Returns:
            A reply that is not an error, or has status 422, or 404 for an entry.

        Raises:
            ConfigError: There is no such bucket, or the Hub did not understand.
            StorePermissionError: The token does not allow it.
            StoreUnavailableError: Nothing worked before the deadline.
        """
        url = route if "://" in route else f"{self._root}/{route}"
        deadline = Deadline(self.deadline_s)
        tries = 0
        while True:
            self.admit(deadline, key)
            reply, trouble = self._send(method, url, body, media, deadline)
            wait_s, hint = pause_s(tries), ""
            if reply is not None:
                self._charge(len(reply.history))
                if reply.is_success or self._is_answer(reply):
                    return reply
                if not _may_pass(reply.status_code):
                    raise self._refusal(reply, key)
                trouble = _words(reply)
                if reply.status_code == 429:
                    wait_s, hint = max(wait_s, _told_to_wait(reply.headers)), _RATE
            if wait_s >= deadline.left:
                raise StoreUnavailableError(
                    f"{self.place.url}: {trouble}", key=key, url=self.place.url, hint=hint
                )
            time.sleep(wait_s)
            tries += 1

    def ask(self, url: str, token: str) -> tuple[int, Any]:
        """Ask the storage beside the Hub, once: a status and a document. Counted by nobody.

        Raises:
            StoreUnavailableError: It did not answer.
        """
        from huggingface_hub.utils import get_session  # noqa: PLC0415

        headers = {"Authorization": f"Bearer {token}"}
        timeout = min(_TRY_S, self.deadline_s)
        silent: tuple[type[Exception], ...] = (*_transport_errors(), RuntimeError, ValueError)
        try:
            reply = get_session().request("GET", url, headers=headers, timeout=timeout)
            return reply.status_code, reply.json()
        except silent as exc:
            raise StoreUnavailableError(
                f"{self.place.url}: {type(exc).__name__}: {exc}", url=self.place.url
            ) from exc

    @property
    def _root(self) -> str:
        return f"{self.place.endpoint}/api/buckets/{self.place.bucket}"

    def _send(
        self, method: str, url: str, body: bytes | None, media: str, deadline: Deadline
    ) -> tuple[httpx.Response | None, str]:
        """One try: a reply, or what went wrong."""
        from huggingface_hub.errors import OfflineModeIsEnabled  # noqa: PLC0415
        from huggingface_hub.utils import build_hf_headers, get_session  # noqa: PLC0415

        headers = build_hf_headers(token=self.place.token, library_name="deltachain")
        headers["Content-Type"] = media
        timeout = max(0.1, min(_TRY_S, deadline.left))
        try:
            session = get_session()
            reply: Any = session.request(
                method, url, content=body, headers=headers, timeout=timeout
            )
        except OfflineModeIsEnabled as exc:
            raise ConfigError(str(exc), hint="unset HF_HUB_OFFLINE") from exc
        except _transport_errors() as exc:
            return None, f"{type(exc).__name__}: {exc}"
        except RuntimeError as exc:
            # huggingface_hub closes the session of all threads when one of them can not connect.
            return None, str(exc)
        return reply, ""

    def _is_answer(self, reply: httpx.Response) -> bool:
        if reply.status_code == 404:
            return bool(reply.headers.get("X-Error-Code") == "EntryNotFound")
        return bool(reply.status_code == 422)

    def _refusal(self, reply: httpx.Response, key: str) -> DeltaChainError:
        """The error for an answer that trying again does not change."""
        url, words = self.place.url, _words(reply)
        if reply.status_code == 401:
            return StorePermissionError(f"{url}: {words}", key=key, url=url, hint=_LOGIN)
        if reply.status_code == 403:
            return StorePermissionError(f"{url}: {words}", key=key, url=url, hint=_READ_ONLY)
        if reply.status_code == 404:
            # Not ObjectNotFoundError: a chain that nobody has begun yet is something to wait for.
            return ConfigError(
                f"{url}: there is no bucket {self.place.bucket}, or the token may not see it",
                hint=f"make it: hf buckets create {self.place.bucket}",
            )
        return StoreError(f"{url}: {words}", key=key, url=url)


def _may_pass(status: int) -> bool:
    return status in (408, 429) or status >= 500


def _told_to_wait(headers: Mapping[str, str]) -> float:
    """Seconds that a reply asks to wait: by Retry-After, else by the limit that it tells of."""
    after = headers.get("Retry-After", "").strip()
    if after.isdigit():
        return float(after) + random.uniform(0.1, 0.6)  # noqa: S311
    limit = _SPENT.search(headers.get("RateLimit", ""))
    return float(limit["reset"]) + random.uniform(0.1, 0.6) if limit else 0.0  # noqa: S311


def _transport_errors() -> tuple[type[Exception], ...]:
    """What a request raises that got no answer: huggingface_hub left httpx for httpx2 with 2.0."""
    try:
        import httpx2  # noqa: PLC0415
    except ImportError:
        return (httpx.TransportError,)
    return (httpx.TransportError, httpx2.TransportError)


def _words(reply: httpx.Response) -> str:
    """What the Hub says, in its own words and never with the token in it."""
    said = reply.headers.get("X-Error-Message") or reply.reason_phrase
    return f"{reply.request.method} {reply.request.url.path}: {reply.status_code} {said}"


def parse_reply(reply: httpx.Response, url: str) -> Any:  # noqa: ANN401 - JSON
    """The document in a reply.

    Raises:
        StoreUnavailableError: It is none: a proxy or a portal answered in the Hub's place.
    """
    try:
        return reply.json()
    except ValueError as exc:
        raise StoreUnavailableError(f"{url}: the answer is not JSON", url=url) from exc
