"""The asynchronous demo: starts all processes, trains, and evaluates the result."""

import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import httpx

from deltachain.checkpoint import Checkpoint
from deltachain.control.replica_client import ReplicaClient
from deltachain.errors import ControlPlaneError
from deltachain.format.documents import Manifest
from deltachain.store import open_store
from deltachain.subscribe import ApplyReceipt, Subscriber
from examples.demo.evaluate import compare, manifests_in, sent, verify
from examples.demo.follower_process import DemoError
from examples.demo.online.engine import HOST, EngineKind, command, variables
from examples.demo.online.game_transcripts import ENVIRONMENT, transcripts
from examples.demo.online.processes import Service, free_port, until
from examples.demo.online.report import OnlineReport, rewards_of, staleness_of, unknown_in
from examples.demo.online.trainer import TrainerOptions, bits_of, diary_of
from examples.demo.pretrain import pretrain
from examples.demo.report import Display
from tests.support.seaweed import Seaweed

ROOT: Final = Path(__file__).parents[3]

STEPS: Final = 40
PRETRAIN_STEPS: Final = 250
START_S: Final = 240.0
TRAIN_S: Final = 900.0
LOOK_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run."""

    root: Path
    kind: EngineKind
    python: Path
    steps: int
    seed: int
    display: Display
    at_step: "Callable[[int, Running], None]"
    dashboard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    store: Seaweed
    environment: Service
    replica: Service
    trainer: Service


def run_online(plan: RunOptions) -> OnlineReport:
    start = time.monotonic()
    base = plan.root / "base"
    with plan.display.phase("pretrain", PRETRAIN_STEPS) as bar:
        pretrain(
            base,
            seed=plan.seed,
            steps=PRETRAIN_STEPS,
            progress=lambda step, _, loss: bar.at(step, f"loss {loss:.2f}"),
            text=transcripts,
        )
        bar.at(PRETRAIN_STEPS)
    with Seaweed(plan.root / "store") as store, ExitStack() as stack:
        run = _Run(plan, store)
        running = run.start(stack)
        running.trainer.wait(TRAIN_S)
        return _evaluate(plan, running, run, start)


class _Run:
    def __init__(self, plan: RunOptions, store: Seaweed) -> None:
        self.plan, self.store = plan, store
        self.url, self.token = store.url("policy"), secrets.token_urlsafe(16)
        self.base, self.folder = plan.root / "base", plan.root / "trainer"
        self.engine, self.environment = (f"http://{HOST}:{free_port()}" for _ in range(2))
        self.steps: list[dict[str, Any]] = []
        self.pauses: dict[int, float] = {}
        self._running: Running | None = None

    def start(self, stack: ExitStack) -> Running:
        plan, say = self.plan, self.plan.display.say
        self.folder.mkdir(parents=True)
        environment = stack.enter_context(self._environment())
        replica = stack.enter_context(self._replica())
        up = until(lambda: answers(f"{self.environment}/healthz"), environment, START_S)
        say(f"  [cyan]environment[/] plays at {self.environment} ({up:.0f} s)")
        up = until(lambda: answers(f"{self.engine}/health"), replica, START_S)
        say(f"  [cyan]replica[/] a stock {plan.kind} serves at {self.engine} ({up:.0f} s)")
        if plan.dashboard:
            self._open_dashboard(stack)
        stack.enter_context(self._watching())
        trainer = self._service()
        self._running = Running(
            store=self.store, environment=environment, replica=replica, trainer=trainer
        )
        stack.enter_context(trainer)
        return self._running

    def _environment(self) -> Service:
        folder, port = ENVIRONMENT, self.environment.rpartition(":")[2]
        server = [sys.executable, str(folder / "server.py"), "--host", HOST, "--port", port]
        return Service("environment", server, self.plan.root / "logs", {})

    def _replica(self) -> Service:
        plan, port = self.plan, int(self.engine.rpartition(":")[2])
        given = {
            "DELTACHAIN_URL": self.url,
            "DELTACHAIN_TOKEN": self.token,
            "DELTACHAIN_SPOOL": str(plan.root / "spool"),
        }
        started = command(plan.kind, plan.python, self.base, port)
        environment = variables(plan.kind) | self.store.env() | given
        return Service("replica", started, plan.root / "logs", environment)

    def _open_dashboard(self, stack: ExitStack) -> None:
        url = f"http://{HOST}:{free_port()}"
        page = Service(
            "dashboard",
            dashboard_command(self.url, self.engine, url),
            self.plan.root / "logs",
            self.store.env() | {"DELTACHAIN_TOKEN": self.token, "PYTHONPATH": str(ROOT)},
        )
        stack.enter_context(page)
        until(lambda: answers(url), page, START_S)
        self.plan.display.say(f"  [cyan]dashboard[/] of this run at {url}/#token={self.token}")

    def _service(self) -> Service:
        file = self.folder / "orders.json"
        TrainerOptions(
            checkpoint=str(self.base),
            url=self.url,
            engine=self.engine,
            kind=self.plan.kind,
            environment=self.environment,
            folder=str(self.folder),
            steps=self.plan.steps,
            seed=self.plan.seed,
            token=self.token,
        ).write(file)
        module = [sys.executable, "-m", "examples.demo.online.trainer", str(file)]
        return Service(
            "trainer",
            module,
            self.plan.root / "logs",
            self.store.env() | {"PYTHONPATH": str(ROOT)},
            forever=False,
            heard=self._heard,
        )

    def _heard(self, line: str) -> None:
        with suppress(ValueError):  # output of libraries, not JSON
            event = json.loads(line)
            if event["event"] == "step":
                self.steps.append(event)
                self._show(event)
                if self._running is not None:
                    self.plan.at_step(event["step"], self._running)

    def _show(self, event: dict[str, Any]) -> None:
        late = f"  [yellow]behind: {', '.join(event['late'])}[/]" if event["late"] else ""
        self.plan.display.say(
            f"  step {event['step']:>3} of {self.plan.steps}  reward {event['reward']:.3f}  "
            f"[dim]version {event['version']}, sync {event['sync_s'] or 0:.2f} s[/]{late}"
        )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Note how long the replica pauses for each version."""
        stop = Event()

        def watch() -> None:
            with ReplicaClient(self.engine, token=self.token, timeout_s=5) as client:
                while not stop.wait(LOOK_S):
                    with suppress(ControlPlaneError):
                        last = client.status().last
                        if last is not None and last["previous"] is not None:
                            self.pauses[last["version"]] = last["pause_s"]

        thread = Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _evaluate(plan: RunOptions, running: Running, run: _Run, start: float) -> OnlineReport:
    manifests = manifests_in(open_store(run.url, run.store.options))
    head, bytes_of, diary = manifests[-1], sent(manifests), diary_of(run.folder)
    dense = sum(spec.nbytes for spec in Checkpoint(run.base).specs.values())
    staleness, rewards, newcomer = staleness_of(diary), rewards_of(diary), _join_late(run)
    pauses = [1e3 * seconds for seconds in run.pauses.values()] or [0.0]
    syncs = [event["sync_s"] for event in run.steps if event["sync_s"]] or [0.0]
    services = (running.environment, running.replica, running.trainer)
    return OnlineReport(
        engine=plan.kind,
        versions=head.version + 1,
        mismatching_bits=_mismatching_bits(run),
        late_joiner_bytes=newcomer.nbytes,
        late_joiner_plan=newcomer.plan,
        replica_agrees=_agrees(run, head),
        bytes_sent=bytes_of.deltas,
        anchor_bytes=bytes_of.anchors,
        bytes_dense=dense * (head.version + 1),
        verified=verify(run.url, run.store.env(), plan.display),
        seconds=time.monotonic() - start,
        parameters=head.numel,
        samples=len(diary.read_text(encoding="utf-8").splitlines()),
        tokens=len(staleness),
        unknown_versions=unknown_in(diary),
        reward_first=rewards.first,
        reward_last=rewards.last,
        reward_error=rewards.error,
        staleness_p50=statistics.median(staleness),
        staleness_max=max(staleness),
        pause_ms_p50=statistics.median(pauses),
        pause_ms_max=max(pauses),
        sync_s_p50=statistics.median(syncs),
        deaths={service.name: service.deaths for service in services},
    )


def _agrees(run: _Run, head: Manifest) -> bool:
    """Verify the replica's live weights; return whether they have the trainer's last state."""
    with ReplicaClient(run.engine, token=run.token) as client:
        client.update(head.version)
        status = client.scrub()
    return (status.version, status.state) == (head.version, head.state) and not status.poisoned


def _join_late(run: _Run) -> ApplyReceipt:
    folder = _newcomer(run)
    with Subscriber(run.url, folder, store=open_store(run.url, run.store.options)) as subscriber:
        receipt = subscriber.update()
    if receipt is None:
        raise DemoError("the late joiner found no version")
    return receipt


def _mismatching_bits(run: _Run) -> int:
    """Compare the late joiner's weights with the trainer's last bits."""
    return compare("a late joiner", bits_of(run.folder), _newcomer(run)).mismatching_bits


def _newcomer(run: _Run) -> Path:
    return run.plan.root / "newcomer"


def dashboard_command(chain: str, engine: str, url: str) -> list[str]:
    listen = url.rpartition("/")[2]
    words = ["spaces.dashboard", chain, "--engine", engine, "--listen", listen]
    return [sys.executable, "-m", *words]


def answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2, trust_env=False).status_code == httpx.codes.OK
    return False
