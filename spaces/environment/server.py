"""HTTP server of the game, for the concurrent players of a batch of rollouts.

``python server.py --host 127.0.0.1 --port 7860 --words FILE``
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import secrets
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException

from game import LENGTH, PROMPT, TURNS, Game, play, secret_of

LIMIT: Final = 256
"""Limit of open sessions of one client."""

TOTAL: Final = 16 * LIMIT
"""Limit of open sessions of all clients."""

IDLE_S: Final = 300.0
"""Idle seconds after which a session may be dropped."""

LARGEST: Final = 4096
"""Size limit of a request body, in bytes."""

WORDS: Final = Path(__file__).with_name("words.txt")

_Body = TypeVar("_Body", bound=BaseModel)


class Opening(BaseModel):
    """Request to open a session."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: int | None = None


class Guess(BaseModel):
    """Request to make a guess."""

    model_config = ConfigDict(extra="forbid", strict=True)

    word: str


class Refusal(Exception):  # noqa: N818 - an answer, not a failure
    """Error reply to a request.

    Args:
        status: HTTP status code.
        message: The error message.
        hint: The action that resolves the error.
        retry_after_s: Seconds until a retry may succeed; 0 if unknown.
    """

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
    """Open games; thread-safe.

    Args:
        words: Valid words and possible secrets.
        idle_s: Idle seconds after which a session may be replaced.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words = tuple(words)
        self._known = frozenset(words)
        self._idle_s = idle_s
        self._clock = clock
        self._lock = Lock()
        self._open: OrderedDict[str, _Session] = OrderedDict()  # the longest unused one first
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, seed: int | None, client: str = "") -> str:
        """Start a game and return its session id.

        Args:
            seed: Seed of the word.
            client: Address of the client.

        Raises:
            Refusal: 429 if the client has too many open sessions.
        """
        secret = secret_of(secrets.randbits(64) if seed is None else seed, self._words)
        name = secrets.token_urlsafe(16)
        with self._lock:
            now = self._clock()
            self._make_place(client, now)
            self._open[name] = _Session(Game(hidden=secret), now, client)
            self._counts[client] += 1
        return name

    def guess(self, name: str, word: str) -> tuple[Game, str]:
        """Make a guess; return the state after it, and the message to the player.

        Raises:
            Refusal: 404 for an unknown session; 409 if its game is over.
        """
        with self._lock:
            session = self._find(name)
            session.used = self._clock()
            self._open.move_to_end(name)
            if session.game.done:
                raise Refusal(409, "this game is done", "open another session")
            session.game, observation = play(session.game, word, self._known)
            return session.game, observation

    def close(self, name: str) -> None:
        """Close a session.

        Raises:
            Refusal: 404 for an unknown session.
        """
        with self._lock:
            self._find(name)
            self._drop(name)

    def _find(self, name: str) -> _Session:
        found = self._open.get(name)
        if found is None:
            hint = f"open one; who is idle for {self._idle_s:g} s may lose theirs"
            raise Refusal(404, "there is no such session", hint)
        return found

    def _drop(self, name: str) -> None:
        client = self._open.pop(name).client
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]

    def _make_place(self, client: str, now: float) -> None:
        """Drop an idle session to make room for a new one, or refuse it.

        A client has at most ``LIMIT`` sessions. When all ``TOTAL`` are open, the client with the
        most loses an idle one to a client with fewer.
        """
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
        """Return the session that was idle the longest, of one client or of all."""
        return next(n for n, one in self._open.items() if client in ("", one.client))

    def _drop_idle(self, client: str, now: float, message: str) -> None:
        oldest = self._oldest(client)
        wait_s = self._open[oldest].used + self._idle_s - now
        if wait_s >= 0:
            raise Refusal(
                429,
                message,
                "delete those that are done, or try again later",
                retry_after_s=max(1, math.ceil(wait_s)),
            )
        self._drop(oldest)


def make_app(sessions: Sessions, *, proxies: int = 0) -> FastAPI:
    """Create the app.

    Args:
        sessions: The open games.
        proxies: Number of trusted proxies that append to ``X-Forwarded-For``.
    """
    app = FastAPI(title="words", openapi_url=None, dependencies=[Depends(_no_page_of_others)])
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _no_route)

    @app.post("/sessions", status_code=201)
    async def begin(request: Request) -> dict[str, str | int]:
        opening = await _body(request, Opening, '{"seed": 7} or {"seed": null}')
        name = sessions.open(opening.seed, client_of(request, proxies))
        return {"session": name, "observation": PROMPT, "turns_left": TURNS}

    @app.post("/sessions/{session}/guess")
    async def guess(session: str, request: Request) -> dict[str, str | float | bool | int]:
        asked = await _body(request, Guess, '{"word": "crane"}')
        game, observation = sessions.guess(session, asked.word)
        return {
            "observation": observation,
            "reward": game.reward,
            "done": game.done,
            "turns_left": game.turns_left,
        }

    @app.delete("/sessions/{session}", status_code=204)
    async def end(session: str) -> Response:
        sessions.close(session)
        return Response(status_code=204)

    @app.get("/healthz")
    async def healthz() -> dict[str, int]:
        return {"sessions": len(sessions), "limit": LIMIT}

    return app


def client_of(request: Request, proxies: int) -> str:
    """Return the client's address, or its /64 network for IPv6.

    Args:
        request: The request.
        proxies: Number of trusted proxies; earlier entries of the header are untrusted.
    """
    peer = request.client.host if request.client else ""
    if proxies:
        said = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
        peer = said[-proxies].strip() if len(said) >= proxies else peer
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer[:64] or "nobody"
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    prefix = 64 if address.version == 6 else 32
    return str(ipaddress.ip_network((address, prefix), strict=False))


async def _no_page_of_others(request: Request) -> None:
    """Refuse requests of other sites' pages, which any site can send through a user's browser."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise Refusal(403, "a page of another site asks", "ask from a program, or a page of ours")


async def _body(request: Request, kind: type[_Body], example: str) -> _Body:
    """Read and parse a request body up to the size limit."""
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > LARGEST:
            raise Refusal(413, f"the body has more than {LARGEST} bytes", f"send {example}")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refusal(422, f"{place}: {first['msg']}", f"send {example}") from exc


async def _refused(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, Refusal)  # noqa: S101 - registered for this class only
    return _error(exc.status, exc.message, exc.hint, exc.retry_after_s)


async def _no_route(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)  # noqa: S101 - as above
    return _error(exc.status_code, str(exc.detail), "README.md has the routes")


def _error(status: int, message: str, hint: str, retry_after_s: int = 0) -> Response:
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else None
    return JSONResponse({"error": {"message": message, "hint": hint}}, status, headers)


def read_words(file: Path) -> list[str]:
    """Read a file with one word a line.

    Raises:
        ValueError: The file is empty, or has an invalid line.
    """
    words = file.read_text(encoding="utf-8").split()
    if not words:
        raise ValueError(f"{file} has no words")
    for word in words:
        if not (len(word) == LENGTH and word.isascii() and word.isalpha() and word.islower()):
            raise ValueError(f"{file} has {word!r}, which is not {LENGTH} lowercase letters")
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return the exit status."""
    parser = argparse.ArgumentParser(description="A game of guessing words, over HTTP.")
    parser.add_argument("--host", default="0.0.0.0", help="default: all")  # noqa: S104
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--words", type=Path, default=WORDS, help="a word a line")
    parser.add_argument(
        "--proxies", type=int, default=0, metavar="N", help="before this server; default: none"
    )
    parser.add_argument("--idle", type=float, default=IDLE_S, metavar="S", help="default: 300")
    given = parser.parse_args(arguments)
    try:
        words = read_words(given.words)
    except (OSError, ValueError) as exc:
        sys.stderr.write(f"error  {exc}\nhint   --words takes a file with a word a line\n")
        return 2
    app = make_app(Sessions(words, idle_s=given.idle), proxies=max(0, given.proxies))
    host, port = given.host, given.port
    uvicorn.run(app, host=host, port=port, log_level="warning", proxy_headers=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
