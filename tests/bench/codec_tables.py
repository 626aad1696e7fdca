"""Tables of the codec benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from tests.bench import report
from tests.bench.layouts.registry import LAYOUTS
from tests.bench.updates import GIVEN_BASE, WITHOUT_BASE

COLUMNS: Final = 6

SPEED: Final = "Encode / decode, dense GB a second"
TIME: Final = "Encode / decode, ns a change, with all digests"

Row: TypeAlias = Mapping[str, Any]
Pair: TypeAlias = Callable[[Row], tuple[float, float]]


def tables(rows: Sequence[Row]) -> list[Any]:
    groups = [rows[start : start + COLUMNS] for start in range(0, len(rows), COLUMNS)]
    timed = [row for row in rows if row["full_copy"]["encode_ns"]]
    return [
        _sizes(rows),
        *(_layout_sizes(group) for group in groups),
        _speeds(rows, SPEED, lambda e: (e["encode_gb_per_s"], e["decode_gb_per_s"])),
        _speeds(rows, TIME, lambda e: (e["encode_ns"], e["decode_ns"])),
        *([_layout_speeds(timed)] if timed else []),
    ]


def _sizes(rows: Sequence[Row]) -> Any:
    title = "Bits a changed element, everything counted: the part and its manifest"
    names = [e["encoding"] for e in rows[0]["encodings"]]
    columns = ("density", *names, "manifest", "limit", "given old")
    table = report.grid(title, "update", *columns)
    for row in rows:
        sizes = (f"{e['bits']:.2f}" for e in row["encodings"])
        manifest = f"{8 * row['manifest_nbytes'] / row['nnz']:.2f}"
        limits = (f"{row['limits'][name]:.2f}" for name in (WITHOUT_BASE, GIVEN_BASE))
        table.add_row(row["label"], f"{row['density']:.3%}", *sizes, manifest, *limits)
    table.caption = (
        "Limits: entropy of positions and steps for a coder that does not look at the old bits, "
        "and for one that knows the old exponent (bf16) or code (fp8, int8)."
    )
    table.caption_justify = "left"
    return table


def _layout_sizes(rows: Sequence[Row]) -> Any:
    title = "Bits a changed element beside other systems' layouts"
    table = report.grid(title, "", *(row["label"] for row in rows))
    for number, encoding in enumerate(rows[0]["encodings"]):
        cells = (f"{row['encodings'][number]['bits']:.2f}" for row in rows)
        table.add_row(f"deltachain {encoding['encoding']}", *cells, style="bold")
    for name in LAYOUTS:
        found = (row["layouts"].get(name) for row in rows)
        cells = (f"{one['bits']:.2f}" if one else "-" for one in found)
        table.add_row(name, *cells)
    for name in (WITHOUT_BASE, GIVEN_BASE):
        table.add_row(name, *(f"{row['limits'][name]:.2f}" for row in rows), style="dim")
    return table


def _speeds(rows: Sequence[Row], title: str, pair: Pair) -> Any:
    table = report.grid(title, "", *(e["encoding"] for e in rows[0]["encodings"]))
    for row in rows:
        table.add_row(row["label"], *(_pair(*pair(e)) for e in row["encodings"]))
    return table


def _layout_speeds(rows: Sequence[Row]) -> Any:
    title = "Encode / decode of others' layouts, ns a change, without digests"
    table = report.grid(title, "", *(row["label"] for row in rows))
    for name in (*LAYOUTS, rows[0]["full_copy"]["layout"]):
        found = (row["layouts"].get(name, row["full_copy"]) for row in rows)
        cells = (
            _pair(one["encode_ns"], one["decode_ns"]) if one["layout"] == name else "-"
            for one in found
        )
        table.add_row(name, *cells)
    return table


def _pair(encode: float | None, decode: float | None) -> str:
    return f"{encode:.1f} / {decode:.1f}"
