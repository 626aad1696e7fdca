"""The parties of a run: an S3 server, a trainer, a maintainer, two engines and a dashboard."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

import httpx

from deltachain.control.replica_client import ReplicaClient
from deltachain.store import Store, open_store
from examples.demo.online.engine import HOST, EngineKind, command, variables
from examples.demo.online.processes import Service, free_port
from tests.small_disk import on_small_disk
from tests.support.proxy import Proxy
from tests.support.seaweed import Seaweed

MARK: Final = "CHAOS_RUN"

_PROGRAM: Final = """
import os, signal, sys
sys.stdin.read()
wanted = sys.argv[1].encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read().split(b"\\0"):
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass  # it has ended, or is another user's
"""


@contextmanager
def leash(name: str) -> Iterator[None]:
    """Mark all processes that are started inside; none outlives this one, however it ends."""
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    command = [sys.executable, "-S", "-c", _PROGRAM, f"{MARK}={name}"]
    before = os.environ.get(MARK)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        os.environ[MARK] = name
        try:
            yield
        finally:
            if before is None:
                del os.environ[MARK]
            else:
                os.environ[MARK] = before
            process.communicate()


CHUNK: Final = bytes(1 << 12)
LOOK_S: Final = 0.02
"""Seconds between two looks for room: a spool that is deleted leaves enough for the next one."""


class Filler:
    """Takes all room on a disk, and what becomes free there, until it is told to end."""

    def __init__(self, disk: Callable[[], Path]) -> None:
        self._disk = disk
        self._over = Event()
        self._thread = Thread(target=self._stay_full, name="filler")

    def begin(self) -> bool:
        if not self._fill():
            return False
        self._thread.start()
        return True

    def end(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return self._disk() / "filler"

    def _stay_full(self) -> None:
        while not self._over.wait(LOOK_S):
            self._fill()

    def _fill(self) -> bool:
        with suppress(OSError), self._file.open("ab", buffering=0) as file:
            while file.write(CHUNK) == len(CHUNK):
                pass
        return self._file.exists()


ROOT: Final = Path(__file__).resolve().parents[3]
KINDS: Final[tuple[EngineKind, ...]] = ("vllm", "sglang")

POLL_S: Final = 0.5
MAX_LAG: Final = 24
"""Versions behind up to which a replica may say that it is ready."""

MAX_SILENCE_S: Final = 10.0
"""Seconds without an answer of the store up to which it may."""

ALERT_LAG: Final = 12
"""Versions behind from which on the dashboard shows an alert."""

SPOOL_NBYTES: Final = 64 << 20

KEPT: Final = 64
GRACE: Final = "20s"
MOST_STARTS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """An engine and what surrounds it."""

    kind: EngineKind
    url: str
    service: Service
    proxy: Proxy
    client: ReplicaClient
    disk: Path

    @property
    def seen_disk(self) -> Path:
        return Path(f"/proc/{self.service.pid}/root{self.disk}")

    def is_up(self) -> bool:
        with suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.url}/health", timeout=5, trust_env=False)
            return answer.status_code == httpx.codes.OK
        return False


class Scene:
    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.base, self.weights = folder, base, folder / "weights"
        self._stack = ExitStack()
        self.engines: dict[str, Party] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def opened(self) -> closing[Store]:
        return closing(open_store(self.url, self.store.options, writer=True))

    @property
    def direct(self) -> dict[str, str]:
        return {**os.environ, **self._environment(self.store.endpoint)}

    def another_trainer(self) -> Service:
        return self._trainer("second-trainer", most_starts=1)

    def _start(self, stack: ExitStack) -> None:
        self.store = stack.enter_context(Seaweed(self.folder / "store"))
        self.url = self.store.url("policy")
        self.trainer_proxy = stack.enter_context(Proxy(self.store.port))
        self.trainer = stack.enter_context(self._trainer("trainer", most_starts=MOST_STARTS))
        maintain = ("maintain", self.url, "--every", "5s", "--grace", GRACE)
        self.maintainer = self._cli("maintainer", *maintain, "--keep-last", str(KEPT))
        stack.enter_context(self.maintainer)
        for kind in KINDS:
            self.engines[kind] = self._engine(kind, stack)
        port = free_port()
        self.dashboard_url = f"http://{HOST}:{port}"
        engines = [word for one in self.engines.values() for word in ("--engine", one.url)]
        self.dashboard = self._cli(
            *("dashboard", self.url, *engines, "--listen", str(port)),
            *("--poll", "1", "--max-lag", str(ALERT_LAG), "--max-silence", str(MAX_SILENCE_S)),
            module="spaces.dashboard",
        )
        stack.enter_context(self.dashboard)

    def _trainer(self, name: str, *, most_starts: int) -> Service:
        module = [sys.executable, "-m", "tests.crash.chaos.trainer"]
        arguments = [self.url, str(self.base), str(self.weights)]
        return Service(
            name,
            [*module, *arguments],
            self.folder / "logs",
            self._environment(self.trainer_proxy.endpoint),
            most_starts=most_starts,
        )

    def _cli(self, name: str, *arguments: str, module: str = "deltachain") -> Service:
        return Service(
            name,
            [sys.executable, "-m", module, *arguments],
            self.folder / "logs",
            self._environment(self.store.endpoint),
            most_starts=MOST_STARTS,
        )

    def _engine(self, kind: EngineKind, stack: ExitStack) -> Party:
        proxy, port = stack.enter_context(Proxy(self.store.port)), free_port()
        disk, python = self.folder / f"{kind}-disk", ROOT / f".venv-{kind}/bin/python"
        given = variables(kind) | {
            "DELTACHAIN_URL": self.url,
            "DELTACHAIN_FOLLOW": "1",
            "DELTACHAIN_POLL_S": str(POLL_S),
            "DELTACHAIN_SPOOL": str(disk / "spool"),
            "DELTACHAIN_MAX_LAG": str(MAX_LAG),
            "DELTACHAIN_MAX_SILENCE_S": str(MAX_SILENCE_S),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        started = command(kind, python, self.base, port)
        service = Service(
            kind,
            on_small_disk("tmpfs", disk, SPOOL_NBYTES, started),
            self.folder / "logs",
            self._environment(proxy.endpoint) | given,
            most_starts=MOST_STARTS,
        )
        stack.enter_context(service)
        url = f"http://{HOST}:{port}"
        client = stack.enter_context(closing(ReplicaClient(url, timeout_s=60.0)))
        return Party(kind=kind, url=url, service=service, proxy=proxy, client=client, disk=disk)

    def _environment(self, endpoint: str) -> dict[str, str]:
        sources = [ROOT, ROOT / "vllm_ext", ROOT / "sglang_ext"]
        return {
            **self.store.env(),
            "AWS_ENDPOINT_URL": endpoint,
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "OMP_NUM_THREADS": "1",
        }
