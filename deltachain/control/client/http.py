"""HTTP as both clients speak it: one server, secrets that headers can carry, answers that end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import httpx
import msgspec

from deltachain.errors import ConfigError, ControlPlaneError

CONNECT_S: Final = 5.0
LARGEST: Final = 4 << 20
"""Bytes of an answer that are believed."""

_T = TypeVar("_T")


class Http:
    """Asks one server. Calls may come from several threads.

    Args:
        url: Of the server.
        headers: Sent with every request.
        timeout_s: Longest wait for an answer.

    Raises:
        ConfigError: That is no address.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is no address of a server", hint="http://HOST:PORT")
        # Not compressed: what little was received could unpack to anything.
        headers = {"accept-encoding": "identity", **headers}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False)

    def request(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> httpx.Response:
        """Whatever the server answers, read whole.

        Raises:
            ControlPlaneError: It did not answer, or without an end.
        """
        content = b""
        try:
            with self._client.stream(method, self.url + path, json=body) as answer:
                for chunk in answer.iter_raw():
                    content += chunk
                    if len(content) > LARGEST:
                        raise ControlPlaneError(f"{self.url} answered more than {LARGEST} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            what = str(exc) or type(exc).__name__
            raise ControlPlaneError(f"{self.url} did not answer: {what}") from exc
        return httpx.Response(answer.status_code, content=content)

    def close(self) -> None:
        """Give connections back. Closing twice is allowed."""
        self._client.close()


def secret(value: str, name: str) -> str:
    """A token or key as a header can carry it, without the blanks around it.

    Raises:
        ConfigError: No header can.
    """
    stripped = value.strip()
    if not (stripped.isascii() and stripped.isprintable()):
        raise ConfigError(f"the {name} has characters that no header can carry")
    return stripped


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key; none for none."""
    return {"authorization": f"Bearer {key}"} if key else {}


def read(answer: httpx.Response, kind: type[_T]) -> _T | None:
    """An answer's JSON, if it is of this kind."""
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
