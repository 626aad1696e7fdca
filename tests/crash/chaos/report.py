"""Totals of all runs of a diary: accidents, answers, alerts, and what was not explained."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Final

import httpx

from deltachain.dashboard.watcher import AlertKind
from tests.crash.chaos.scene import MAX_LAG, MAX_SILENCE_S


class Diary:
    """Appends events to a file, from any thread, and reads those of all runs."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        before = path.read_bytes()
        if before and not before.endswith(b"\n"):
            self._append("\n")

    def note(self, event: str, **facts: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts})
        self._append(f"{line}\n")

    def _append(self, text: str) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(text)

    def events(self, *names: str) -> Iterator[dict[str, Any]]:
        with self._path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if found["event"] in names:
                    yield found


AFTER_S: Final = 1.0
"""Seconds after a recovery within which a request that was refused meanwhile may be noted."""

EVENTS: Final = (
    "begin",
    "end",
    "accident",
    "void",
    "passed",
    "recovered",
    "unwell",
    "failure",
    "answer",
    "verdict",
    "refused",
    "alert raised",
    "alert cleared",
    "minute",
)


@dataclass(slots=True)
class Totals:
    """Everything that is counted over all runs of a diary."""

    minutes: float = 0.0
    longest: float = 0.0
    versions: int = 0
    taken_over: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    judged: int = 0
    tokens: int = 0
    several: int = 0
    refused: int = 0
    told_apart: tuple[int, int] = (0, 0)
    accidents: Counter[str] = field(default_factory=Counter)
    void: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    cleared: Counter[str] = field(default_factory=Counter)
    expected: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    failures: list[tuple[float, str]] = field(default_factory=list)


def totals_of(diary: Diary) -> Totals:
    found, by_name = Totals(), dict[str, list[dict[str, Any]]]()
    for event in diary.events(*EVENTS):
        by_name.setdefault(event["event"], []).append(event)
        take(found, event)
    troubled, rolled_back = troubles(by_name), troubles(by_name, "roll back")
    for one in by_name.get("refused", []):
        if is_within(troubled, one["asked"], one["time"]):
            found.refused += 1
        else:
            what = f"{one['engine']} refused a request though nothing was wrong: {one['why']}"
            found.failures.append((one["time"], what))
    for one in by_name.get("answer", []):
        labels = [int(label) for _, _, label in one["spans"] if label.isdecimal()]
        if labels != sorted(labels) and not is_within(rolled_back, one["asked"], one["answered"]):
            what = f"{one['engine']} went back without a rollback: {labels}"
            found.failures.append((one["answered"], what))
    if left := found.answers.total() - found.judged:
        when = by_name["answer"][-1]["time"]
        found.failures.append((when, f"{left:,} answers were not computed anew"))
    found.failures.sort()
    runs = Counter[int]()
    for one in by_name.get("minute", []):
        runs[one["run"]] = max(runs[one["run"]], one["minutes"])
    found.minutes, found.longest = sum(runs.values()), max(runs.values(), default=0.0)
    return found


def take(found: Totals, event: dict[str, Any]) -> None:  # noqa: C901 - a case an event
    match event["event"]:
        case "answer":
            found.answers[event["engine"]] += 1
            found.tokens += len(event["tokens"])
            found.several += len(event["spans"]) > 1
        case "verdict":
            take_verdict(found, event)
        case "failure":
            found.failures.append((event["time"], event["what"]))
        case "accident":
            found.accidents[event["kind"]] += 1
        case "void":
            found.accidents[event["kind"]] -= 1
            found.void[event["kind"]] += 1
        case "alert raised":
            found.raised[event["kind"]] += 1
        case "alert cleared":
            found.cleared[event["kind"]] += 1
        case "recovered":
            found.recoveries.append(event["seconds"])
        case "passed":
            found.expected += event["alert"]
        case "end":
            found.restarts.update(event["restarts"])
            found.versions += event["head"] - event["first"]
            found.taken_over += event["taken_over"]


def take_verdict(found: Totals, event: dict[str, Any]) -> None:
    found.judged += 1
    if (apart := event["told_apart"]) is not None:
        found.told_apart = (found.told_apart[0] + apart, found.told_apart[1] + 1)
    if event["unexplained"]:
        what = f"unexplained answer of {event['engine']}: {event['unexplained']}"
        found.failures.append((event["time"], what))


def is_within(spans: Sequence[tuple[float, float]], first: float, last: float) -> bool:
    return any(start <= last and first <= end for start, end in spans)


def troubles(
    by_name: dict[str, list[dict[str, Any]]], kind: str = ""
) -> Sequence[tuple[float, float]]:
    marks = sorted(
        [
            *(
                (one["time"], "on")
                for one in by_name.get("accident", [])
                if kind in ("", one["kind"])
            ),
            *((one["time"], "off") for one in by_name.get("recovered", [])),
            *(
                (one["time"], "off")
                for one in by_name.get("failure", [])
                if "not well" in one["what"]
            ),
        ]
    )
    found, start = [], None
    for when, what in marks:
        if what == "on" and start is None:
            start = when
        elif what == "off" and start is not None:
            found.append((start, when + AFTER_S))
            start = None
    return found if start is None else [*found, (start, float("inf"))]


def lines(found: Totals) -> list[str]:
    def counted(numbers: Counter[str]) -> str:
        return ", ".join(f"{name} {count:,}" for name, count in sorted(numbers.items())) or "none"

    recoveries = sorted(found.recoveries) or [0.0]
    right, tried = found.told_apart
    return [
        f"{found.minutes:.1f} minutes, {found.longest:.1f} of them in one run",
        f"{found.versions:,} versions, the chain was taken over {found.taken_over:,} times",
        f"{sum(found.answers.values()):,} answers ({counted(found.answers)}), "
        f"{found.tokens:,} tokens, {found.several:,} answers of several versions; "
        f"{found.judged:,} were computed anew",
        f"{right:,} of {tried:,} answers tried: the version before would have answered otherwise",
        f"{found.refused:,} requests failed while an accident was on",
        f"{sum(found.accidents.values()):,} accidents: {counted(found.accidents)}",
        f"not possible: {counted(found.void)}",
        f"alerts raised: {counted(found.raised)}",
        f"alerts cleared: {counted(found.cleared)}",
        f"alerts that had to be shown: {found.expected:,}",
        f"started again: {counted(found.restarts)}",
        f"well again: median {recoveries[len(recoveries) // 2]:.1f} s, "
        f"longest {recoveries[-1]:.1f} s",
        f"{len(found.failures):,} failures",
    ]


LOOK_S: Final = 0.5
SLACK_S: Final = 1.0
"""Seconds by which a replica's silence may exceed the limit while it still says ready."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One alert on the dashboard: when it was first and last seen."""

    kind: str
    engine: str
    first: float
    last: float


class Watch:
    def __init__(self, url: str, names: Mapping[str, str], diary: Diary, stop: Event) -> None:
        self._url, self._names, self._diary, self._stop = url, names, diary, stop
        self._lock = Lock()
        self._open: dict[tuple[str, str], Shown] = {}
        self._closed: list[Shown] = []
        self._overview: dict[str, Any] = {}
        self._answered = 0.0
        self._said: set[str] = set()
        self._thread = Thread(target=self._look, name="watch")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    @property
    def is_up(self) -> bool:
        return time.time() - self._answered < 10 * LOOK_S

    @property
    def open_alerts(self) -> list[Shown]:
        with self._lock:
            return list(self._open.values())

    def is_well(self, head: int) -> str:
        if not self.is_up:
            return "the dashboard does not answer"
        with self._lock:
            overview = self._overview
        for one in overview["replicas"]:
            name, version = self._names[one["engine"]], one["version"]
            if one["trouble"] or one["error"] or not one["ready"]:
                return f"{name}: {one['trouble'] or one['error'] or one['reason']}"
            if version is None or version < head:
                return f"{name} holds version {version}, expected {head} or later"
        return "; ".join(f"{one['kind']}: {one['message']}" for one in overview["alerts"])

    def saw(self, kinds: Iterable[AlertKind], engine: str, since: float) -> bool:
        wanted = {str(kind) for kind in kinds}
        with self._lock:
            every = [*self._closed, *self._open.values()]
        return any(
            one.kind in wanted and one.engine == engine and one.last >= since for one in every
        )

    def _look(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10, trust_env=False) as client:
            while not self._stop.wait(LOOK_S):
                try:
                    found = client.get("/api/overview").raise_for_status().json()
                except (httpx.HTTPError, ValueError):
                    continue
                self._take(found, time.time())

    def _take(self, found: Mapping[str, Any], now: float) -> None:
        with self._lock:
            self._overview, self._answered = dict(found), now
            alerts = {(one["kind"], one["engine"]): one["message"] for one in found["alerts"]}
            for key in self._open.keys() - alerts.keys():
                gone = self._open.pop(key)
                self._closed.append(gone)
                self._note("alert cleared", gone, seconds=round(now - gone.first, 1))
            for key, message in alerts.items():
                before = self._open.get(key)
                self._open[key] = Shown(*key, before.first if before else now, now)
                if before is None:
                    self._note("alert raised", self._open[key], message=message)
        for one in found["replicas"]:
            self._check(one)

    def _note(self, event: str, alert: Shown, **facts: Any) -> None:
        engine = self._names.get(alert.engine, alert.engine)
        self._diary.note(event, kind=alert.kind, engine=engine, **facts)

    def _check(self, replica: Mapping[str, Any]) -> None:
        if replica["trouble"] or not replica["ready"] or replica["pinned"]:
            return
        silence_s, head, version = (replica[name] for name in ("silence_s", "head", "version"))
        why = ""
        if silence_s is not None and silence_s > MAX_SILENCE_S + SLACK_S:
            why = f"ready, though its store has been silent for {silence_s:.1f} s"
        if head is not None and version is not None:
            why = f"ready, {head - version} versions behind" if head - version > MAX_LAG else why
        if why and why not in self._said:
            self._said.add(why)
            self._diary.note("failure", what=f"{self._names[replica['engine']]} {why}")
