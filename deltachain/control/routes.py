"""The routes of a replica: what a fleet's engineer and a trainer ask of it, whatever its engine.

A request names versions of the one chain that the server was started with, never addresses.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deltachain.errors import (
    ApplyError,
    ChainError,
    ConfigError,
    DeltaChainError,
    FormatError,
    StoreError,
)
from deltachain.subscribe.engine import Engine
from deltachain.subscribe.leader import Leader
from deltachain.subscribe.settings import ReplicaSettings

logger = logging.getLogger(__name__)

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

LARGEST: Final = 4096
"""Bytes of a request's body."""

AT_ONCE: Final = 4
"""Requests of one kind that are worked on at once."""

LOOK_S: Final = 0.5
"""Seconds between two looks whether somebody still waits for an answer."""

Kind: TypeAlias = Literal["update", "rollback", "quick"]

_T = TypeVar("_T")


class VersionRequest(BaseModel):
    """Which version; the head, or the one before, when none is named."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Annotated[int | None, Field(ge=0, lt=1 << 53)] = None


class Control:
    """The leader behind the routes, and who may use them.

    Attributes:
        leader: ``None`` where the server follows no chain.
        refusal: Why not.
    """

    def __init__(self, leader: Leader | None, refusal: str, *, token: str, is_open: bool) -> None:
        self.leader = leader
        self.refusal = refusal
        self._token = token.encode()
        self._is_open = is_open
        self._free = {kind: asyncio.Semaphore(AT_ONCE) for kind in get_args(Kind)}

    def authorise(self, request: Request) -> None:
        """Refuse who does not know the token.

        Raises:
            HTTPException: 401, or 403 where the server has neither token nor key.
        """
        if not self._token:
            if not self._is_open:
                raise HTTPException(403, "set DELTACHAIN_TOKEN or --api-key to use these routes")
            return
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-deltachain-token", bearer)
        if not hmac.compare_digest(given.encode(), self._token):
            raise HTTPException(401, "wrong or missing token")

    async def run(
        self, action: Callable[[Leader], _T], request: Request | None, kind: Kind = "quick"
    ) -> _T:
        """Do something that may take its time, beside the server's event loop.

        Args:
            action: What.
            request: Whose, if it is one's; it is given up once nobody waits for it.
            kind: Those that ask the store may hang; others do not queue up behind them.

        Raises:
            HTTPException: 503 where the server follows no chain, and once nobody waits for the
                answer: a server that was told to end waits for its requests.
        """
        if self.leader is None:
            raise HTTPException(503, self.refusal)
        free = self._free[kind]
        await free.acquire()
        work = asyncio.ensure_future(_aside(action, self.leader))
        work.add_done_callback(partial(_end, free))
        while not (await asyncio.wait({work}, timeout=LOOK_S))[0]:
            if request is not None and await request.is_disconnected():
                raise HTTPException(503, "nobody waits for the answer")
        return work.result()


def _end(free: asyncio.Semaphore, work: asyncio.Future[Any]) -> None:
    free.release()
    if not work.cancelled():
        work.exception()  # nobody may be left to ask for it


async def _aside(action: Callable[[Leader], _T], leader: Leader) -> _T:
    """Call in a thread that does not keep the process from ending, as those of executors do."""
    outcome: Future[_T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(action(leader))
        except BaseException as exc:  # noqa: BLE001 - whoever awaits it gets it
            outcome.set_exception(exc)

    Thread(target=run, name="deltachain-control", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _control(request: Request) -> Control:
    control: Control | None = getattr(request.app.state, "deltachain", None)
    if control is None:
        raise HTTPException(503, "the engine is not up yet")
    control.authorise(request)
    return control


Allowed = Annotated[Control, Depends(_control)]


async def _asked(control: Allowed, request: Request) -> VersionRequest:
    """The body, which is small: nobody is let in by its size, nor before the token."""
    del control
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST:
            raise HTTPException(413, f"a body of more than {LARGEST} bytes")
    try:
        return VersionRequest.model_validate_json(body or b"{}")
    except ValidationError as exc:
        raise HTTPException(422, 'the body must be {"version": N} or {}') from exc


Asked = Annotated[VersionRequest, Depends(_asked)]

router = APIRouter(tags=["deltachain"])
"""To be included under the prefix of an engine."""


@router.get("/status")
async def status(control: Allowed) -> Response:
    """What the replica holds, and how."""
    if control.leader is None:
        raise HTTPException(503, control.refusal)
    return _json(msgspec.to_builtins(control.leader.status()))


@router.get("/ready")
async def ready(control: Allowed) -> Response:
    """200 when the replica should be sent requests, else 503 and why."""
    if control.leader is None:
        return _json({"ready": False, "reason": control.refusal}, 503)
    found = control.leader.status()
    body = {"ready": found.ready, "reason": found.reason, "version": found.version}
    return _json(body, 200 if found.ready else 503)


@router.post("/update")
async def update(control: Allowed, asked: Asked, request: Request) -> Response:
    """Bring the replica to a version and answer when it is there; again is allowed."""
    return await _do(control, request, lambda leader: leader.update(asked.version), "update")


@router.post("/rollback")
async def rollback(control: Allowed, asked: Asked, request: Request) -> Response:
    """Go back to a version and stay there."""
    return await _do(control, request, lambda leader: leader.rollback(asked.version), "rollback")


@router.post("/release")
async def release(control: Allowed, request: Request) -> Response:
    """Follow the head again after a rollback."""
    return await _do(control, request, Leader.release)


@router.post("/pause")
async def pause(control: Allowed, request: Request) -> Response:
    """Generate nothing until ``resume``."""
    return await _do(control, request, Leader.pause)


@router.post("/resume")
async def resume(control: Allowed, request: Request) -> Response:
    """Generate again; refused when the replica can not prove what it holds."""
    return await _do(control, request, Leader.resume)


@router.post("/scrub")
async def scrub(control: Allowed, request: Request) -> Response:
    """Recompute the state of the live weights, to find out whether somebody else wrote to them."""
    return await _do(control, request, Leader.scrub, "update")


async def _do(
    control: Control, request: Request, action: Callable[[Leader], object], kind: Kind = "quick"
) -> Response:
    try:
        await control.run(action, request, kind)
    except DeltaChainError as exc:
        return _json(
            {
                "error": {
                    "type": type(exc).__name__,
                    "message": str(exc.args[0]),
                    "hint": exc.hint,
                    "retryable": exc.retryable,
                }
            },
            _status_of(exc),
        )
    assert control.leader is not None  # noqa: S101 - run() has refused
    return _json(msgspec.to_builtins(control.leader.status()))


def _status_of(exc: DeltaChainError) -> int:
    kinds = (
        (ConfigError, 400),
        (ChainError, 409),
        (ApplyError, 409),
        (FormatError, 502),
        (StoreError, 503),
    )
    return next((code for kind, code in kinds if isinstance(exc, kind)), 500)


def _json(body: Any, code: int = 200) -> Response:  # noqa: ANN401
    return JSONResponse(body, code)


class Led(NamedTuple):
    """An engine that a leader can lead.

    Attributes:
        engine: Its ranks and its scheduler.
        checkpoint: The folder that it loaded, for a chain that begins with that.
    """

    engine: Engine
    checkpoint: Path


async def lead(find: Callable[[ReplicaSettings], Led], *, is_open: bool, key: str = "") -> Control:
    """Lead the engine of this server along the chain that the environment names, if any.

    Returns once it has caught up, or can not: the server then starts all the same, and the routes
    say why it follows nothing.

    Args:
        find: Makes the engine known; may refuse with any :class:`DeltaChainError`.
        is_open: Whether something else than our token guards the routes.
        key: What they ask for where no token is set.
    """
    leader, token, refusal = None, key, "DELTACHAIN_URL is not set: this server follows no chain"
    try:
        settings = ReplicaSettings.of(os.environ)
        if settings is not None:
            token = settings.token or key
            engine, checkpoint = find(settings)
            base = settings.subscribe.base or checkpoint
            settings = replace(settings, subscribe=replace(settings.subscribe, base=base))
            leader = Leader(settings, engine)
            await _aside(Leader.start, leader)
    except DeltaChainError as exc:
        refusal = str(exc)
        logger.warning("deltachain follows nothing: %s", exc)
    return Control(leader, refusal, token=token, is_open=is_open)
