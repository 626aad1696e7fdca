"""HTTP client of a stock engine, for the sidecar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import httpx

from deltachain.control.client.http import Http, bearer, read, secret
from deltachain.errors import ControlPlaneError

_T = TypeVar("_T")

LOOK_S: Final = 10.0
"""Timeout of a question, in seconds: an engine answers while it generates, unless it hangs."""


class EngineClient:
    """HTTP client of a stock vLLM or SGLang server.

    Args:
        url: Address of the server.
        key: API key of the server, or a file of keys that is read again when it changes; empty for
            none.
        timeout_s: Timeout of a request, in seconds.
        hint: Hint of errors when the server refuses.

    Raises:
        ConfigError: ``url`` is invalid, or ``key`` cannot be sent in a header.
    """

    def __init__(self, url: str, *, key: str | Path, timeout_s: float, hint: str) -> None:
        self._keys = secret(key, "server's API key")
        self._http = Http(url, self._credentials, timeout_s=timeout_s)
        self._hint = hint

    def tell(self, path: str, body: Mapping[str, object] | None = None) -> None:
        """Send a POST request; the body of the response is ignored.

        Raises:
            ControlPlaneError: The server refused or did not answer; the same for all methods.
        """
        self._succeed("POST", path, body)

    def ask(
        self, method: str, path: str, kind: type[_T], body: Mapping[str, object] | None = None
    ) -> _T:
        """Send a request and parse the response; a GET is answered in ``LOOK_S``."""
        timeout_s = LOOK_S if method == "GET" else None
        found = read(self._succeed(method, path, body, timeout_s), kind)
        if found is None:
            raise ControlPlaneError(f"{self._http.url}: unexpected response body from {path}")
        return found

    def has(self, path: str) -> bool:
        """Return whether a GET route exists at a path.

        Raises:
            ControlPlaneError: The server answered neither yes nor no, as a proxy does before it.
        """
        answer = self._http.request("GET", path, timeout_s=LOOK_S)
        if not answer.is_success and answer.status_code != httpx.codes.NOT_FOUND:
            raise self._refused(path, answer)
        return answer.is_success

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._http.close()

    def _credentials(self) -> Iterator[Mapping[str, str]]:
        return map(bearer, self._keys.current or ("",))

    def _succeed(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        answer = self._http.request(method, path, body, timeout_s=timeout_s)
        if not answer.is_success:
            raise self._refused(path, answer)
        return answer

    def _refused(self, path: str, answer: httpx.Response) -> ControlPlaneError:
        about = f"{self._http.url} answered {answer.status_code} to {path}"
        return ControlPlaneError(f"{about}: {answer.text[:300]}", hint=self._hint)
