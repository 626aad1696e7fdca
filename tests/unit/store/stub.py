"""A server that answers S3 requests by a script: with what SeaweedFS never says."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Answer:
    status: int
    code: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        if not self.code:
            return self.body
        return f"<Error><Code>{self.code}</Code><Message>-</Message></Error>".encode()


OK = Answer(200, headers={"ETag": '"1"'})
LAST_MODIFIED = {"Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT", "ETag": '"1"'}


class Stub:
    """Gives one answer after another; the last one again and again.

    Attributes:
        seen: Method and path of every request.
        headers: Of every request.
    """

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self._lock = threading.Lock()
        self.seen: list[str] = []
        self.headers: list[dict[str, str]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = stub._next(self)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.content)

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
