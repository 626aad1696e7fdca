"""Rate limits: counts of requests by token."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

from tests.support.hub.settings import Settings

_BUCKET_ROUTE: Final = re.compile(r"/api/buckets/[^/]+/[^/]+/(?P<route>[a-z-]+)")


def route_of(path: str) -> str:
    if path.startswith("/buckets/"):
        return "resolve"
    if path.startswith("/s3/"):
        return "s3"
    if not path.startswith("/api/"):
        return ""
    match = _BUCKET_ROUTE.match(path)
    return match["route"] if match else path.split("/")[2]


@dataclass(slots=True)
class _Window:
    began: float
    used: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    allowed: bool
    headers: dict[str, str]
    retry_after: int


class Limits:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, str], _Window] = {}
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def count(self, token: str, method: str, route: str, settings: Settings) -> Allowance:
        kind = "resolvers" if route == "resolve" else "api"
        most = settings.resolver_calls if route == "resolve" else settings.calls
        now = time.monotonic()
        with self._lock:
            self._counts[token][f"{method} {route}"] += 1
            window = self._windows.setdefault((token, kind), _Window(now))
            if now >= window.began + settings.window_s:
                window.began, window.used = now, 0
            allowed = window.used < most
            window.used += allowed
            if not allowed:
                self._counts[token]["refused"] += 1
            left = math.ceil(window.began + settings.window_s - now)
            remaining = most - window.used
        span = math.ceil(settings.window_s)
        headers = {
            "RateLimit": f'"{kind}";r={max(0, remaining)};t={left}',
            "RateLimit-Policy": f'"fixed window";"{kind}";q={most};w={span}',
        }
        return Allowance(allowed, headers, left)

    def counts(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return {token: dict(counted) for token, counted in self._counts.items()}

    def restart(self) -> None:
        with self._lock:
            self._windows.clear()
