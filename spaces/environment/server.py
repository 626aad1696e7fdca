"""HTTP server of the game, for the concurrent players of a batch of rollouts.

``python server.py --host 127.0.0.1 --port 7860 --words FILE``
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException

from clients import client_of, no_page_of_others
from connections import limited
from game import LENGTH, PROMPT, TURNS
from openenv_routes import add_openenv
from sessions import IDLE_S, LIMIT, Refusal, Sessions

LARGEST: Final = 4096

WORDS: Final = Path(__file__).with_name("words.txt")

_Body = TypeVar("_Body", bound=BaseModel)


class Opening(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    seed: int | None = None


class Guess(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    word: str


def make_app(sessions: Sessions, *, proxies: int = 0) -> FastAPI:
    """Create the app, with routes of its own and those of OpenEnv.

    Args:
        sessions: The open games.
        proxies: Number of trusted proxies that append to ``X-Forwarded-For``.
    """
    app = FastAPI(title="words", openapi_url=None, dependencies=[Depends(no_page_of_others)])
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

    add_openenv(app, sessions, proxies=proxies, largest=LARGEST)
    return app


async def _body(request: Request, kind: type[_Body], example: str) -> _Body:
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
    words = file.read_text(encoding="utf-8").split()
    if not words:
        raise ValueError(f"{file} has no words")
    for word in words:
        if not (len(word) == LENGTH and word.isascii() and word.isalpha() and word.islower()):
            raise ValueError(f"{file} has {word!r}, which is not {LENGTH} lowercase letters")
    return words


def main(arguments: Sequence[str] | None = None) -> int:
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
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        proxy_headers=False,
        ws_max_size=LARGEST,
        http=limited(),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
