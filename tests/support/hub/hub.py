"""Routes of the Hub's API for buckets, as called by ``huggingface_hub``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Body, Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response

from tests.support.hub.world import (
    AccessDenied,
    BucketFile,
    Missing,
    Right,
    World,
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


def make_routes(world: World) -> APIRouter:
    routes = APIRouter()
    _add_buckets(routes, world)
    _add_tokens(routes, world)
    _add_lookups(routes, world)
    _add_content(routes, world)
    return routes


def _add_buckets(routes: APIRouter, world: World) -> None:
    reader = [Depends(_Rights(world, "read"))]
    writer = [Depends(_Rights(world, "write"))]

    @routes.get("/api/whoami-v2", dependencies=reader)
    def whoami() -> dict[str, Any]:
        return {"type": "user", "name": "me", "orgs": []}

    @routes.post(_ROOT, dependencies=writer)
    def create(namespace: str, name: str) -> Response:
        made = {"url": f"{world.url}/buckets/{namespace}/{name}"}
        if world.buckets.create(f"{namespace}/{name}"):
            return JSONResponse(made)
        return JSONResponse(made | {"error": "You already created this bucket"}, 409)

    @routes.get(_ROOT, dependencies=reader)
    def info(namespace: str, name: str) -> dict[str, Any]:
        bucket = f"{namespace}/{name}"
        created = world.buckets.created(bucket)
        entries = world.buckets.entries(bucket)
        return {
            "id": bucket,
            "private": True,
            "createdAt": iso_date(created),
            "updatedAt": iso_date(max([created, *(entry.uploaded for entry in entries)])),
            "size": sum(entry.size for entry in entries),
            "totalFiles": len(entries),
        }

    @routes.delete(_ROOT, dependencies=writer)
    def remove(namespace: str, name: str) -> dict[str, Any]:
        world.buckets.remove(f"{namespace}/{name}")
        return {}


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
        request: Request,
        namespace: str,
        name: str,
        prefix: str = "",
        *,
        recursive: bool = False,
        cursor: int = 0,
    ) -> JSONResponse:
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        entries = world.buckets.seen(f"{namespace}/{name}")
        inside = [entry for entry in entries if entry.path.startswith(folder)]
        rows = _recursive(inside) if recursive else _one_level(inside, folder)
        later = [row for row in rows if row[0] > cursor]
        page = later[: world.settings.page]
        headers = {}
        if len(later) > len(page):
            following = request.url.include_query_params(cursor=page[-1][0])
            path = quote(f"/api/buckets/{namespace}/{name}/tree") + (
                f"/{quote(prefix, safe='')}" if prefix else ""
            )
            headers["Link"] = f'<{world.url}{path}?{following.query}>; rel="next"'
        return JSONResponse([row for _, row in page], headers=headers)


def _add_content(routes: APIRouter, world: World) -> None:
    reader = [Depends(_Rights(world, "read"))]

    @routes.api_route(
        "/buckets/{namespace}/{name}/resolve/{path:path}",
        methods=["GET", "HEAD"],
        dependencies=reader,
    )
    def resolve(request: Request, namespace: str, name: str, path: str) -> Response:
        bucket = f"{namespace}/{name}"
        found = world.buckets.find(bucket, [path])
        if not found:
            return error(404, "BucketFile not found", "EntryNotFound")
        (entry,) = found
        headers = {
            "X-Xet-Hash": entry.hash,
            "X-Linked-Size": str(entry.size),
            "X-Linked-Etag": f'"{entry.hash}"',
            "ETag": f'"{entry.hash}"',
            "Link": f'<{world.url}/api/buckets/{bucket}/xet-read-token>; rel="xet-auth"',
        }
        if request.method == "HEAD":
            return Response(headers=headers | {"Content-Length": str(entry.size)})
        data = world.read(entry.hash, entry.size)
        if (span := request.headers.get("range")) is None:
            return Response(data, headers=headers)
        first, _, last = span.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1 if last else len(data), len(data))
        ranged = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        return Response(data[begin:end], 206, headers=headers | ranged)


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


def _recursive(entries: Sequence[BucketFile]) -> list[tuple[int, dict[str, Any]]]:
    return [(entry.number, _described(entry)) for entry in entries]


def _one_level(entries: Sequence[BucketFile], folder: str) -> list[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    folders: set[str] = set()
    for entry in entries:
        name, slash, _ = entry.path.removeprefix(folder).partition("/")
        if not slash:
            rows.append((entry.number, _described(entry)))
        elif name not in folders:
            folders.add(name)
            described = {"type": "directory", "path": f"{folder}{name}"}
            rows.append((entry.number, described | {"uploadedAt": iso_date(entry.uploaded)}))
    return rows


def _described(entry: BucketFile) -> dict[str, Any]:
    return {
        "type": "file",
        "path": entry.path,
        "size": entry.size,
        "xetHash": entry.hash,
        "mtime": iso_date(entry.modified),
        "uploadedAt": iso_date(entry.uploaded),
    }
