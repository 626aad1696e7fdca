"""Totals of all runs of a diary: accidents, answers, alerts, and what was not explained."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Final

import httpx

from spaces.dashboard.watcher import AlertKind
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
                if not names or found["event"] in names:
                    yield found


AFTER_S: Final = 1.0
"""Seconds after a recovery within which a request that was refused meanwhile may be noted."""


@dataclass(slots=True)
class Totals:
    """What is counted over all runs of a diary."""

    minutes: float
    answers: int
    judged: int
    tokens: int
    versions: int
    taken_over: int
    told_apart: list[bool]
    accidents: Counter[str]
    recoveries: list[float]
    failures: list[tuple[float, str]]


def totals_of(diary: Diary) -> Totals:
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in diary.events():
        events[event["event"]].append(event)
    accidents = Counter(one["kind"] for one in events["accident"])
    accidents.subtract(one["kind"] for one in events["void"])
    minutes: dict[int, float] = defaultdict(float)
    for one in events["minute"]:
        minutes[one["run"]] = max(minutes[one["run"]], one["minutes"])
    apart = [one["told_apart"] for one in events["verdict"] if one["told_apart"] is not None]
    return Totals(
        minutes=sum(minutes.values()),
        answers=len(events["answer"]),
        judged=len(events["verdict"]),
        tokens=sum(len(one["tokens"]) for one in events["answer"]),
        versions=sum(one["head"] - one["first"] for one in events["end"]),
        taken_over=sum(one["taken_over"] for one in events["end"]),
        told_apart=apart,
        accidents=+accidents,
        recoveries=sorted(one["seconds"] for one in events["recovered"]),
        failures=sorted(failures(events)),
    )


def failures(events: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[float, str]]:
    yield from ((one["time"], one["what"]) for one in events["failure"])
    for one in events["verdict"]:
        if one["unexplained"]:
            what = f"unexplained answer of {one['engine']}: {one['unexplained']}"
            yield one["time"], what
    troubled, rolled_back = troubles(events), troubles(events, "roll back")
    for one in events["refused"]:
        if not is_within(troubled, one["asked"], one["time"]):
            what = f"{one['engine']} refused a request though nothing was wrong: {one['why']}"
            yield one["time"], what
    for one in events["answer"]:
        labels = [int(label) for _, _, label in one["spans"] if label.isdecimal()]
        if labels != sorted(labels) and not is_within(rolled_back, one["asked"], one["answered"]):
            yield one["answered"], f"{one['engine']} went back without a rollback: {labels}"
    if left := len(events["answer"]) - len(events["verdict"]):
        yield events["answer"][-1]["time"], f"{left:,} answers were not computed anew"


def is_within(spans: Sequence[tuple[float, float]], first: float, last: float) -> bool:
    return any(start <= last and first <= end for start, end in spans)


def troubles(
    events: Mapping[str, list[dict[str, Any]]], kind: str = ""
) -> Sequence[tuple[float, float]]:
    begins = [(one["time"], True) for one in events["accident"] if kind in ("", one["kind"])]
    unwell = [one for one in events["failure"] if "not well" in one["what"]]
    ends = [(one["time"], False) for one in (*events["recovered"], *unwell)]
    found, start = [], None
    for when, begun in sorted([*begins, *ends]):
        if begun and start is None:
            start = when
        elif not begun and start is not None:
            found.append((start, when + AFTER_S))
            start = None
    return found if start is None else [*found, (start, float("inf"))]


def lines(found: Totals) -> list[str]:
    kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(found.accidents.items()))
    recoveries = found.recoveries or [0.0]
    return [
        f"{found.minutes:.1f} minutes, {found.versions:,} versions, "
        f"the chain was taken over {found.taken_over:,} times",
        f"{found.answers:,} answers, {found.tokens:,} tokens; {found.judged:,} were computed anew",
        f"{sum(found.told_apart):,} of {len(found.told_apart):,} answers tried: "
        "the version before would have answered otherwise",
        f"{found.accidents.total():,} accidents: {kinds or 'none'}",
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
