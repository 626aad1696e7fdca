"""Client of the HTTP routes of a stock engine, for a sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import httpx

from deltachain.control.client.http import Http, bearer, read, secret
from deltachain.errors import ControlPlaneError

_T = TypeVar("_T")


class EngineClient:
    """Asks a stock vLLM or SGLang server.

    Args:
        url: Of the server.
        key: Its API key.
        timeout_s: Longest wait for an answer.
        hint: What a person can do where it refuses.

    Raises:
        ConfigError: That is no address, or no header can carry the key.
    """

    def __init__(self, url: str, *, key: str, timeout_s: float, hint: str) -> None:
        self._http = Http(url, bearer(secret(key, "server's API key")), timeout_s=timeout_s)
        self._hint = hint

    def tell(self, path: str, body: Mapping[str, object] | None = None) -> None:
        """Let it do something; what it answers besides is not looked at.

        Raises:
            ControlPlaneError: It refused, or did not answer; so does every call here.
        """
        self._succeed("POST", path, body)

    def ask(
        self, method: str, path: str, kind: type[_T], body: Mapping[str, object] | None = None
    ) -> _T:
        """What a route answers."""
        found = read(self._succeed(method, path, body), kind)
        if found is None:
            raise ControlPlaneError(f"{self._http.url} answered something else to {path}")
        return found

    def has(self, path: str) -> bool:
        """Whether there is a route at a path, which only reads."""
        return self._http.request("GET", path).status_code != httpx.codes.NOT_FOUND

    def close(self) -> None:
        """Give the connection back. Closing twice is allowed."""
        self._http.close()

    def _succeed(self, method: str, path: str, body: Mapping[str, object] | None) -> httpx.Response:
        answer = self._http.request(method, path, body)
        if not answer.is_success:
            about = f"{self._http.url} answered {answer.status_code} to {path}"
            raise ControlPlaneError(f"{about}: {answer.text[:300]}", hint=self._hint)
        return answer
