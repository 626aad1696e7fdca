"""Figures of a run: what is told of many versions, as tables and as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any, TypeAlias

from rich.table import Table

from tests.bench import report
from tests.bench.cross_region.measure import Sample
from tests.bench.cross_region.network import REPLICAS, TRAINER

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
