"""Routes of the CAS, as called by ``hf_xet``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Header
from fastapi.responses import JSONResponse, Response

from tests.support.hub.world import AccessDenied, RangeError, Right, World, XetFormatError

_URL_S = 900


@dataclass(frozen=True, slots=True)
class _Rights:
    world: World
    right: Right

    def __call__(self, authorization: Annotated[str | None, Header()] = None) -> None:
        self.world.signer.check_cas(authorization, self.right)


def make_routes(world: World) -> APIRouter:
    routes = APIRouter(prefix="/cas")
    _add_uploads(routes, world)
    _add_downloads(routes, world)
    return routes


def _add_uploads(routes: APIRouter, world: World) -> None:
    writer = [Depends(_Rights(world, "write"))]

    @routes.post("/v1/xorbs/{prefix}/{xorb}", dependencies=writer)
    def put_xorb(xorb: str, body: Annotated[bytes, Body()]) -> Response:
        try:
            return JSONResponse({"was_inserted": world.cas.put_xorb(xorb, body)})
        except XetFormatError as exc:
            return JSONResponse({"error": str(exc)}, 400)

    @routes.post("/v1/shards", dependencies=writer)
    def put_shard(body: Annotated[bytes, Body()]) -> Response:
        try:
            world.cas.put_shard(body)
        except XetFormatError as exc:
            return JSONResponse({"error": str(exc)}, 400)
        return JSONResponse({"result": 1})

    @routes.post("/v2/shards", dependencies=writer)
    def put_shard_slowly(body: Annotated[bytes, Body()]) -> Response:
        try:
            world.cas.put_shard(body)
        except XetFormatError as exc:
            return JSONResponse({"error": str(exc)}, 400)
        lines = '{"type":"validating","verified":1,"total":1}\n{"type":"result"}\n'
        return Response(lines, media_type="application/x-ndjson")


def _add_downloads(routes: APIRouter, world: World) -> None:
    reader = [Depends(_Rights(world, "read"))]

    @routes.head("/v1/xorbs/{prefix}/{xorb}", dependencies=reader)
    def has_xorb(xorb: str) -> Response:
        return Response(status_code=200 if world.cas.has_xorb(xorb) else 404)

    @routes.get("/v1/reconstructions/{file}", dependencies=reader)
    def reconstruct_v1(
        file: str, span: Annotated[str | None, Header(alias="range")] = None
    ) -> Response:
        return _reconstruction(world, file, span, 1)

    @routes.get("/v2/reconstructions/{file}", dependencies=reader)
    def reconstruct_v2(
        file: str, span: Annotated[str | None, Header(alias="range")] = None
    ) -> Response:
        return _reconstruction(world, file, span, 2)

    @routes.get("/xorbs/{xorb}")
    def get_xorb(
        xorb: str, token: str, span: Annotated[str | None, Header(alias="range")] = None
    ) -> Response:
        if world.signer.check(token) != xorb:
            raise AccessDenied(403, "the address was signed for another xorb")
        if not world.cas.has_xorb(xorb):
            return Response(status_code=404)
        first, last = _span(span)
        data, size = world.cas.read_xorb(xorb, first, (1 << 40) if last is None else last)
        headers = {"Content-Range": f"bytes {first}-{first + len(data) - 1}/{size}"}
        return Response(data, 206, headers, media_type="application/octet-stream")


def _reconstruction(
    world: World, file: str, span: str | None, version: Literal[1, 2]
) -> JSONResponse:
    size = world.cas.size(file)
    if size is None:
        return JSONResponse({"error": "no such file"}, 404)
    first, last = _span(span)
    try:
        terms, skip = world.cas.terms(file, first, size if last is None else last + 1)
    except RangeError as exc:
        return JSONResponse({"error": str(exc)}, 416)
    expires = int(time.time()) + _URL_S
    urls = {
        xorb: f"{world.url}/cas/xorbs/{xorb}?token={world.signer.sign(xorb, expires)}"
        for xorb in {term.xorb for term in terms}
    }
    reply: dict[str, Any] = world.cas.reconstruction(terms, skip, urls, version)
    return JSONResponse(reply)


def _span(header: str | None) -> tuple[int, int | None]:
    first, _, last = (header or "bytes=0-").removeprefix("bytes=").partition("-")
    return int(first), int(last) if last else None
