"""A stock server of either engine on this machine alone, for as long as a test needs it."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, Self, cast

import httpx
from torch import Tensor

from examples.demo.online.processes import free_port

HOST: Final = "127.0.0.1"
MODEL: Final = "tiny"
ROOT: Final = Path(__file__).resolve().parents[2]

ENGINE: Final = next((e for e in ("vllm", "sglang") if importlib.util.find_spec(e)), "")

PAUSES: Final = {
    "vllm": ("keep", "wait", "abort", "in_place"),
    "sglang": ("retract", "in_place", "abort"),
}.get(ENGINE, ())

START_S: Final = 900.0
STOP_S: Final = 15.0
PATIENCE_S: Final = 180.0

_LEASH: Final = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"
"""Ends a server whose test was killed: that closes its end of the pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a request came back with."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: str
    spans: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a server is started."""

    tp: int = 1
    dp: int = 1
    environment: Mapping[str, str] | None = None
    arguments: Sequence[str] = ()
    key: str = ""
    dev: bool = False
    plain: bool = False
    strikes: Path | None = None
    requests: int = 8
    bare: bool = False
    first: Path = ROOT  # the first folder of modules


class Server(ABC):
    """A server, started by entering it, and gone with all its processes after leaving it."""

    prefix: str
    aborted: str = "abort"
    late: str = ""
    """What an engine logs that ends because the machine was slow to start one of its processes."""
    sees_loads: bool = False

    def __init__(self, checkpoint: Path, folder: Path, url: str, options: Options) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "log"
        self.spool = folder / "spool"
        self.port = free_port()
        given = {"DELTACHAIN_URL": url, "DELTACHAIN_SPOOL": str(self.spool)} if url else {}
        if options.strikes:
            given["TEST_DELTACHAIN_STRIKE"] = str(options.strikes)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DELTACHAIN_")}
        self._environment = {
            **inherited,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(
                map(str, (options.first, ROOT, ROOT / "vllm_ext", ROOT / "sglang_ext"))
            ),
            **self.variables(options),
            **given,
            **(options.environment or {}),
        }
        self._command = [*self.command(checkpoint, options), *options.arguments]
        headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
        if token := self._environment.get("DELTACHAIN_TOKEN"):
            headers["x-deltachain-token"] = token
        self._headers = headers
        self._clients: list[httpx.Client] = []
        self._own = threading.local()
        self._process: subprocess.Popen[bytes] | None = None
        self._leash: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self, checkpoint: Path, options: Options) -> list[str]: ...

    @abstractmethod
    def variables(self, options: Options) -> dict[str, str]: ...

    @abstractmethod
    def generate(self, prompt: Sequence[int], length: int, adapter: str = "") -> Generated: ...

    @abstractmethod
    def stream(self, prompt: Sequence[int], length: int) -> tuple[int, str]: ...

    @abstractmethod
    def checksums(self) -> dict[str, str]: ...

    @abstractmethod
    def digest(self, tensor: Tensor) -> str: ...

    @abstractmethod
    def named(self) -> str: ...

    @abstractmethod
    def halt(self) -> None:
        """Pause it behind deltachain's back."""

    @abstractmethod
    def go_on(self) -> None: ...

    @abstractmethod
    def paused(self) -> bool: ...

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def load(self, checkpoint: Path) -> None: ...

    @abstractmethod
    def flush(self) -> None: ...

    def restarts(self) -> int:
        """How often requests were computed anew, where the engine tells it."""
        return 0

    def __enter__(self) -> Self:
        try:
            return self._start()
        except RuntimeError:
            if not self.late or self.late not in self._tail():
                raise
        return self._start()

    def _start(self) -> Self:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        try:
            leash = [sys.executable, "-S", "-c", _LEASH, str(self._process.pid)]
            self._leash = subprocess.Popen(leash, stdin=subprocess.PIPE, start_new_session=True)
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for client in self._clients:
            client.close()

    @property
    def client(self) -> httpx.Client:
        """Asks it things; each thread has one, since one closes what another reads from."""
        known = getattr(self._own, "client", None)
        if known is None or known.is_closed:  # of an earlier start
            self._own.client = httpx.Client(
                base_url=f"http://{HOST}:{self.port}",
                headers=self._headers,
                # A test that stands still for seconds would send on what the server is closing.
                limits=httpx.Limits(max_keepalive_connections=0),
                timeout=600,
                trust_env=False,
            )
            self._clients.append(self._own.client)
        return cast("httpx.Client", self._own.client)

    def stop(self) -> float:
        if self._process is None:
            return 0.0
        process, self._process = self._process, None
        start = time.monotonic()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        took = time.monotonic() - start
        with suppress(ProcessLookupError):  # nobody is left of its group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._leash is not None:
            self._leash.kill()
            self._leash.communicate()
            self._leash = None
        return took

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        return self.client.get(f"{self.prefix}/{path}")

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{self.prefix}/{path}", json=body)

    def readiness(self) -> set[int]:
        """Return what the answers of all addresses that tell it are."""
        codes = set()
        for path in (f"{self.prefix}/ready", f"{self.prefix}/readyz", "/readyz/deltachain"):
            with suppress(httpx.TransportError):
                codes.add(self.client.get(path).status_code)
        return codes

    def status(self) -> dict[str, Any]:
        response = self.get("status")
        assert response.status_code == 200, response.text
        return dict(response.json())

    def update(self, version: int | None = None) -> dict[str, Any]:
        response = self.post("update", **({} if version is None else {"version": version}))
        assert response.status_code == 200, response.text
        return dict(response.json())

    def wait_for(
        self, what: Callable[[dict[str, Any]], object], within_s: float = PATIENCE_S
    ) -> Any:
        deadline = time.monotonic() + within_s
        while not what(found := self.status()):
            assert time.monotonic() < deadline, f"{found}\n{self._tail()}"
            time.sleep(0.05)
        return found

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            if not self.alive:
                raise RuntimeError(f"the server ended:\n{self._tail()}")
            with suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"not healthy after {START_S:.0f} s:\n{self._tail()}")
            time.sleep(0.2)

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-60:])


def lines(response: httpx.Response) -> Iterator[Any]:
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
    for line in _lines(response):
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data != line:
            yield json.loads(data)
    raise RuntimeError("a stream ended without being done")


def _lines(response: httpx.Response) -> Iterator[str]:
    """Lines that end in a newline: httpx's own also end at what generated text may contain."""
    rest = b""
    for chunk in response.iter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode() for line in whole)


def alike(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return checksums by name, which all data-parallel engines have alike."""
    pairs = set(found)
    assert len(pairs) == len(dict(pairs)), "engines hold different bits"
    return dict(pairs)


def server_class() -> type[Server]:
    if ENGINE == "vllm":
        from tests.engines.vllm.server import VllmServer  # noqa: PLC0415

        return VllmServer
    from tests.engines.sglang.server import SglangServer  # noqa: PLC0415

    return SglangServer


def start(checkpoint: Path, folder: Path, url: str = "", **options: Any) -> Server:
    return server_class()(checkpoint, folder, url, Options(**options))


VOCABULARY: Final = range(3, 500)


@dataclass(slots=True)
class Seen:
    finished: list[tuple[int, str]] = field(default_factory=list)
    generated: list[tuple[int, Generated]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def prompt(dice: random.Random, length: int = 10) -> list[int]:
    return dice.choices(VOCABULARY, k=length)


def answers(server: Server, prompts: int = 16) -> list[tuple[int, ...]]:
    """Greedy tokens of the same prompts, whoever asks."""
    dice = random.Random(3)
    return [server.generate(prompt(dice), 24).tokens for _ in range(prompts)]


@contextmanager
def clients(
    server: Server, *, streams: int, labelled: int, length: int, applied: Callable[[], int]
) -> Iterator[Seen]:
    """Keep asking from as many threads until this is left; every answer has been awaited then."""
    seen, stop = Seen(), Event()

    def loop(once: Callable[[random.Random], None], seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            try:
                once(dice)
            except Exception as exc:  # noqa: BLE001 - the test reads them
                seen.failures.append(repr(exc))
                stop.wait(0.2)

    def stream(dice: random.Random) -> None:
        seen.finished.append(server.stream(prompt(dice), length))

    def label(dice: random.Random) -> None:
        known = applied()
        seen.generated.append((known, server.generate(prompt(dice), length)))

    calls = [stream] * streams + [label] * labelled
    threads = [Thread(target=loop, args=(call, seed)) for seed, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def run_program(
    module: str, *arguments: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def said_by(module: str, *arguments: str, **how: str) -> dict[str, Any]:
    """What a program that ends with 0 prints as its last line, in JSON."""
    done = run_program(module, *arguments, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen
