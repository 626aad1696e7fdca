"""Chaos: accidents happen for hours to a trainer, a maintainer and two real engines that follow it.

::

    python -m tests.crash.chaos --minutes 120 --folder chaos --seed 1

A version a second goes through a real S3 server into stock vLLM and SGLang servers, which are asked
for greedy tokens all the time. Each answer names its versions and is computed anew with the
trainer's own bits of these. A real dashboard watches, and must show what is wrong, and nothing once
it is put right. Every event is a line of ``diary.jsonl`` in the folder. Started again with the same
folder it goes on, and the minutes of all runs count. Ctrl-C ends it; nothing is lost.

Needs ``make venv-vllm venv-sglang``. Exits with 1 if a token was not explained, a replica did not
recover, or an alert was not shown.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event
from typing import Final

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError
from tests.crash.chaos.accidents import Accident, Deck, epoch_of, happen
from tests.crash.chaos.load import Load, Record
from tests.crash.chaos.report import Diary, Watch, lines, totals_of
from tests.crash.chaos.scene import Scene, leash
from tests.engines.trainer import make_batches, one_thread, pretrain

START_S: Final = 600.0
RECOVERY_S: Final = 900.0
"""Seconds after the last accident within which every replica must be well: engines start anew."""

VERIFIED: Final = 200

QUIET_S: Final = (2.0, 8.0)
LOOK_S: Final = 0.5
MINUTE: Final = 60.0


class Run:
    def __init__(self, scene: Scene, diary: Diary, seed: int, number: int, stop: Event) -> None:
        self._scene, self._diary, self._stop = scene, diary, stop
        self._seed, self._number = seed, number
        self._dice = Random(f"{seed} accidents {number}")
        self._deck = Deck(scene, self._dice)
        self._over, self._start = Event(), time.monotonic()
        names = {one.url: one.kind for one in scene.engines.values()}
        self._watch = Watch(scene.dashboard_url, names, diary, self._over)

    def go(self, minutes: float) -> None:
        scene, diary = self._scene, self._diary
        self._watch.start()
        try:
            self._wait_until_well(START_S, 1, "the start")
            with scene.opened() as store:
                record = Record(store, scene.base, scene.weights, self._over)
                first, epoch = record.chain.newest(0), epoch_of(record.chain)
                engines = list(scene.engines.values())
                load = Load(engines, record, diary, self._over, f"{self._seed} {self._number}")
                self._start = time.monotonic()
                about = {"run": self._number, "first": first, "epoch": epoch}
                diary.note("begin", seed=self._seed, **about)
                load.start()
                try:
                    self._rounds(minutes)
                    self._settle(record.chain, about)
                finally:
                    self._over.set()
                    load.join()
        finally:
            self._over.set()
            self._watch.join()

    def _rounds(self, minutes: float) -> None:
        last = 0.0
        while not self._stop.is_set() and self._minutes() < minutes:
            self._stop.wait(self._dice.uniform(*QUIET_S))
            self._round(self._deck.draw())
            if self._minutes() - last >= 1:
                last = self._minutes()
                say(f"{last:6.1f} min  version {self._head():,}")
        self._diary.note("minute", run=self._number, minutes=self._minutes())

    def _round(self, accidents: list[Accident]) -> None:
        since, head = time.time(), self._head()
        for one in accidents:
            what = {"kind": one.kind, "detail": one.detail, "seconds": round(one.seconds, 1)}
            self._diary.note("accident", **what)
            say(f"{self._minutes():6.1f} min  {one.kind} {one.detail} {one.seconds:.0f} s")
        with ThreadPoolExecutor(len(accidents)) as pool:
            void = list(pool.map(self._happen, accidents))
        end = self._head()
        for one, why in zip(accidents, void, strict=True):
            if why:
                self._diary.note("void", kind=one.kind, why=why)
                say(f"        not possible: {why}")
        if self._wait_until_well(RECOVERY_S, end + 1, ", ".join(one.kind for one in accidents)):
            watched = not any(one.parties == {"dashboard"} for one in accidents)
            for one, why in zip(accidents, void, strict=True):
                if watched and not why:
                    self._check_alert(one, since, end - head)
        self._diary.note("minute", run=self._number, minutes=self._minutes())

    def _happen(self, one: Accident) -> str:
        try:
            return happen(one, self._stop)
        except Exception as error:  # noqa: BLE001 - noted; the run goes on
            self._fail(f"{one.kind} {one.detail} cannot be put right: {error!r}")
            return repr(error)

    def _check_alert(self, one: Accident, since: float, versions: int) -> None:
        must = bool(one.alerts) and versions >= one.versions
        if must and not self._watch.saw(one.alerts, one.engine, since):
            kinds = " or ".join(one.alerts)
            self._fail(f"the dashboard did not show {kinds} of {one.kind} {one.detail}")

    def _wait_until_well(self, seconds: float, head: int, after: str) -> bool:
        start, why = time.monotonic(), "not asked yet"
        while time.monotonic() - start < seconds and not self._stop.is_set():
            why = self._watch.is_well(head)
            if not why:
                took = time.monotonic() - start
                self._diary.note("recovered", after=after, seconds=round(took, 1))
                return True
            time.sleep(LOOK_S)
        if not self._stop.is_set():
            self._fail(f"not well {seconds:.0f} s after {after}: {why}")
        return False

    def _settle(self, chain: Chain, about: dict[str, int]) -> None:
        scene = self._scene
        scene.trainer.__exit__(None, None, None)
        head = chain.head()
        if head is None:
            return self._fail("the chain has no version")
        if self._wait_until_well(RECOVERY_S, head.version, "the end"):
            for one in scene.engines.values():
                status = one.client.scrub()
                if (status.version, status.state) != (head.version, head.manifest.state):
                    self._fail(f"{one.kind} proves version {status.version}, {status.state}")
        command = [sys.executable, "-m", "deltachain", "verify", scene.url]
        command += ["--from", str(max(0, head.version - VERIFIED))]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=scene.direct
        )
        (scene.folder / "verify.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            self._fail(f"deltachain verify exits with {done.returncode}")
        took = head.manifest.epoch - about["epoch"]
        self._diary.note("end", **about, head=head.version, taken_over=took)
        return None

    def _head(self) -> int:
        deadline = time.monotonic() + RECOVERY_S
        while True:
            try:
                with self._scene.opened() as store:
                    return Chain.open(store).newest(0)
            except DeltaChainError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_S)

    def _fail(self, what: str) -> None:
        self._diary.note("failure", what=what)
        say(f"FAILURE: {what}")

    def _minutes(self) -> float:
        return (time.monotonic() - self._start) / MINUTE


def say(words: str) -> None:
    print(words, flush=True)  # noqa: T201 - a command


def run(folder: Path, minutes: float, seed: int) -> int:
    folder = folder.absolute()
    diary, base, stop = Diary(folder / "diary.jsonl"), folder / "base", Event()
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: stop.set())
    if not (base / "config.json").exists():
        with one_thread():
            pretrain("qwen3", base, make_batches(seed), seed)
    before = totals_of(diary)
    left = minutes - before.minutes
    number = max((one["run"] for one in diary.events("begin")), default=-1) + 1
    if left > 0:
        os.environ["OMP_NUM_THREADS"] = "1"
        with leash(f"{folder} {number}"), Scene(folder, base) as scene:
            Run(scene, diary, seed, number, stop).go(left)
    found = totals_of(diary)
    for line in lines(found):
        say(line)
    for when, what in found.failures:
        clock = time.strftime("%H:%M:%S", time.gmtime(when))
        say(f"FAILURE at {clock} UTC, seed {seed}: {what}")
    return int(bool(found.failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--folder", type=Path, default=Path("chaos"))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    raise SystemExit(run(given.folder, given.minutes, given.seed))
