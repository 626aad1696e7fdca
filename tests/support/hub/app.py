"""Process of the emulated Hub: ``python -m tests.support.hub.app FOLDER``."""

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote
from xml.sax.saxutils import escape

import uvicorn
from fastapi import APIRouter, Body, Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.support.hub.faults import Door, Limits, RequestFault, Script
from tests.support.hub.world import (
    AccessDenied,
    BucketFile,
    Missing,
    RangeError,
    Right,
    Settings,
    World,
    XetFormatError,
    check_right,
    iso_date,
)

_ROOT: Final = "/api/buckets/{namespace}/{name}"


@dataclass(frozen=True, slots=True)
class _Rights:
    world: World
    right: Right

    def __call__(self, authorization: Annotated[str | None, Header()] = None) -> None:
        check_right(self.world.settings.tokens, authorization, self.right)


def error(status: int, message: str, code: str = "") -> JSONResponse:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return JSONResponse({"error": message}, status, headers=headers)


def add_errors(app: FastAPI) -> None:
    @app.exception_handler(AccessDenied)
    async def refused(_: Request, exc: AccessDenied) -> JSONResponse:
        return error(exc.status, exc.message)

    @app.exception_handler(Missing)
    async def missing(_: Request, __: Missing) -> JSONResponse:
        return error(404, "Repository not found", "RepoNotFound")


def make_hub_routes(world: World) -> APIRouter:
    routes = APIRouter()
    _add_buckets(routes, world)
    _add_tokens(routes, world)
    _add_lookups(routes, world)
    return routes


def _add_buckets(routes: APIRouter, world: World) -> None:
    @routes.post(_ROOT, dependencies=[Depends(_Rights(world, "write"))])
    def create(namespace: str, name: str) -> None:
        world.buckets.create(f"{namespace}/{name}")


def _add_tokens(routes: APIRouter, world: World) -> None:
    reader = [Depends(_Rights(world, "read"))]
    writer = [Depends(_Rights(world, "write"))]

    @routes.get(f"{_ROOT}/xet-read-token", dependencies=reader)
    def read_token(namespace: str, name: str) -> JSONResponse:
        return _xet_token(world, f"{namespace}/{name}", "xet-read")

    @routes.get(f"{_ROOT}/xet-write-token", dependencies=writer)
    def write_token(namespace: str, name: str) -> JSONResponse:
        return _xet_token(world, f"{namespace}/{name}", "xet-write")

    @routes.post(f"{_ROOT}/batch", dependencies=writer)
    def batch(namespace: str, name: str, body: Annotated[bytes, Body()]) -> JSONResponse:
        bucket = f"{namespace}/{name}"
        world.buckets.created(bucket)
        operations = [json.loads(line) for line in body.splitlines() if line.strip()]
        failed = list(_apply(world, bucket, operations))
        status = 422 if operations and len(failed) == len(operations) else 200
        return JSONResponse({"success": not failed, "failed": failed}, status)


def _add_lookups(routes: APIRouter, world: World) -> None:
    reader = [Depends(_Rights(world, "read"))]

    @routes.post(f"{_ROOT}/paths-info", dependencies=reader)
    def paths_info(
        namespace: str, name: str, paths: Annotated[list[str], Body(embed=True)]
    ) -> Response:
        if len(paths) > world.settings.page:
            return error(400, f"at most {world.settings.page} paths")
        found = world.buckets.seen(f"{namespace}/{name}", paths)
        return JSONResponse([_described(entry) for entry in found])

    @routes.get(f"{_ROOT}/tree", dependencies=reader)
    @routes.get(f"{_ROOT}/tree/{{prefix:path}}", dependencies=reader)
    def tree(
        request: Request, namespace: str, name: str, prefix: str = "", cursor: int = 0
    ) -> JSONResponse:
        """Files in a folder and below, which is what ``recursive`` asks for."""
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        entries = world.buckets.seen(f"{namespace}/{name}")
        later = [one for one in entries if one.path.startswith(folder) and one.number > cursor]
        page = later[: world.settings.page]
        headers = {}
        if len(later) > len(page):
            following = request.url.include_query_params(cursor=page[-1].number)
            path = quote(f"/api/buckets/{namespace}/{name}/tree") + (
                f"/{quote(prefix, safe='')}" if prefix else ""
            )
            headers["Link"] = f'<{world.url}{path}?{following.query}>; rel="next"'
        return JSONResponse([_described(entry) for entry in page], headers=headers)


def _xet_token(world: World, bucket: str, subject: str) -> JSONResponse:
    world.buckets.created(bucket)
    expires = int(time.time() + world.settings.xet_token_s)
    token, url = world.signer.sign(subject, expires), f"{world.url}/cas"
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(expires),
    }
    return JSONResponse({"accessToken": token, "exp": expires, "casUrl": url}, headers=headers)


def _apply(
    world: World, bucket: str, operations: Sequence[dict[str, Any]]
) -> Iterator[dict[str, str]]:
    for operation in operations:
        path = operation["path"]
        if operation["type"] == "deleteFile":
            if not world.buckets.delete(bucket, path):
                yield {"path": path, "error": "File not found"}
            continue
        size = world.cas.size(operation["xetHash"])
        if size is None:
            yield {"path": path, "error": "Xet hash not found"}
            continue
        modified = operation["mtime"] / 1000
        world.buckets.add(bucket, path, (operation["xetHash"], size), modified)


def _described(entry: BucketFile) -> dict[str, Any]:
    return {
        "type": "file",
        "path": entry.path,
        "size": entry.size,
        "xetHash": entry.hash,
        "mtime": iso_date(entry.modified),
        "uploadedAt": iso_date(entry.uploaded),
    }


_CREDENTIAL = re.compile(r"Credential=([^/]+)/")


class _Refused(Exception):  # noqa: N818
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.reply = Response(
            f"<Error><Code>{escape(code)}</Code><Message>{escape(code)}</Message></Error>",
            status,
            media_type="application/xml",
        )


def make_gateway_routes(world: World) -> APIRouter:
    routes = APIRouter(prefix="/s3")
    path = "/{namespace}/{name}/{key:path}"

    @routes.put(path)
    def put(
        request: Request,
        namespace: str,
        name: str,
        key: str,
        body: Annotated[bytes, Body()] = b"",
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Response:
        try:
            _check(world, request, namespace, name)
            return _put(world, f"{namespace}/{name}", key, body, absent=if_none_match == "*")
        except _Refused as exc:
            return exc.reply

    @routes.api_route(path, methods=["GET", "HEAD"])
    def get(request: Request, namespace: str, name: str, key: str) -> Response:
        try:
            _check(world, request, namespace, name)
            entry = _find(world, f"{namespace}/{name}", key)
        except _Refused as exc:
            return exc.reply
        written = formatdate(entry.uploaded, usegmt=True)
        headers = {"ETag": f'"{entry.hash}"', "Last-Modified": written}
        if request.method == "HEAD":
            return Response(headers=headers | {"Content-Length": str(entry.size)})
        return Response(world.read(entry.hash, entry.size), headers=headers)

    return routes


def _check(world: World, request: Request, namespace: str, name: str) -> None:
    match = _CREDENTIAL.search(request.headers.get("authorization", ""))
    if match is None or match[1] not in world.settings.s3_keys:
        raise _Refused(403, "InvalidAccessKeyId")
    try:
        world.buckets.created(f"{namespace}/{name}")
    except Missing as exc:
        raise _Refused(404, "NoSuchBucket") from exc


def _put(world: World, bucket: str, key: str, body: bytes, *, absent: bool) -> Response:
    # Checked before the content is stored, to refuse most losers early; decided atomically after.
    if absent and world.buckets.find(bucket, [key]):
        raise _Refused(412, "PreconditionFailed")
    content = world.write(body)
    if not absent:
        world.buckets.add(bucket, key, content, time.time())
    elif not world.buckets.add_if_absent(bucket, key, content, time.time()):
        raise _Refused(412, "PreconditionFailed")
    etag = hashlib.md5(body, usedforsecurity=False).hexdigest()
    return Response(headers={"ETag": f'"{etag}"'})


def _find(world: World, bucket: str, key: str) -> BucketFile:
    found = world.buckets.find(bucket, [key])
    if not found:
        raise _Refused(404, "NoSuchKey")
    return found[0]


_URL_S = 900


@dataclass(frozen=True, slots=True)
class _CasRights:
    world: World
    right: Right

    def __call__(self, authorization: Annotated[str | None, Header()] = None) -> None:
        self.world.signer.check_cas(authorization, self.right)


def make_xet_routes(world: World) -> APIRouter:
    routes = APIRouter(prefix="/cas")
    _add_uploads(routes, world)
    _add_downloads(routes, world)
    return routes


def _add_uploads(routes: APIRouter, world: World) -> None:
    writer = [Depends(_CasRights(world, "write"))]

    @routes.post("/v1/xorbs/{prefix}/{xorb}", dependencies=writer)
    def put_xorb(xorb: str, body: Annotated[bytes, Body()]) -> Response:
        try:
            return JSONResponse({"was_inserted": world.cas.put_xorb(xorb, body)})
        except XetFormatError as exc:
            return JSONResponse({"error": str(exc)}, 400)

    @routes.post("/v2/shards", dependencies=writer)
    def put_shard(body: Annotated[bytes, Body()]) -> Response:
        try:
            world.cas.put_shard(body)
        except XetFormatError as exc:
            return JSONResponse({"error": str(exc)}, 400)
        lines = '{"type":"validating","verified":1,"total":1}\n{"type":"result"}\n'
        return Response(lines, media_type="application/x-ndjson")


def _add_downloads(routes: APIRouter, world: World) -> None:
    reader = [Depends(_CasRights(world, "read"))]

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
    return JSONResponse(world.cas.reconstruction(terms, skip, urls, version))


def _span(header: str | None) -> tuple[int, int | None]:
    first, _, last = (header or "bytes=0-").removeprefix("bytes=").partition("-")
    return int(first), int(last) if last else None


_PORT = "port"

_connections: dict[tuple[str, int], asyncio.Transport] = {}


class _Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            _connections[self.client] = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            _connections.pop(self.client, None)
        super().connection_lost(exc)


def _abort(client: tuple[str, int]) -> None:
    if (transport := _connections.get((client[0], client[1]))) is not None:
        transport.abort()


def make_app(world: World) -> Door:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    script, limits = Script(), Limits()
    add_errors(app)
    app.include_router(make_hub_routes(world))
    app.include_router(make_xet_routes(world))
    app.include_router(make_gateway_routes(world))
    _add_controls(app, world, script, limits)
    return Door(app, script=script, limits=limits, settings=lambda: world.settings, abort=_abort)


def _add_controls(app: FastAPI, world: World, script: Script, limits: Limits) -> None:
    @app.get("/_admin/counts")
    def counts() -> dict[str, dict[str, int]]:
        return limits.counts()

    @app.post("/_admin/settings")
    def change(changes: Annotated[dict[str, Any], Body()]) -> None:
        world.change(changes)
        limits.restart()

    @app.post("/_admin/reset")
    def reset(changes: Annotated[dict[str, Any], Body()]) -> None:
        world.change(asdict(Settings()) | changes)
        limits.restart()
        script.clear()
        world.buckets.go_stale(0)

    _add_faults(app, world, script)


def _add_faults(app: FastAPI, world: World, script: Script) -> None:
    @app.post("/_admin/faults")
    def add_fault(fault: Annotated[dict[str, Any], Body()]) -> None:
        script.add(RequestFault(**fault))

    @app.get("/_admin/faults")
    def faults_left() -> int:
        return script.left()

    @app.delete("/_admin/faults")
    def clear_faults() -> None:
        script.clear()

    @app.post("/_admin/stale")
    def go_stale(seconds: Annotated[float, Body(embed=True)]) -> None:
        world.buckets.go_stale(seconds)


def _listen(folder: Path) -> socket.socket:
    saved = folder / _PORT
    # An explicit protocol, because asyncio sets TCP_NODELAY only with IPPROTO_TCP.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(saved.read_text()) if saved.exists() else 0))
    temporary = folder / f"{_PORT}.tmp"
    temporary.write_text(str(listening.getsockname()[1]))
    temporary.replace(saved)
    return listening


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path) -> None:
    listening = _listen(folder)
    world = World(folder, f"http://127.0.0.1:{listening.getsockname()[1]}")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = uvicorn.Config(
        make_app(world),
        http=_Connection,
        loop="asyncio",
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
