"""LoRA adapters of a vLLM server: each version is an adapter with the version in its name."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path
from typing import Final

import msgspec
from typing_extensions import override

from deltachain.checkpoint import HELD_FILE, read_assets
from deltachain.control.sidecar.agent import Reader
from deltachain.control.sidecar.engine_api import EngineClient
from deltachain.errors import ConfigError
from deltachain.format.documents import parse
from deltachain.subscribe.targets.folder import HeldFile
from deltachain.types import Version
from deltachain.weight_files import ADAPTER_FILE

TIMEOUT_S: Final = 120.0

HINT: Final = (
    "start vLLM with --enable-lora --max-lora-rank R --max-loras N, and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
)


class _Model(msgspec.Struct, frozen=True):
    """A model or adapter of vLLM, and the folder it was loaded from."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct, frozen=True):
    """All models and adapters of vLLM."""

    data: list[_Model]


class AdapterServer(Reader):
    """Loads versions of an adapter into vLLM; requests select one as model ``policy-v7``.

    There is no pause: a request finishes with its adapter. Prefix caches are not shared between
    versions, since vLLM separates adapters by name.

    Args:
        url: Address of the server, which must see ``folder``.
        name: Prefix of model names: version 7 of ``policy`` is ``policy-v7``.
        folder: Parent of one folder a version.
        key: API key of the server, or a file of keys; see :class:`EngineClient`. Empty for none.
        keep: Number of versions that stay loaded.
    """

    def __init__(
        self, url: str, *, name: str, folder: Path, key: str | Path = "", keep: int = 2
    ) -> None:
        if not re.fullmatch(r"[\w.-]+", name) or keep < 1:
            raise ConfigError(f"{name!r}, keep={keep}: expected a plain name, and 1 or more")
        self._name, self._folder, self._keep = name, folder.absolute(), keep
        self._client = EngineClient(url, key=key, timeout_s=TIMEOUT_S, hint=HINT)

    def loaded(self) -> dict[Version, Path]:
        """Return the folders of loaded adapters by version, oldest first.

        Raises:
            ControlPlaneError: The server does not answer.
        """
        found: dict[Version, Path] = {}
        for model in self._client.ask("GET", "/v1/models", _Models).data:
            match = re.fullmatch(rf"{re.escape(self._name)}-v(\d{{1,18}})", model.id, re.ASCII)
            if match:
                found[int(match[1])] = Path(model.root or "")
        return dict(sorted(found.items()))

    @override
    def has(self, folder: Path, version: Version) -> bool:
        return self.loaded().get(version) == self._place(folder, version)

    def load(self, folder: Path, version: Version) -> None:
        """Load the version in a folder and unload the oldest; see :class:`Reader`."""
        loaded, lies = self.loaded(), self._place(folder, version)
        if version in loaded:  # of another run, or from a folder that was damaged then
            self._unload(version)
        self._copy(folder, lies)
        self._client.tell(
            "/v1/load_lora_adapter",
            {"lora_name": self._named(version), "lora_path": str(lies)},
        )
        others = [number for number in loaded if number != version]
        for old in others[: max(0, len(others) + 1 - self._keep)]:
            self._unload(old)
        # The folders of the versions unloaded now are kept: vLLM may still read them.
        for left in self._folder.glob(f"{self._name}-v*"):
            if left != lies and left not in loaded.values():
                shutil.rmtree(left, ignore_errors=True)

    @override
    def close(self) -> None:
        self._client.close()

    def _unload(self, version: Version) -> None:
        self._client.tell("/v1/unload_lora_adapter", {"lora_name": self._named(version)})

    def _place(self, folder: Path, version: Version) -> Path:
        """Return where a version lies; other runs have the same numbers, and other states."""
        return self._folder / f"{self._named(version)}-{_state_of(folder)[:16]}"

    def _named(self, version: Version) -> str:
        return f"{self._name}-v{version}"

    def _copy(self, folder: Path, lies: Path) -> None:
        """Copy the adapter to a folder of its own, since the followed folder changes."""
        if not (folder / ADAPTER_FILE).is_file():
            raise ConfigError(
                f"{folder} has no {ADAPTER_FILE}: this is not the chain of an adapter",
                hint="publish deltachain.publish.model.lora.adapter_tensors(model) "
                "on a chain of its own",
            )
        for left in self._folder.glob(f".{self._name}-v*"):  # by a killed agent
            shutil.rmtree(left, ignore_errors=True)
        partial = lies.with_name(f".{lies.name}.{secrets.token_hex(8)}")
        partial.mkdir(parents=True)
        for name, data in read_assets(folder).items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(data)
        shutil.copyfile(folder / ADAPTER_FILE, partial / ADAPTER_FILE)
        shutil.rmtree(lies, ignore_errors=True)
        partial.rename(lies)


def _state_of(folder: Path) -> str:
    """Return the state digest of a folder."""
    file = folder / HELD_FILE
    held = parse(file.read_bytes(), HeldFile, key=str(file)).held
    if held is None:
        raise ConfigError(f"{folder} holds no version")
    return held.state
