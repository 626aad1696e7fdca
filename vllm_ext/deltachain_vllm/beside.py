"""A sidecar of a vLLM server, through the routes of the server's development mode.

For servers without the endpoint plugin. These routes have no authentication, so the server must not
be reachable by untrusted clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from deltachain.control.client.http import make_client
from deltachain.errors import ApplyError
from deltachain.replica.messages import RankReply, RankRequest, decode_reply, encode
from deltachain.replica.target import pause_mode
from deltachain_vllm import HANDLE
from deltachain_vllm.compat import mode_in_doubt
from deltachain_vllm.start_check import PAUSES

WAIT_S: Final = 3600.0
"""Timeout of a request in seconds: attaching reads a whole model, and a pause may wait long."""


class BesideEngine:
    """A vLLM server as :class:`deltachain.replica.engine.Engine`, through its HTTP routes.

    Args:
        url: URL of the server, on this host: its workers read what is fetched here.
        pause: Pause mode of vLLM.
        keep_cache: Whether cached prefixes outlive a swap.
    """

    software = "vllm"

    def __init__(self, url: str, *, pause: str = "keep", keep_cache: bool = False) -> None:
        self._mode = pause_mode(pause, PAUSES)
        self._clear, self._doubted = not keep_cache, False
        self._client = make_client(base_url=url, timeout=httpx.Timeout(WAIT_S, connect=5))

    def call(self, request: RankRequest) -> Sequence[RankReply]:
        """Send a request to every worker, and return the replies."""
        body = {"method": HANDLE, "args": [encode(request)]}
        answer = self._ask("POST", "/collective_rpc", body)
        return [decode_reply(text) for text in answer["results"]]

    def is_dead(self) -> bool:
        """Return false: that is the server's to say."""
        return False

    def is_paused(self) -> bool:
        """Return whether the scheduler is paused."""
        return bool(self._ask("GET", "/is_paused")["is_paused"])

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause the scheduler; drop cached prefixes, unless they are kept."""
        self._doubted |= in_doubt
        clear = str(self._clear or self._doubted).lower()
        mode = mode_in_doubt(self._mode) if in_doubt else self._mode
        self._ask("POST", f"/pause?mode={mode}&clear_cache={clear}")

    def resume(self) -> None:
        """Resume the scheduler."""
        self._ask("POST", "/resume")

    def name_version(self, version: int) -> None:
        """Label tokens with this version; drop older cached prefixes, unless they are kept."""
        if self._clear or self._doubted:
            answer = self._ask("POST", "/reset_prefix_cache?reset_running_requests=true")
            if answer.get("success") is False:
                raise ApplyError("the prefix cache could not be reset", version=version)
        self._ask("POST", "/update_weight_version", {"new_version": str(version)})
        self._doubted = False

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, json=body)
            answer.raise_for_status()
        except httpx.HTTPStatusError as exc:
            missing = exc.response.status_code == 404
            raise ApplyError(
                f"the engine answered {exc.response.status_code} to {path}: "
                f"{exc.response.text[:200]}",
                hint="start the server with VLLM_SERVER_DEV_MODE=1" if missing else "",
            ) from exc
        except httpx.HTTPError as exc:
            raise ApplyError(f"the engine did not answer {path}: {exc}") from exc
        found: dict[str, Any] = answer.json() if answer.content else {}
        return found
