"""A server that answers S3 requests by a script: with what SeaweedFS never says."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, cast

import pytest

from deltachain.errors import StoreUnavailableError


@dataclass(frozen=True)
class Answer:
    """What is said, and how."""

    status: int
    code: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    said_nbytes: int | None = None
    head_pace_s: float = 0.0
    body_pace_s: float = 0.0

    @property
    def content(self) -> bytes:
        if not self.code:
            return self.body
        return f"<Error><Code>{self.code}</Code><Message>-</Message></Error>".encode()


MD5 = "(MD5 of the request)"
OK = Answer(200, headers={"ETag": MD5})
LAST_MODIFIED = {"Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT", "ETag": '"1"'}


class _Paced:
    """A file that is written to byte by byte."""

    def __init__(self, file: Any, pace_s: float) -> None:
        self.file = file
        self._pace_s = pace_s

    def write(self, data: bytes) -> None:
        if not self._pace_s:
            self.file.write(data)
            return
        for at in range(len(data)):
            time.sleep(self._pace_s)
            self.file.write(data[at : at + 1])


class Stub:
    """Gives one answer after another; the last one again and again."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self._lock = threading.Lock()
        self.seen: list[str] = []
        self.headers: list[dict[str, str]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                md5 = hashlib.md5(sent, usedforsecurity=False).hexdigest()
                answer = stub._next(self)
                nbytes = answer.said_nbytes
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, f'"{md5}"' if value == MD5 else value)
                self.send_header(
                    "Content-Length", str(len(answer.content) if nbytes is None else nbytes)
                )
                file: Any = self.wfile
                with suppress(OSError):  # whoever gives up does not read the rest
                    self.wfile = cast(Any, _Paced(file, answer.head_pace_s))
                    self.end_headers()
                    if self.command != "HEAD":
                        _Paced(file, answer.body_pace_s).write(answer.content)
                self.wfile = file

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def options(self) -> dict[str, object]:
        port = self._server.server_address[1]
        return {
            "key": "testkey",
            "secret": "hushhush",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "region": "us-east-1",
        }

    def _next(self, request: BaseHTTPRequestHandler) -> Answer:
        with self._lock:
            self.seen.append(f"{request.command} {request.path}")
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def took(call: Callable[[], object]) -> tuple[StoreUnavailableError, float]:
    """How a call that cannot succeed ends, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError) as caught:
        call()
    return caught.value, time.monotonic() - began
