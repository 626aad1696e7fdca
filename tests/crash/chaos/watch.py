"""What the dashboard shows during a run: alerts, and whether replicas rightly say ready."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any, Final

import httpx

from deltachain.dashboard.watcher import AlertKind
from tests.crash.chaos.report import Diary
from tests.crash.chaos.scene import MAX_LAG, MAX_SILENCE_S

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
