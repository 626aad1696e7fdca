"""Figures of a run: what is told of many versions, a table, a document and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, TypeAlias

from rich.table import Table

from tests.bench import report
from tests.bench.cross_region.measure import Sample
from tests.bench.cross_region.plan import REPLICAS, TRAINER

Samples: TypeAlias = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    way: str
    replica: str
    median_s: float
    p90_s: float
    sent_s: float
    sent_nbytes: float
    received_nbytes: float
    mismatches: int


def p90(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=10, method="inclusive")[-1]


def rows(samples: Samples) -> list[Row]:
    return [_row(way, place.name, found) for place in REPLICAS for way, found in samples.items()]


def _row(way: str, replica: str, samples: Sequence[Sample]) -> Row:
    seconds = [sample.served_s[replica] for sample in samples]
    return Row(
        way=way,
        replica=replica,
        median_s=median(seconds),
        p90_s=p90(seconds),
        sent_s=median(sample.sent_s for sample in samples),
        sent_nbytes=median(sample.sent_nbytes for sample in samples),
        received_nbytes=median(sample.received_nbytes[replica] for sample in samples),
        mismatches=sum(sample.mismatches[replica] for sample in samples),
    )


def document(samples: Samples, settings: Mapping[str, Any]) -> dict[str, Any]:
    links = {place.name: asdict(place.link) for place in (TRAINER, *REPLICAS)}
    return {
        "benchmark": "cross-region",
        **settings,
        "links": links,
        "rows": [asdict(row) for row in rows(samples)],
        "samples": {way: [asdict(one) for one in found] for way, found in samples.items()},
        "machine": report.machine(),
    }


def tables(samples: Samples) -> list[Table]:
    made = []
    found = rows(samples)
    for place in REPLICAS:
        table = report.grid(
            f"Replica {place.name}: {place.link} round trip",
            "",
            *("median s", "p90 s", "sent s", "MB sent", "MB received", "mismatches"),
        )
        for row in found:
            if row.replica == place.name:
                table.add_row(
                    row.way,
                    f"{row.median_s:.2f}",
                    f"{row.p90_s:.2f}",
                    f"{row.sent_s:.2f}",
                    f"{row.sent_nbytes / 1e6:.2f}",
                    f"{row.received_nbytes / 1e6:.2f}",
                    f"{row.mismatches:,}",
                )
        made.append(table)
    return made
