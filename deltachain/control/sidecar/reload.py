"""Reload of a stock server: it loads a whole checkpoint from a folder on its host.

For engines without the deltachain extension. The pause lasts as long as a load, and the loaded
weights are not verified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import msgspec
from typing_extensions import override

from deltachain.control.sidecar.agent import Reader
from deltachain.control.sidecar.engine_api import EngineClient
from deltachain.errors import ControlPlaneError
from deltachain.redact import redacted_url
from deltachain.types import Version

TIMEOUT_S: Final = 1800.0

HINT: Final = (
    "start vLLM with VLLM_SERVER_DEV_MODE=1, on the loopback interface, since its routes then need "
    "no password; pass the API key of an SGLang server that has one"
)


class Loader(Protocol):
    """Reload of a checkpoint in one kind of engine."""

    def named(self) -> str | None:
        """Return the server's name of its current weights."""

    def is_paused(self) -> bool:
        """Return whether the server is paused, as far as it tells."""

    def load(self, folder: Path, version: Version) -> None:
        """Pause, load, name and resume; a failure leaves the server paused."""


class ReloadServer(Reader):
    """A stock vLLM or SGLang server that reloads each version as a whole.

    Args:
        url: Address of the server, which must see the folder; it may start later.
        key: API key of the server, or a file of keys; see :class:`EngineClient`. Empty for none.
    """

    def __init__(self, url: str, *, key: str | Path = "") -> None:
        self._client = EngineClient(url, key=key, timeout_s=TIMEOUT_S, hint=HINT)
        self._url = redacted_url(url)
        self._loader: Loader | None = None
        self._loaded: Version | None = None

    @override
    def has(self, folder: Path, version: Version) -> bool:
        if self._loaded != version:
            return False
        loader = self._find()
        try:
            if loader.named() != str(version):
                return False
        except ControlPlaneError:
            self._loader = None  # a server of the other kind may have come up in its place
            raise
        if loader.is_paused():
            raise ControlPlaneError(
                f"{self._url} has version {version} and is paused by another client",
                hint="resume it: POST /resume",
            )
        return True

    def load(self, folder: Path, version: Version) -> None:
        """Pause, load and resume; a failure leaves the server paused. See :class:`Reader`."""
        loader, self._loader, self._loaded = self._find(), None, None
        loader.load(folder.absolute(), version)
        self._loader, self._loaded = loader, version

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._client.close()

    def _find(self) -> Loader:
        if self._loader is None:
            is_sglang = self._client.has("/model_info")  # vLLM has no such route
            self._loader = (SglangLoader if is_sglang else VllmLoader)(self._client)
        return self._loader


class Named(msgspec.Struct, frozen=True):
    """Reply with the name of an engine's weights."""

    weight_version: str | None = None


class PausedReply(msgspec.Struct, frozen=True):
    """Reply of vLLM to the question whether it is paused."""

    is_paused: bool


class ReloadReply(msgspec.Struct, frozen=True):
    """Reply of SGLang to a load."""

    success: bool
    message: str = ""


class VllmLoader(Loader):
    """Reload of vLLM in its development mode."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._tells = client.has("/is_paused")

    @override
    def named(self) -> str | None:
        return self._client.ask("GET", "/weight_info", Named).weight_version

    @override
    def is_paused(self) -> bool:
        return self._tells and self._client.ask("GET", "/is_paused", PausedReply).is_paused

    @override
    def load(self, folder: Path, version: Version) -> None:
        tell = self._client.tell
        tell("/pause?mode=keep&clear_cache=true")
        loading = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        tell("/collective_rpc", loading)
        tell("/reset_prefix_cache?reset_running_requests=true")
        tell("/update_weight_version", {"new_version": str(version)})
        tell("/resume")


class SglangLoader(Loader):
    """Reload of SGLang. With several ranks it may report success although one of them failed."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    @override
    def named(self) -> str | None:
        return self._client.ask("GET", "/model_info", Named).weight_version

    @override
    def is_paused(self) -> bool:
        return False  # no route tells

    @override
    def load(self, folder: Path, version: Version) -> None:
        self._client.tell("/pause_generation", {"mode": "retract"})
        loading = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        done = self._client.ask("POST", "/update_weights_from_disk", ReloadReply, loading)
        if not done.success:
            raise ControlPlaneError(f"SGLang did not load {folder}: {done.message}")
        self._client.tell("/continue_generation", {})
