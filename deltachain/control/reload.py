"""Servers without deltachain, which load a whole checkpoint again from a folder on their host.

The way for engines that can not have our extension. It pauses for as long as a load takes, and what
the server then holds is what it says it loaded: nobody proves it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import httpx

from deltachain.control.agent import Reader
from deltachain.errors import ControlPlaneError
from deltachain.types import Version

TIMEOUT_S: Final = 1800.0
CONNECT_S: Final = 5.0


class _Server:
    """One that is told over HTTP."""

    hint = ""

    def __init__(self, url: str, *, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self._brought: Version | None = None

    def close(self) -> None:
        """See :class:`Reader`; closing twice is allowed."""
        self._client.close()

    def bring(self, folder: Path, version: Version) -> None:
        """Pause, load, resume; a server that failed stays paused. See :class:`Reader`."""
        if self._brought == version and self._named() == str(version):
            return
        self._brought = None
        self._load(folder.absolute(), version)
        self._brought = version

    def _named(self) -> str:
        raise NotImplementedError

    def _load(self, folder: Path, version: Version) -> None:
        raise NotImplementedError

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        about = f"{self._client.base_url} {path}"
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError as exc:
            raise ControlPlaneError(f"{about}: {exc}") from exc
        if not answer.is_success:
            said = f"{answer.status_code} {answer.text[:300]}"
            raise ControlPlaneError(f"{about}: {said}", hint=self.hint)
        found = answer.json() if answer.content else {}
        return found if isinstance(found, dict) else {}


class VllmReload(_Server):
    """A vLLM in its development mode, whose routes ask nobody for a password."""

    hint = "start it with VLLM_SERVER_DEV_MODE=1, on the loopback interface"

    def _named(self) -> str:
        return str(self._ask("GET", "/weight_info").get("weight_version"))

    def _load(self, folder: Path, version: Version) -> None:
        self._ask("POST", "/pause?mode=keep&clear_cache=true")
        loading = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._ask("POST", "/collective_rpc", loading)
        self._ask("POST", "/reset_prefix_cache?reset_running_requests=true")
        self._ask("POST", "/update_weight_version", {"new_version": str(version)})
        self._ask("POST", "/resume")


class SglangReload(_Server):
    """An SGLang. With several ranks it may say that all is well where one of them refused."""

    hint = "its API key is asked for where it has one"

    def _named(self) -> str:
        return str(self._ask("GET", "/model_info").get("weight_version"))

    def _load(self, folder: Path, version: Version) -> None:
        self._ask("POST", "/pause_generation", {"mode": "retract"})
        loading = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        done = self._ask("POST", "/update_weights_from_disk", loading)
        if not done.get("success"):
            raise ControlPlaneError(f"{self._client.base_url}: {done.get('message')}")
        self._ask("POST", "/continue_generation", {})


def reload_server(url: str, *, key: str = "") -> Reader:
    """The server at an address, whichever engine it is.

    Raises:
        ControlPlaneError: It does not answer.
    """
    sglang = SglangReload(url, key=key)
    try:
        sglang._named()  # vLLM has no such route
    except ControlPlaneError as exc:
        if "404" not in str(exc.args[0]):
            raise
        sglang.close()
        return VllmReload(url, key=key)
    return sglang
