"""Crossover: how long a version takes to be served, by the speed of the link.

From the end of the diff until a subscriber has the decoded changes: encoding, upload and download
over links of one speed, decoding, one after another; each from bytes and speeds measured on this
machine, on one core. Round trips, finding the changes and writing them are left out for all alike.
Times of other systems' layouts are without digests: what is decoded is not verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deltachain.bench import report
from deltachain.bench.codec_rows import ChainRow
from deltachain.publish.encoding_choice import CROSSINGS, EncodingCost, fastest_encoding

BANDWIDTHS: Final = {
    "10 Mbit/s": 1e7,
    "100 Mbit/s": 1e8,
    "1 Gbit/s": 1e9,
    "10 Gbit/s": 1e10,
    "100 Gbit/s": 1e11,
    "400 Gbit/s": 4e11,
}
"""Speeds of the link, in bits a second."""


@dataclass(frozen=True, slots=True)
class FastestSpan:
    """Who serves first on a range of links.

    Attributes:
        name: The encoding or layout.
        up_to: Speed of the link, in bits a second, from which another one is first; infinity for
            the last.
    """

    name: str
    up_to: float


def costs(row: ChainRow) -> list[EncodingCost]:
    """Measured costs of all encodings, layouts and a full copy of one update."""
    found = [
        EncodingCost(
            encoding=e.encoding,
            nbytes=e.bits / 8,
            encode_ns=e.encode_ns,
            decode_ns=e.decode_ns,
        )
        for e in row.encodings
    ]
    for layout in (*row.layouts.values(), row.full_copy):
        if layout.encode_ns is not None and layout.decode_ns is not None:
            cost = EncodingCost(
                encoding=layout.layout,
                nbytes=layout.bits / 8,
                encode_ns=layout.encode_ns,
                decode_ns=layout.decode_ns,
            )
            found.append(cost)
    return found


def serve_seconds(cost: EncodingCost, nnz: int, bits_per_s: float) -> float:
    """Seconds until an update of ``nnz`` changes is served over a link."""
    return cost.serve_ns(bits_per_s / 8) * nnz / 1e9


def spans(candidates: Sequence[EncodingCost]) -> list[FastestSpan]:
    """Who is first, from the slowest link (fewest bytes) to the fastest (least work)."""
    now = min(candidates, key=lambda c: (c.nbytes, c.cpu_ns))
    found: list[FastestSpan] = []
    while True:
        following = [(_crossing(now, c), c) for c in candidates if c.cpu_ns < now.cpu_ns]
        if not following:
            return [*found, FastestSpan(now.encoding, math.inf)]
        speed, after = min(following, key=lambda pair: (pair[0], pair[1].cpu_ns))
        found.append(FastestSpan(now.encoding, speed))
        now = after


def document(row: ChainRow) -> dict[str, Any]:
    """All figures of one update, for JSON."""
    found = costs(row)
    return {
        "label": row.label,
        "served_s": {
            cost.encoding: {
                name: serve_seconds(cost, row.nnz, bits) for name, bits in BANDWIDTHS.items()
            }
            for cost in found
        },
        "first": {
            name: fastest_encoding(found, bits / 8).encoding for name, bits in BANDWIDTHS.items()
        },
        "spans": [
            {"name": span.name, "up_to_bits_per_s": None if math.isinf(span.up_to) else span.up_to}
            for span in spans(found)
        ],
    }


def table(row: ChainRow) -> Any:  # noqa: ANN401 - a rich table
    """Milliseconds by speed of the link, in bits a second; ``*`` marks the first on each."""
    found = costs(row)
    title = (
        f"Milliseconds to serve {row.label}, {row.nnz / 1e3:,.0f} k changes of "
        f"{row.numel / 1e6:.0f} M, by bit/s"
    )
    grid = report.grid(title, "", *(name.replace("bit/s", "") for name in BANDWIDTHS))
    first = [fastest_encoding(found, bits / 8).encoding for bits in BANDWIDTHS.values()]
    own = len(row.encodings)
    for number, cost in enumerate(found):
        seconds = (serve_seconds(cost, row.nnz, bits) for bits in BANDWIDTHS.values())
        cells = (
            short(1e3 * second) + ("*" if cost.encoding == name else " ")
            for second, name in zip(seconds, first, strict=True)
        )
        name = f"deltachain {cost.encoding}" if number < own else cost.encoding
        grid.add_row(name, *cells, style="bold" if number < own else None)
    lines = {"First": found, "First of deltachain's": found[:own]}
    grid.caption = "\n".join(
        f"{start}: {'; '.join(_sentences(spans(some)))}." for start, some in lines.items()
    )
    grid.caption_justify = "left"
    return grid


def short(value: float) -> str:
    """Three digits of a positive figure, and all of those before the point."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def speed(bits_per_s: float) -> str:
    """Name a speed with two digits: ``3.4 Gbit/s``."""
    unit, name = (1e9, "Gbit/s") if bits_per_s >= 1e9 else (1e6, "Mbit/s")
    value = bits_per_s / unit
    return f"{value:.1f} {name}" if value < 10 else f"{value:,.0f} {name}"


def _sentences(found: Sequence[FastestSpan]) -> Iterator[str]:
    for span in found[:-1]:
        yield f"{span.name} up to {speed(span.up_to)}"
    yield f"{found[-1].name} above" if len(found) > 1 else f"{found[0].name} on every link"


def _crossing(slow: EncodingCost, fast: EncodingCost) -> float:
    """Speed of the link in bits a second above which ``fast``, with less work, is first."""
    more_bytes = max(fast.nbytes - slow.nbytes, 0.0)
    return 8e9 * CROSSINGS * more_bytes / (slow.cpu_ns - fast.cpu_ns)
