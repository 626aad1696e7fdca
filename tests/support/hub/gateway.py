"""S3 gateway of buckets: PUT, GET and HEAD of objects, with conditional puts."""

from __future__ import annotations

import hashlib
import re
import time
from email.utils import formatdate
from typing import Annotated
from xml.sax.saxutils import escape

from fastapi import APIRouter, Body, Header
from fastapi.responses import Response
from starlette.requests import Request

from tests.support.hub.world import BucketFile, Missing, World

_CREDENTIAL = re.compile(r"Credential=([^/]+)/")


class _Refused(Exception):  # noqa: N818
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.reply = Response(
            f"<Error><Code>{escape(code)}</Code><Message>{escape(code)}</Message></Error>",
            status,
            media_type="application/xml",
        )


def make_routes(world: World) -> APIRouter:
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
