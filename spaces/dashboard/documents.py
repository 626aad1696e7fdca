"""JSON documents of the dashboard, made from what is known; everything in them is text or numbers.

Series are columns of equal length, and long ones are thinned, so that a page of 10,000 versions and
200 replicas stays small.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import isfinite
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain.format import documents as publish_phases
from deltachain.redact import printable
from deltachain.types import Version
from spaces.dashboard import watcher
from spaces.dashboard.chain_index import ChainView, VersionSummary

POINTS: Final = 2000  # largest number of versions in one chart


def thinned(columns: Sequence[npt.NDArray[np.float64]], most: int) -> list[int]:
    """Choose ascending positions such that a chart of them looks like one of all.

    The first and the last one, and of each of equal ranges the extremes of each column.
    """
    length = len(columns[0])
    if length <= most:
        return list(range(length))
    ranges = max((most - 2) // (2 * len(columns)), 1)
    bounds = np.linspace(0, length, ranges + 1).astype(int)
    chosen = {0, length - 1}
    for column in columns:
        for first, end in pairwise(bounds.tolist()):
            chosen |= {int(first + column[first:end].argmin())}
            chosen |= {int(first + column[first:end].argmax())}
    return sorted(chosen)


def thinned_versions(
    rows: Sequence[VersionSummary], times: Sequence[watcher.PhaseTimes], most: int = POINTS
) -> list[int]:
    if len(rows) <= most:
        return list(range(len(rows)))
    density = np.array([row.density for row in rows])
    nbytes = np.array([row.nbytes for row in rows], dtype=np.float64)
    seconds = np.array([sum(one.values()) for one in times], dtype=np.float64)
    return thinned((density, nbytes, seconds), most)


MARKS: Final = 500  # marks of one kind in a chart, and ranges in a list

PHASES: Final = (*publish_phases.NAMES, *watcher.REPLICA_PHASES)
"""Phases of a version in their order, from the diff to the swap."""

PAGE: Final = 50  # largest number of versions in a page of the table


def overview_document(found: watcher.Overview) -> dict[str, Any]:
    return {
        **_fields(found, "time newest phases"),
        "chain": _chain(found.view),
        "alerts": [asdict(alert) for alert in found.alerts],
        "replicas": [_replica(report, found.newest) for report in found.reports],
    }


def chart_document(
    view: ChainView, applied: Mapping[str, watcher.PhaseTimes], first: Version, last: Version
) -> dict[str, Any]:
    rows = [row for row in view.rows[first : last + 1] if row is not None]
    times = [{**row.phases, **applied.get(row.manifest, {})} for row in rows]
    places = thinned_versions(rows, times)
    return {
        "revision": view.revision,
        "first": first,
        "last": min(last, len(view.rows) - 1),
        "versions": [rows[place].version for place in places],
        "density": [rows[place].density for place in places],
        "nbytes": [rows[place].nbytes for place in places],
        "phases": {name: _column(name, [times[place] for place in places]) for name in PHASES},
        "marks": _marks(view, rows),
    }


def _column(name: str, times: Iterable[watcher.PhaseTimes]) -> list[float | None]:
    found = [None if (value := one.get(name)) is None else round(value, 4) for one in times]
    return found if any(value is not None for value in found) else []


def page_document(view: ChainView, before: Version, count: int) -> dict[str, Any]:
    end = max(min(before, len(view.rows)), 0)
    start = max(end - min(count, PAGE), 0)
    rows = [row for row in view.rows[start:end] if row is not None]
    pruned = _pruned_deltas(view, start, end)
    versions = [
        _version(row) | {"pruned": row.version in pruned, "tags": _tags_of(view, row.version)}
        for row in rows[::-1]
    ]
    return {"first": start, "last": end - 1, "versions": versions}


def _pruned_deltas(view: ChainView, start: Version, end: Version) -> set[Version]:
    prunes = view.prunes
    if prunes is None:
        return set()
    own = (edge for edge in view.edges if start <= edge.version < end and not edge.record)
    return {edge.version for edge in own if prunes.covers(edge)}


def _tags_of(view: ChainView, version: Version) -> list[str]:
    return [printable(tag.name) for tag in view.tags if tag.version == version]


def version_document(
    view: ChainView, applied: Callable[[str], Mapping[str, watcher.PhaseTimes]], version: Version
) -> dict[str, Any] | None:
    row = view.at(version)
    if row is None:
        return None
    edges = [edge for edge in view.edges if edge.version == version]
    return _version(row) | {
        **_fields(row, "state manifest numel"),
        "metadata": dict(row.metadata),
        "phases": _phases(row, applied(row.manifest)),
        "tags": _tags_of(view, version),
        "edges": [
            {
                **_fields(edge, "kind base nbytes parts"),
                "encodings": [printable(name) for name in edge.encodings],
                "pruned": view.prunes is not None and view.prunes.covers(edge),
            }
            for edge in edges
        ],
    }


def _phases(row: VersionSummary, applied: Mapping[str, watcher.PhaseTimes]) -> list[dict[str, Any]]:
    published = [{"name": name, "seconds": seconds} for name, seconds in row.phases.items()]
    median = watcher.middle(applied)
    slowest = {
        name: max((times[name], engine) for engine, times in applied.items() if name in times)
        for name in median
    }
    return published + [
        {
            "name": name,
            "seconds": seconds,
            "slowest_s": slowest[name][0],
            "slowest": slowest[name][1],
            "replicas": sum(1 for times in applied.values() if name in times),
        }
        for name, seconds in median.items()
    ]


def track_document(moments: Sequence[watcher.Moment], engines: Iterable[str]) -> dict[str, Any]:
    return {
        "times": [round(moment.time, 3) for moment in moments],
        "newest": [moment.newest for moment in moments],
        "held": {engine: watcher.changes(moments, engine) for engine in engines},
    }


def _chain(view: ChainView) -> dict[str, Any]:
    head = view.head
    return {
        "url": view.url,
        "id": view.chain,
        "revision": view.revision,
        "indexed": len(view.rows),
        "found": 0 if view.newest is None else view.newest + 1,
        "looked_at": view.looked_at,
        "head": _version(head) if head else None,
    }


def chain_document(view: ChainView) -> dict[str, Any]:
    rows = [row for row in view.rows if row is not None]
    encodings = Counter(name for row in rows for name in row.encodings)
    return {
        "revision": view.revision,
        "model": asdict(view.model) if view.model else None,
        "nbytes": sum(row.nbytes for row in rows),
        "encodings": dict(encodings.most_common(MARKS)),
        "signers": _signers(rows),
        "edges": dict(Counter(edge.kind for edge in view.edges)),
        "tags": [_tag(tag.name, tag.version) for tag in view.tags[:MARKS]],
        "prunes": _prunes(view),
    }


def _tag(name: str, version: Version | None) -> dict[str, Any]:
    return {"name": printable(name), "version": version}


def _signers(rows: Iterable[VersionSummary]) -> list[dict[str, Any]]:
    every = Counter(key for row in rows for key in row.signers)
    trusted = {key for row in rows for key in row.signed_by}
    return [
        {"key": key, "versions": count, "trusted": key in trusted}
        for key, count in every.most_common(20)
    ]


def _prunes(view: ChainView) -> dict[str, Any] | None:
    record = view.prunes
    if record is None:
        return None
    ranges = [_fields(one, "kind span first last") for one in record.pruned[-MARKS:]]
    pruned = sum(1 for edge in view.edges if record.covers(edge))
    return {"number": record.number, "time": _time(record.time), "edges": pruned, "ranges": ranges}


def _marks(view: ChainView, rows: Sequence[VersionSummary]) -> dict[str, list[Any]]:
    if not rows:
        return {}
    first, last = rows[0].version, rows[-1].version
    edges = [edge for edge in view.edges if first <= edge.version <= last]
    epochs = [later.version for earlier, later in pairwise(rows) if later.epoch != earlier.epoch]
    tags = [_tag(t.name, t.version) for t in view.tags if t.version in range(first, last + 1)]
    return {
        "anchors": watcher.spread([e.version for e in edges if e.kind == "anchor"], MARKS),
        "skips": watcher.spread([e.version for e in edges if e.kind == "skip"], MARKS),
        "epochs": watcher.spread(epochs, MARKS),
        "reverts": watcher.spread(
            [row.version for row in rows if row.reverted_to is not None], MARKS
        ),
        "tags": watcher.spread(tags, MARKS),
    }


def _fields(value: object, names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names.split()}


def _version(row: VersionSummary) -> dict[str, Any]:
    own = "version epoch kind encodings nbytes step nnz density reverted_to signers signed_by"
    return _fields(row, own) | {"time": _time(row.time)}


def _replica(report: watcher.ReplicaReport, newest: Version | None) -> dict[str, Any]:
    status = report.status
    version = status.version
    return {
        **_fields(report, "engine answered_at trouble"),
        **_fields(
            status, "url version head ready reason pinned following silence_s deltachain phases"
        ),
        "chain": status.chain or "",
        "manifest": status.manifest or "",
        "lag": None if newest is None or version is None else max(newest - version, 0),
        "error": status.doubt or status.trouble,
        "software": status.engine,
    }


def _time(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None
