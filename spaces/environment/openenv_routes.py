"""The game as an environment of OpenEnv 0.3: ``/ws``, ``/health``, ``/metadata``, ``/schema``.

The routes are ours, not those of ``openenv-core``: its server brings gradio and an MCP server, and
does not start with Starlette 1.
"""

import asyncio
import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clients import client_of
from game import LENGTH, PROMPT, TURNS
from sessions import Refusal, Sessions

CAPACITY: Final = "CAPACITY_REACHED"
EXECUTION: Final = "EXECUTION_ERROR"
INVALID_JSON: Final = "INVALID_JSON"
UNKNOWN_TYPE: Final = "UNKNOWN_TYPE"
VALIDATION: Final = "VALIDATION_ERROR"


class WordAction(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    word: str = Field(description=f"The guess, {LENGTH} letters")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Ignored")


class WordObservation(BaseModel):
    message: str = Field(description="Feedback on the last guess, and the prompt of the next one")
    turns_left: int = Field(description="Number of remaining guesses")


class WordState(BaseModel):
    episode_id: str | None = Field(default=None, description="Name of the episode")
    step_count: int = Field(default=0, description="Number of guesses")


class WordReset(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    seed: int | None = None
    episode_id: str | None = Field(default=None, max_length=255)


class RefusedMessageError(Exception):
    """Error reply to a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def add_openenv(app: FastAPI, sessions: Sessions, *, proxies: int, largest: int) -> None:
    """Add the routes of OpenEnv."""

    @app.websocket("/ws")
    async def play(socket: WebSocket) -> None:
        await socket.accept()
        episode = Episode(sessions, client_of(socket, proxies))
        try:
            while (raw := await _text_of(socket, sessions.idle_s)) is not None:
                answer = _answer(episode, raw, largest)
                if answer is None:
                    await socket.close()
                    return
                await socket.send_json(answer)
        except WebSocketDisconnect:
            pass  # while it was answered
        finally:
            episode.end()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/metadata")
    async def metadata() -> dict[str, str]:
        text = f"Guess a word of {LENGTH} letters in {TURNS} turns, with feedback on each letter."
        return {"name": "words", "description": text, "version": "1"}

    @app.get("/schema")
    async def schema() -> dict[str, dict[str, Any]]:
        return {
            "action": WordAction.model_json_schema(),
            "observation": WordObservation.model_json_schema(),
            "state": WordState.model_json_schema(),
        }


@dataclass(slots=True)
class Episode:
    sessions: Sessions
    client: str
    session: str = ""
    state: WordState = field(default_factory=WordState)

    def reset(self, asked: WordReset) -> dict[str, Any]:
        self.end()
        self.session = self.sessions.open(asked.seed, self.client)
        self.state = WordState(episode_id=asked.episode_id or secrets.token_urlsafe(8))
        return _observed(WordObservation(message=PROMPT, turns_left=TURNS), None, done=False)

    def step(self, action: WordAction) -> dict[str, Any]:
        if not self.session:
            raise RefusedMessageError(EXECUTION, "no game has begun: send a reset first")
        game, message = self.sessions.guess(self.session, action.word)
        self.state = self.state.model_copy(update={"step_count": self.state.step_count + 1})
        seen = WordObservation(message=message, turns_left=game.turns_left)
        return _observed(seen, game.reward, done=game.done)

    def end(self) -> None:
        if self.session:
            with suppress(Refusal):  # it was dropped since it was idle
                self.sessions.close(self.session)
        self.session = ""


async def _text_of(socket: WebSocket, idle_s: float) -> str | None:
    try:
        event = await asyncio.wait_for(socket.receive(), idle_s)
    except TimeoutError:
        await socket.close()
        return None
    return None if event["type"] == "websocket.disconnect" else event.get("text") or ""


def _answer(episode: Episode, raw: str, largest: int) -> dict[str, Any] | None:
    try:
        return _reply(episode, raw, largest)
    except RefusedMessageError as exc:
        return _error(exc.code, str(exc))
    except Refusal as exc:
        code = CAPACITY if exc.status == 429 else EXECUTION
        return _error(code, f"{exc}: {exc.hint}")
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "data"
        return _error(VALIDATION, f"{place}: {first['msg']}")


def _reply(episode: Episode, raw: str, largest: int) -> dict[str, Any] | None:
    if len(raw) > largest:
        raise RefusedMessageError(VALIDATION, f"the message has more than {largest} characters")
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise RefusedMessageError(INVALID_JSON, f"the message is not JSON: {exc}") from exc
    if not isinstance(message, dict):
        raise RefusedMessageError(VALIDATION, "the message is not an object")
    data = message.get("data", {})
    match message.get("type"):
        case "reset":
            return _message("observation", episode.reset(WordReset.model_validate(data)))
        case "step":
            return _message("observation", episode.step(WordAction.model_validate(data)))
        case "state":
            return _message("state", episode.state.model_dump())
        case "close":
            return None
        case _:
            raise RefusedMessageError(UNKNOWN_TYPE, "the type is reset, step, state or close")


def _observed(seen: WordObservation, reward: float | None, *, done: bool) -> dict[str, Any]:
    return {"observation": seen.model_dump(), "reward": reward, "done": done}


def _message(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "data": data}


def _error(code: str, message: str) -> dict[str, Any]:
    return _message("error", {"message": message, "code": code})
