"""Agent: keeps a folder at the head and makes a stock server load it.

For servers without deltachain, and for adapters, which servers load from folders anyway.
"""

import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Final, Protocol, TypeVar

import httpx
import msgspec
from typing_extensions import override

from deltachain.checkpoint import ADAPTER_FILE, HELD_FILE, read_assets
from deltachain.errors import ConfigError, ControlPlaneError, DeltaChainError
from deltachain.format.documents import parse
from deltachain.store import Store
from deltachain.subscribe import ApplyReceipt, SubscribeConfig, Subscriber
from deltachain.subscribe.targets.base import HeldVersion
from deltachain.subscribe.targets.folder import HeldFile, OwnFolder, write_assets
from deltachain.threads import Closeable
from deltachain.types import Version

from .replica_client import Http, bearer, secret

_T = TypeVar("_T")

LOOK_S: Final = 10.0
"""Timeout of a question, in seconds: an engine answers while it generates, unless it hangs."""


class EngineClient(Http):
    """HTTP client of a stock vLLM or SGLang server.

    ``key`` is its API key, or a file of keys that is read again when it changes; empty for none. A
    refusal gets the ``hint``.
    """

    def __init__(self, url: str, *, key: str | Path, timeout_s: float, hint: str) -> None:
        keys = secret(key, "server's API key")
        super().__init__(url, lambda: map(bearer, keys.current or ("",)), timeout_s=timeout_s)
        self._hint = hint

    def tell(
        self, path: str, body: Mapping[str, object] | None = None, *, method: str = "POST"
    ) -> httpx.Response:
        """Send a request; a GET is answered in ``LOOK_S``."""
        answer = self.request(method, path, body, timeout_s=LOOK_S if method == "GET" else None)
        if not answer.is_success:
            raise self._refused(path, answer)
        return answer

    def ask(
        self,
        path: str,
        kind: type[_T],
        body: Mapping[str, object] | None = None,
        *,
        method: str = "GET",
    ) -> _T:
        return self.parsed(self.tell(path, body, method=method), kind, path)

    def has(self, path: str) -> bool:
        """Return whether a GET route exists at a path; a proxy may answer neither yes nor no."""
        answer = self.request("GET", path, timeout_s=LOOK_S)
        if not answer.is_success and answer.status_code != httpx.codes.NOT_FOUND:
            raise self._refused(path, answer)
        return answer.is_success

    def _refused(self, path: str, answer: httpx.Response) -> ControlPlaneError:
        about = f"{self.url} answered {answer.status_code} to {path}"
        return ControlPlaneError(f"{about}: {answer.text[:300]}", hint=self._hint)


class Reader(Protocol):
    """A server that loads weights from a folder."""

    def has(self, folder: Path, version: Version) -> bool:
        """Return whether the server serves the version that it loaded from a folder."""

    def load(self, folder: Path, version: Version) -> None:
        """Make the server load the version in a folder, even if it has that version."""

    def close(self) -> None:
        """Close the connection; the server keeps its weights."""


class Agent(Closeable):
    """Follows a chain in a folder, which nothing else may use, for a stock server that loads it.

    Each version is fetched, decoded and verified in the folder while the server keeps serving.
    """

    def __init__(
        self,
        config: SubscribeConfig | str,
        folder: Path,
        server: Reader,
        *,
        store: Store | None = None,
    ) -> None:
        self.subscriber = Subscriber(config, OwnFolder(folder), store=store)
        self._folder, self._server = folder, server
        self._serves: HeldVersion | None = None
        self._loaded: ApplyReceipt | None = None

    def update(self, version: Version | None = None) -> ApplyReceipt | None:
        """Update folder and server to a version or to the head.

        Returns ``None`` if the folder held the version already. Raises a :class:`ControlPlaneError`
        if the server did not load the version, and whatever :meth:`Subscriber.update` does.
        """
        receipt = self.subscriber.update(version)
        self._bring()
        return receipt

    def follow(
        self,
        stop: Event | None = None,
        *,
        looked: Callable[[DeltaChainError | None], None] = lambda _: None,
    ) -> Iterator[ApplyReceipt]:
        """Follow the head until ``stop`` is set; see :meth:`Subscriber.follow`.

        Waits for a server that is down, and reloads one that has restarted. After each iteration,
        ``looked`` gets the error to be retried, or ``None`` once the server holds the version.
        """

        def after(trouble: DeltaChainError | None) -> None:
            if trouble is None:
                self._bring()
            looked(trouble)

        yield from self.subscriber.follow(stop=stop, looked=after)

    @override
    def close(self) -> None:
        self._server.close()
        self.subscriber.close()

    def why_unready(self) -> str:
        """Return why the server does not serve what the folder holds; empty if it does."""
        held = self.subscriber.held
        if held is None or self._serves == held:
            return ""
        return f"the server has not loaded version {held.version}"

    def _bring(self) -> None:
        held, last = self.subscriber.held, self.subscriber.last
        if held is None:
            return
        trusted = self.subscriber.config.trust_remote_code
        write_assets(self.subscriber.chain, self._folder, trusted=trusted)
        # A folder that was damaged and written anew may have been loaded in between.
        is_written = last is not None and last is not self._loaded
        if is_written or not self._server.has(self._folder, held.version):
            self._serves = None
            self._server.load(self._folder, held.version)
        self._serves, self._loaded = held, last


class _Answer(msgspec.Struct, frozen=True):
    weight_version: str | None = None
    success: bool = False
    message: str = ""


class _Paused(msgspec.Struct, frozen=True):
    is_paused: bool


class ReloadServer(Reader):
    """A stock vLLM or SGLang server that loads each version as a whole, without a proof.

    It is paused as long as a load takes, and stays paused after one that failed. SGLang with
    several ranks may report success although one of them failed.
    """

    def __init__(self, url: str, *, key: str | Path = "") -> None:
        self._client = EngineClient(
            url,
            key=key,
            timeout_s=1800.0,
            hint="start vLLM with VLLM_SERVER_DEV_MODE=1, on the loopback interface, since its "
            "routes then need no password; pass the API key of an SGLang server that has one",
        )
        self._is_sglang: bool | None = None
        self._loaded: Version | None = None

    @override
    def has(self, folder: Path, version: Version) -> bool:
        if self._loaded != version:
            return False
        route = "/model_info" if self._finds_sglang() else "/weight_info"
        try:
            if self._client.ask(route, _Answer).weight_version != str(version):
                return False
        except ControlPlaneError:
            self._is_sglang = None  # a server of the other kind may have come up in its place
            raise
        client = self._client  # SGLang has no route that tells
        tells = not self._is_sglang and client.has("/is_paused")
        if tells and client.ask("/is_paused", _Paused).is_paused:
            raise ControlPlaneError(
                f"{self._client.url} has version {version} and is paused by another client",
                hint="resume it: POST /resume",
            )
        return True

    @override
    def load(self, folder: Path, version: Version) -> None:
        is_sglang, self._is_sglang, self._loaded = self._finds_sglang(), None, None
        (self._load_sglang if is_sglang else self._load_vllm)(str(folder.absolute()), str(version))
        self._is_sglang, self._loaded = is_sglang, version

    @override
    def close(self) -> None:
        self._client.close()

    def _finds_sglang(self) -> bool:
        if self._is_sglang is None:
            self._is_sglang = self._client.has("/model_info")  # vLLM has no such route
        return self._is_sglang

    def _load_vllm(self, folder: str, name: str) -> None:
        tell = self._client.tell
        tell("/pause?mode=keep&clear_cache=true")
        tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        tell("/reset_prefix_cache?reset_running_requests=true")
        tell("/update_weight_version", {"new_version": name})
        tell("/resume")

    def _load_sglang(self, folder: str, name: str) -> None:
        self._client.tell("/pause_generation", {"mode": "retract"})
        loading = {"model_path": folder, "weight_version": name, "flush_cache": True}
        route = "/update_weights_from_disk"
        done = self._client.ask(route, _Answer, loading, method="POST")
        if not done.success:
            raise ControlPlaneError(f"SGLang did not load {folder}: {done.message}")
        self._client.tell("/continue_generation", {})


class _Model(msgspec.Struct, frozen=True):
    id: str
    root: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class AdapterServer(Reader):
    """Loads versions of an adapter into vLLM; requests select one as model ``policy-v7``.

    There is no pause: a request finishes with its adapter. Prefix caches are not shared between
    versions, since vLLM separates adapters by name.
    """

    def __init__(
        self, url: str, *, name: str, folder: Path, key: str | Path = "", keep: int = 2
    ) -> None:
        if not re.fullmatch(r"[\w.-]+", name) or keep < 1:
            raise ConfigError(f"{name!r}, keep={keep}: expected a plain name, and 1 or more")
        self._name, self._folder, self._keep = name, folder.absolute(), keep
        self._client = EngineClient(
            url,
            key=key,
            timeout_s=120.0,
            hint="start vLLM with --enable-lora --max-lora-rank R --max-loras N, and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        )

    def loaded(self) -> dict[Version, Path]:
        found: dict[Version, Path] = {}
        for model in self._client.ask("/v1/models", _Models).data:
            match = re.fullmatch(rf"{re.escape(self._name)}-v(\d{{1,18}})", model.id, re.ASCII)
            if match:
                found[int(match[1])] = Path(model.root or "")
        return dict(sorted(found.items()))

    @override
    def has(self, folder: Path, version: Version) -> bool:
        return self.loaded().get(version) == self._place(folder, version)

    @override
    def load(self, folder: Path, version: Version) -> None:
        loaded, lies = self.loaded(), self._place(folder, version)
        if version in loaded:  # of another run, or from a folder that was damaged then
            self._unload(version)
        self._copy(folder, lies)
        self._client.tell(
            "/v1/load_lora_adapter", {"lora_name": self._named(version), "lora_path": str(lies)}
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
        file = folder / HELD_FILE
        held = parse(file.read_bytes(), HeldFile, key=str(file)).held
        if held is None:
            raise ConfigError(f"{folder} holds no version")
        return self._folder / f"{self._named(version)}-{held.state[:16]}"

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
