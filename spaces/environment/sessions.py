"""Open games, and the limits of those who play them."""

import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from game import Game, play, secret_of

LIMIT: Final = 256
"""Limit of open sessions of one client."""

TOTAL: Final = 16 * LIMIT
"""Limit of open sessions of all clients."""

IDLE_S: Final = 300.0
"""Idle seconds after which a session may be dropped."""


class Refusal(Exception):  # noqa: N818 - an answer, not a failure
    def __init__(self, status: int, message: str, hint: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.hint = hint
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Session:
    game: Game
    used: float
    client: str


class Sessions:
    """Open games; thread-safe."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words = tuple(words)
        self._known = frozenset(words)
        self.idle_s = idle_s
        self._clock = clock
        self._lock = Lock()
        self._open: OrderedDict[str, _Session] = OrderedDict()  # the longest unused one first
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, seed: int | None, client: str = "") -> str:
        """Start a game and return its session id."""
        secret = secret_of(secrets.randbits(64) if seed is None else seed, self._words)
        name = secrets.token_urlsafe(16)
        with self._lock:
            now = self._clock()
            self._make_place(client, now)
            self._open[name] = _Session(Game(hidden=secret), now, client)
            self._counts[client] += 1
        return name

    def guess(self, name: str, word: str) -> tuple[Game, str]:
        with self._lock:
            session = self._find(name)
            session.used = self._clock()
            self._open.move_to_end(name)
            if session.game.done:
                raise Refusal(409, "this game is done", "open another session")
            session.game, observation = play(session.game, word, self._known)
            return session.game, observation

    def close(self, name: str) -> None:
        with self._lock:
            self._find(name)
            self._drop(name)

    def _find(self, name: str) -> _Session:
        found = self._open.get(name)
        if found is None:
            hint = f"open one; who is idle for {self.idle_s:g} s may lose theirs"
            raise Refusal(404, "there is no such session", hint)
        return found

    def _drop(self, name: str) -> None:
        client = self._open.pop(name).client
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]

    def _make_place(self, client: str, now: float) -> None:
        if self._counts[client] >= LIMIT:
            self._drop_idle(client, now, f"{LIMIT} sessions of yours are open")
        if len(self._open) < TOTAL:
            return
        most, count = self._counts.most_common(1)[0]
        if count > self._counts[client] + 1:
            self._drop(self._oldest(most))
        else:
            self._drop_idle("", now, f"{TOTAL} sessions are open")

    def _oldest(self, client: str) -> str:
        return next(n for n, one in self._open.items() if client in ("", one.client))

    def _drop_idle(self, client: str, now: float, message: str) -> None:
        oldest = self._oldest(client)
        wait_s = self._open[oldest].used + self.idle_s - now
        if wait_s >= 0:
            raise Refusal(
                429,
                message,
                "delete those that are done, or try again later",
                retry_after_s=max(1, math.ceil(wait_s)),
            )
        self._drop(oldest)
