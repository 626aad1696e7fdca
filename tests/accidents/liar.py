"""Something between a client and an S3 server that says yes to puts, and does not pass them on."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final, Self

_HOST: Final = "127.0.0.1"
_OWN: Final = frozenset({"connection", "transfer-encoding", "content-length", "server", "date"})


class Liar:
    """Forwards to a port of this machine; some puts are lost behind a 200."""

    def __init__(self, port: int) -> None:
        self.lies: list[str] = []
        self.headers: dict[str, str] = {}
        self.lost: list[str] = []
        liar = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                lie = liar._lie(self.command, self.path)
                status, headers, content = (
                    (200, liar.headers, b"") if lie else _ask(port, self, body)
                )
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if self.command != "HEAD" or "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((_HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self._server.server_address[1]}"

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

    def _lie(self, method: str, path: str) -> bool:
        lie = next((lie for lie in self.lies if method == "PUT" and lie in path), None)
        if lie is None:
            return False
        self.lies.remove(lie)
        self.lost.append(path)
        return True


def _ask(
    port: int, request: BaseHTTPRequestHandler, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(_HOST, port, timeout=30)
    try:
        connection.putrequest(
            request.command, request.path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in request.headers.items():
            if name.lower() != "expect":
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in _OWN}
        if request.command == "HEAD" and (length := answer.getheader("Content-Length")):
            headers["Content-Length"] = length
        return answer.status, headers, content
    finally:
        connection.close()
