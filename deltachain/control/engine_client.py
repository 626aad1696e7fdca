"""An engine's own HTTP routes, for those who lead it from beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx

from deltachain.errors import ControlPlaneError

CONNECT_S: Final = 5.0


class EngineClient:
    """Asks a stock vLLM or SGLang server.

    Args:
        url: Of the server.
        key: Its API key.
        timeout_s: Longest wait for an answer.
        hint: What a person can do where it refuses.
    """

    def __init__(self, url: str, *, key: str, timeout_s: float, hint: str) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self._hint = hint

    def ask(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """The JSON object that a route answers; empty where it answers something else.

        Raises:
            ControlPlaneError: It refused, or did not answer.
        """
        answer = self._send(method, path, body)
        if not answer.is_success:
            about = f"{self._client.base_url} answered {answer.status_code} to {path}"
            raise ControlPlaneError(f"{about}: {answer.text[:300]}", hint=self._hint)
        try:
            found = answer.json()
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def has(self, path: str) -> bool:
        """Whether there is a route at a path, which only reads.

        Raises:
            ControlPlaneError: It did not answer.
        """
        return self._send("GET", path, None).status_code != httpx.codes.NOT_FOUND

    def close(self) -> None:
        """Give the connection back. Closing twice is allowed."""
        self._client.close()

    def _send(self, method: str, path: str, body: Mapping[str, object] | None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.HTTPError as exc:
            what = str(exc) or type(exc).__name__
            raise ControlPlaneError(f"{self._client.base_url} did not answer: {what}") from exc
