"""The run: every way in turn over the same network, the same store and the same changes."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from rich.table import Table

from tests.bench import report
from tests.bench.cross_region.network import (
    REPLICAS,
    STORE,
    TRAINER,
    CrossRegionError,
    Network,
    NetworkPlan,
    Place,
)
from tests.bench.cross_region.roles import Scene
from tests.bench.report import say

ROOT: Final = Path(__file__).resolve().parents[3]
STOP_S: Final = 10.0
FAILED_STOP_S: Final = 1.0
_TAIL: Final = 2000

Answer: TypeAlias = Mapping[str, Any]


class Process:
    def __init__(
        self,
        plan: NetworkPlan,
        place: str,
        role: str,
        order: Mapping[str, Any],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"{role} at {place}"
        self._log = log
        command = plan.inside(place, (sys.executable, "-m", "tests.bench.cross_region.roles", role))
        with log.open("ab") as errors:
            # In a session of its own: Ctrl-C is for the one who can take everything down in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.order(**order)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(STOP_S if exc is None else FAILED_STOP_S)

    def order(self, **values: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # its answer, which will not come, is missed by name
            pipe.write(json.dumps(values) + "\n")
            pipe.flush()

    def answer(self, timeout_s: float) -> Answer:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"said nothing for {timeout_s} s") from None
        if not line:
            raise self._failed("ended too early")
        found: Answer = json.loads(line)
        return found

    def _failed(self, what: str) -> CrossRegionError:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
        return CrossRegionError(f"the {self.name} {what}\n{tail}")

    def stop(self, patience_s: float = STOP_S) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        for insist in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                insist()
        self._process.wait()
        self._reading.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


START_S: Final = 120.0
VERSION_S: Final = 120.0

WARM_UP: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    version: int
    sent_s: float
    served_s: Mapping[str, float]
    sent_nbytes: int
    received_nbytes: Mapping[str, int]
    mismatches: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Run:
    network: Network
    scene: Scene
    folder: Path
    url: str
    endpoint: str
    env: Mapping[str, str]
    poll_s: float

    @contextmanager
    def way(self, way: str) -> "Iterator[Cast]":
        slug = way.replace(" ", "-").replace(",", "")
        order = {
            "scene": str(self.scene.folder),
            "way": way,
            "url": f"{self.url}/{slug}",
            "poll_s": self.poll_s,
        }
        with ExitStack() as stack:

            def start(role: str, place: Place) -> Process:
                log = self.folder / f"{slug}-{place.name}.log"
                proxy = Process(
                    self.network.plan,
                    place.name,
                    "proxy",
                    {"endpoint": self.endpoint, "delay_s": place.link.delay_s},
                    log=log,
                )
                stack.enter_context(proxy)
                env = {**self.env, "AWS_ENDPOINT_URL": proxy.answer(START_S)["endpoint"]}
                made = Process(self.network.plan, place.name, role, order, log=log, env=env)
                return stack.enter_context(made)

            trainer = start(TRAINER.name, TRAINER)
            replicas = {place.name: start("replica", place) for place in REPLICAS}
            trainer.answer(START_S)
            for replica in replicas.values():
                replica.answer(START_S)
            yield Cast(self.network, trainer, replicas)


@dataclass(frozen=True, slots=True)
class Cast:
    network: Network
    trainer: Process
    replicas: Mapping[str, Process]

    def version(self, number: int) -> Sample:
        before = {name: self.network.counted(name) for name in (TRAINER.name, *self.replicas)}
        for replica in self.replicas.values():
            replica.order(receive=number)
        self.trainer.order(step=number)
        sent = self.trainer.answer(VERSION_S)
        served = {name: one.answer(VERSION_S)["served"] for name, one in self.replicas.items()}
        moved = {name: self.network.counted(name).since(then) for name, then in before.items()}
        for replica in self.replicas.values():
            replica.order(compare=number)
        return Sample(
            version=number,
            sent_s=sent["sent"] - sent["stepped"],
            served_s={name: at - sent["stepped"] for name, at in served.items()},
            sent_nbytes=moved[TRAINER.name].sent,
            received_nbytes={name: moved[name].received for name in self.replicas},
            mismatches={
                name: one.answer(VERSION_S)["mismatches"] for name, one in self.replicas.items()
            },
        )


@contextmanager
def opened(network: Network, scene: Scene, folder: Path, *, poll_s: float) -> Iterator[Run]:
    plan = network.plan
    order = {"folder": str(folder / "store"), "host": plan.address(STORE.name)}
    with Process(plan, STORE.name, "store", order, log=folder / "store.log") as store:
        ready = store.answer(START_S)
        env = dict(ready["env"])
        endpoint = env.pop("AWS_ENDPOINT_URL")
        yield Run(network, scene, folder, ready["url"], endpoint, env, poll_s)


def measure(run: Run, ways: Sequence[str], *, versions: int) -> dict[str, list[Sample]]:
    return {way: _measure(run, way, versions) for way in ways}


def _measure(run: Run, way: str, versions: int) -> list[Sample]:
    say(f"{way}: version 0")
    found: list[Sample] = []
    with run.way(way) as cast:
        for number in range(1, WARM_UP + versions + 1):
            sample = cast.version(number)
            times = ", ".join(f"{name} {took:.3f} s" for name, took in sample.served_s.items())
            say(f"{way}: version {number} of {WARM_UP + versions}: {times}")
            if number > WARM_UP:
                found.append(sample)
    return found


Samples: TypeAlias = Mapping[str, Sequence[Sample]]
"""Way -> its versions."""


def rows(samples: Samples) -> list[dict[str, Any]]:
    """Every way at every replica: medians of seconds and bytes, all mismatches."""
    return [_row(way, place.name, found) for place in REPLICAS for way, found in samples.items()]


def _row(way: str, replica: str, samples: Sequence[Sample]) -> dict[str, Any]:
    seconds = [sample.served_s[replica] for sample in samples]
    deciles = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds
    return {
        "way": way,
        "replica": replica,
        "median_s": median(seconds),
        "p90_s": deciles[-1],
        "sent_s": median(sample.sent_s for sample in samples),
        "sent_nbytes": median(sample.sent_nbytes for sample in samples),
        "received_nbytes": median(sample.received_nbytes[replica] for sample in samples),
        "mismatches": sum(sample.mismatches[replica] for sample in samples),
    }


def document(samples: Samples, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "benchmark": "cross-region",
        **settings,
        "links": {place.name: asdict(place.link) for place in (TRAINER, *REPLICAS)},
        "rows": rows(samples),
        "samples": {way: [asdict(one) for one in found] for way, found in samples.items()},
        "machine": report.machine(),
    }


def tables(samples: Samples) -> list[Table]:
    columns = ("", "median s", "p90 s", "sent s", "MB sent", "MB received", "mismatches")
    made = []
    for place in REPLICAS:
        table = report.grid(f"Replica {place.name}: {place.link} round trip", *columns)
        for row in rows(samples):
            if row["replica"] == place.name:
                seconds = (f"{row[name]:.2f}" for name in ("median_s", "p90_s", "sent_s"))
                sizes = (f"{row[name] / 1e6:.2f}" for name in ("sent_nbytes", "received_nbytes"))
                table.add_row(row["way"], *seconds, *sizes, f"{row['mismatches']:,}")
        made.append(table)
    return made
