"""Figures: numbers that publishers, replicas, followers and mirrors show to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from deltachain.version import __version__

GAUGES: Final[Mapping[str, str]] = {
    "info": "Version of deltachain, engine or part of deltachain, and chain; always 1.",
    "version": "Version held, committed or copied last; absent for none.",
    "head_version": "Newest version seen or announced.",
    "lag_versions": "Versions behind the newest seen or announced.",
    "ready": "Whether it is ready for requests.",
    "paused": "Whether generation is paused.",
    "pinned": "Whether a rollback keeps it at its version.",
    "poisoned": "Whether the state of the weights is unknown.",
    "last_look_timestamp_seconds": "Time at which the store last answered.",
    "last_apply_timestamp_seconds": "Time at which a version was last swapped in or copied.",
    "commit_timestamp_seconds": "Time of the version's commit, on the publisher's clock.",
    "silence_seconds": "Seconds since the store last answered, of whoever follows by itself.",
    "phase_seconds": "Seconds of a phase of the newest version.",
    "epoch": "Epoch of the publisher.",
    "changed_ratio": "Changed share of all elements in the newest version.",
    "presence_timestamp_seconds": "Time at which its presence was last written.",
    "left_out_payloads": "Payloads that the source of a mirror does not have any more.",
}
"""Metrics that may fall: what they mean, by name without ``deltachain_``."""

COUNTERS: Final[Mapping[str, str]] = {
    "applies": "Versions applied or copied.",
    "commits": "Versions committed.",
    "failures": "Failed polls, updates, rollbacks, commits and rounds of a mirror.",
    "fetched_bytes": "Bytes fetched.",
    "written_elements": "Elements written.",
    "fetch_seconds": "Seconds of fetching.",
    "stage_seconds": "Seconds of decoding and verification.",
    "swap_seconds": "Seconds of writing.",
    "pause_seconds": "Seconds without generation during swaps.",
    "published_bytes": "Bytes of the objects of all committed versions.",
    "changed_elements": "Elements changed in all committed versions.",
    "diff_seconds": "Seconds of diffs, which block the training loop.",
    "encode_seconds": "Seconds of encoding and uploading.",
    "upload_seconds": "Seconds in which something was uploaded.",
    "commit_seconds": "Seconds of commits.",
    "copied_objects": "Objects copied.",
    "copied_bytes": "Bytes copied.",
    "presence_failures": "Failed writes of its presence.",
    "store_requests": "Requests to the store, as its provider counts them.",
}
"""Metrics that only grow while a process lives, by name without ``deltachain_`` and ``_total``."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str  # name of the metric, in GAUGES or COUNTERS
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_counter(self) -> bool:
        return self.name in COUNTERS

    @property
    def about(self) -> str:
        return COUNTERS[self.name] if self.is_counter else GAUGES[self.name]


FigureSource: TypeAlias = Callable[[], Iterable[Figure]]  # from any thread


def figures(values: Mapping[str, float | None]) -> Iterator[Figure]:
    return (Figure(name, value) for name, value in values.items() if value is not None)


def info(*, engine: str, chain: str | None) -> Figure:
    labels = {"version": __version__, "engine": engine, "chain": chain or ""}
    return Figure("info", 1, labels)


def phases(seconds: Mapping[str, float]) -> Iterator[Figure]:
    return (Figure("phase_seconds", value, {"phase": name}) for name, value in seconds.items())
