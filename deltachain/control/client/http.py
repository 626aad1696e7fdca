"""HTTP transport of both clients: one server, validated secrets, bounded responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, TypeVar

import httpx
import msgspec

from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.format.json_guards import decode

CONNECT_S: Final = 5.0
LARGEST: Final = 4 << 20
"""Size limit of a response, in bytes."""

_T = TypeVar("_T")


class Http:
    """HTTP client of one server; thread-safe.

    Args:
        url: Address of the server.
        headers: Headers of every request.
        timeout_s: Timeout of a request, in seconds, to its last byte.

    Raises:
        ConfigError: ``url`` is invalid.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not a server address", hint="use http://HOST:PORT")
        headers = {"accept-encoding": "identity", **headers}
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S))
        self._timeout_s = timeout_s
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False)

    def request(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> httpx.Response:
        """Send a request and read the whole response, whatever its status.

        Raises:
            ControlPlaneError: The server did not answer, or the response is too large.
        """
        content, until = b"", time.monotonic() + self._timeout_s
        try:
            with self._client.stream(method, self.url + path, json=body) as answer:
                for chunk in answer.iter_raw():
                    content += chunk
                    if len(content) > LARGEST:
                        raise ControlPlaneError(f"{self.url}: response above {LARGEST} bytes")
                    if time.monotonic() > until:  # httpx limits each read, not their sum
                        raise ControlPlaneError(
                            f"{self.url} did not end its answer in {self._timeout_s:g} s"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            what = str(exc) or type(exc).__name__
            raise ControlPlaneError(f"{self.url} did not answer: {what}") from exc
        return httpx.Response(answer.status_code, content=content)

    def close(self) -> None:
        """Close connections; idempotent."""
        self._client.close()


def secret(value: str, name: str) -> str:
    """Strip white space from a token or key and check that a header can carry it.

    Raises:
        ConfigError: It has characters that are invalid in a header.
    """
    stripped = value.strip()
    if not (stripped.isascii() and stripped.isprintable()):
        raise ConfigError(f"the {name} has characters that are invalid in an HTTP header")
    return stripped


def bearer(key: str) -> dict[str, str]:
    """Return the Authorization header for ``key``; empty without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def read(answer: httpx.Response, kind: type[_T]) -> _T | None:
    """Parse the JSON of a response; ``None`` if it is not of this type."""
    try:
        return decode(answer.content, kind)
    except (msgspec.DecodeError, RecursionError):
        return None
