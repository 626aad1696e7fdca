"""HTTP routes of a replica for operators and trainers, the same for every engine.

A request names versions of the chain the server was started with; it cannot change the chain.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from deltachain import errors
from deltachain.replica.leader import Leader
from deltachain.status import Status

from .schemas import Detail, Problem, Ready, RefusedReply, VersionRequest, answers, schema_of
from .server import Allowed, Asked, Control, NothingAsked, RequestKind, control_of

METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

_NOT_READY: Final[dict[int | str, dict[str, Any]]] = {503: {"description": "not ready"}}
_VERSION: Final[dict[str, Any]] = {
    "requestBody": {"content": {"application/json": {"schema": schema_of(VersionRequest)}}}
}
_FAILS: Final = answers(400, 409, 413, 422, 500, 502)

router = APIRouter(tags=["deltachain"])
"""Router to include in an engine's app, below one of ``PREFIXES``."""

probes = APIRouter(tags=["deltachain"])
"""Router to include in an engine's app without a prefix: the probes once more, at paths that
neither vLLM nor SGLang guards with its key, since a kubelet reads no key from a secret."""


@probes.get("/healthz/deltachain", response_class=PlainTextResponse)
@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> PlainTextResponse:
    """Return 200 while the server answers; needs no token, since probes have none."""
    return PlainTextResponse("ok")


@probes.get("/readyz/deltachain", response_class=PlainTextResponse, responses=_NOT_READY)
@router.get("/readyz", response_class=PlainTextResponse, responses=_NOT_READY)
async def readyz(request: Request) -> PlainTextResponse:
    """Return 200 if the replica is ready for requests, else 503; needs no token."""
    leader = control_of(request).leader
    if leader is not None and leader.status().ready:
        return PlainTextResponse("ready")
    return PlainTextResponse("not ready", 503)


@router.get("/status", responses=answers(400, 413, 422))
async def status(control: Allowed, _: NothingAsked) -> Response:
    """Return the version the replica holds, and its health."""
    if control.leader is None:
        return _follows_nothing(control)
    return _json(control.leader.status())


@router.get("/ready", responses=answers(400, 413, 422, kinds={200: Ready, 503: Ready}))
async def ready(control: Allowed, _: NothingAsked) -> Response:
    """Return 200 if the replica is ready for requests, else 503 with the reason."""
    if control.leader is None:
        return _json(Ready(ready=False, reason=control.refusal), 503)
    found = control.leader.status()
    body = Ready(ready=found.ready, reason=found.reason, version=found.version)
    return _json(body, 200 if found.ready else 503)


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses=answers(400, 413, 422, kinds={200: None}),
)
async def metrics(control: Allowed, _: NothingAsked) -> Response:
    """Return metrics in the Prometheus text format."""
    if control.leader is None:
        return _follows_nothing(control)
    try:
        from deltachain.metrics import exposition  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as exc:
        raise HTTPException(503, "metrics need: pip install 'deltachain[server]'") from exc
    return Response(exposition(control.figures), media_type=METRICS)


@router.post("/stage", responses=_FAILS, openapi_extra=_VERSION)
async def stage(control: Allowed, asked: Asked, request: Request) -> Response:
    """Fetch and verify a version while the engine generates; a later update only swaps."""
    return await _do(control, request, lambda leader: leader.stage(asked.number), "update")


@router.post("/update", responses=_FAILS, openapi_extra=_VERSION)
async def update(control: Allowed, asked: Asked, request: Request) -> Response:
    """Update the replica to a version and answer once it is held; idempotent."""

    def update(leader: Leader) -> object:
        return leader.update(asked.number, manifest=asked.manifest)

    return await _do(control, request, update, "update")


@router.post("/rollback", responses=_FAILS, openapi_extra=_VERSION)
async def rollback(control: Allowed, asked: Asked, request: Request) -> Response:
    """Go back to a version, the previous one by default, and stay there until ``release``."""
    return await _do(control, request, lambda leader: leader.rollback(asked.number), "rollback")


@router.post("/release", responses=_FAILS)
async def release(control: Allowed, _: NothingAsked, request: Request) -> Response:
    """Unpin the replica after a rollback, so that it follows the head again."""
    return await _do(control, request, Leader.release)


@router.post("/pause", responses=_FAILS)
async def pause(control: Allowed, _: NothingAsked, request: Request) -> Response:
    """Stop generation until ``resume``."""
    return await _do(control, request, Leader.pause)


@router.post("/resume", responses=_FAILS)
async def resume(control: Allowed, _: NothingAsked, request: Request) -> Response:
    """Resume generation; refused while the state of the weights is unknown."""
    return await _do(control, request, Leader.resume)


@router.post("/scrub", responses=_FAILS)
async def scrub(control: Allowed, _: NothingAsked, request: Request) -> Response:
    """Verify the state digest of the live weights, to detect external modification."""
    return await _do(control, request, Leader.scrub, "update")


_CODES: Final[Mapping[type[errors.DeltaChainError], int]] = {
    errors.ConfigError: 400,
    errors.ChainError: 409,
    errors.ApplyError: 409,
    errors.FormatError: 502,
    errors.StoreError: 503,
    errors.ControlPlaneError: 503,
}


async def _do(
    control: Control,
    request: Request,
    action: Callable[[Leader], object],
    kind: RequestKind = "quick",
) -> Response:
    def act(leader: Leader) -> Status:
        action(leader)
        return leader.status()

    if control.leader is None:
        return _follows_nothing(control)
    try:
        found = await control.run(act, request, kind)
    except errors.DeltaChainError as exc:
        error = Problem(type(exc).__name__, str(exc.args[0]), exc.hint, exc.retryable)
        code = next((code for kind, code in _CODES.items() if isinstance(exc, kind)), 500)
        return _json(RefusedReply(error), code)
    return _json(found)


def _follows_nothing(control: Control) -> Response:
    """Answer with the reason; an exception would make vLLM log a traceback for each request."""
    return _json(Detail(control.refusal), 503)


def _json(body: msgspec.Struct, code: int = 200) -> Response:
    return JSONResponse(msgspec.to_builtins(body), code)
