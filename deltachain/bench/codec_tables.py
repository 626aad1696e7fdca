"""Tables and plot of the codec benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from deltachain.bench import crossover, report
from deltachain.bench.codec_rows import ChainRow, EncodingRow
from deltachain.bench.layouts.registry import LAYOUTS
from deltachain.bench.updates import GIVEN_BASE, WITHOUT_BASE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
"""Range of densities of the plot, in percent."""

COLUMNS: Final = 6
"""Updates that fit beside the names of layouts in 80 columns."""

SPEED: Final = "Encode / decode, dense GB a second"
TIME: Final = "Encode / decode, ns a change, with all digests"

Pair: TypeAlias = Callable[[EncodingRow], tuple[float, float]]
"""Figures of encoding and of decoding."""

MARKERS: Final = "ovs^Dx+*<>"
POINTS: Final = 60
"""Bandwidths of a line of the plot."""


def tables(rows: Sequence[ChainRow]) -> list[Any]:
    """Return all tables: sizes, sizes of others, speeds, staging, and the crossover."""
    groups = [rows[start : start + COLUMNS] for start in range(0, len(rows), COLUMNS)]
    timed = [row for row in rows if row.timed]
    return [
        _sizes(rows),
        *(_layout_sizes(group) for group in groups),
        _speeds(rows, SPEED, lambda e: (e.encode_gb_per_s, e.decode_gb_per_s)),
        _speeds(rows, TIME, lambda e: (e.encode_ns, e.decode_ns)),
        _staging(rows),
        *([_layout_speeds(timed)] if timed else []),
        *(crossover.table(row) for row in timed),
    ]


def draw(rows: Sequence[ChainRow], path: Path) -> None:
    """Plot bits a change by density, and seconds to serve by the speed of the link.

    Encodings are lines, others markers, limits dashed; colours mean the same in both.
    """
    bits, seconds = report.two_axes("One update of bf16 weights", "Until it is served")
    bf16 = sorted((row for row in rows if row.dtype == "BF16"), key=lambda row: row.density)
    _draw_bits(bits, bf16)
    timed = [row for row in bf16 if row.timed]
    if timed:
        _draw_seconds(seconds, timed[0])
    seconds.legend(
        *bits.get_legend_handles_labels(),
        fontsize="small",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    report.save(bits, path)


def _sizes(rows: Sequence[ChainRow]) -> Any:  # noqa: ANN401 - a rich table
    title = "Bits a changed element, everything counted: the part and its manifest"
    names = [e.encoding for e in rows[0].encodings]
    columns = ("density", *names, "manifest", "limit", "given old")
    table = report.grid(title, "update", *columns)
    for row in rows:
        sizes = (f"{e.bits:.2f}" for e in row.encodings)
        manifest = f"{8 * row.manifest_nbytes / row.nnz:.2f}"
        limits = (f"{row.limits[name]:.2f}" for name in (WITHOUT_BASE, GIVEN_BASE))
        table.add_row(row.label, f"{row.density:.3%}", *sizes, manifest, *limits)
    table.caption = (
        "Limits: entropy of positions and steps for a coder that does not look at the old bits, "
        "and for one that knows the old exponent (bf16) or code (fp8, int8)."
    )
    table.caption_justify = "left"
    return table


def _layout_sizes(rows: Sequence[ChainRow]) -> Any:  # noqa: ANN401 - a rich table
    title = "Bits a changed element beside other systems' layouts"
    table = report.grid(title, "", *(row.label for row in rows))
    for number, encoding in enumerate(rows[0].encodings):
        cells = (f"{row.encodings[number].bits:.2f}" for row in rows)
        table.add_row(f"deltachain {encoding.encoding}", *cells, style="bold")
    for name in LAYOUTS:
        cells = (f"{row.layouts[name].bits:.2f}" if name in row.layouts else "-" for row in rows)
        table.add_row(name, *cells)
    for name in (WITHOUT_BASE, GIVEN_BASE):
        table.add_row(name, *(f"{row.limits[name]:.2f}" for row in rows), style="dim")
    return table


def _speeds(rows: Sequence[ChainRow], title: str, pair: Pair) -> Any:  # noqa: ANN401
    table = report.grid(title, "", *(e.encoding for e in rows[0].encodings))
    for row in rows:
        table.add_row(row.label, *(_pair(*pair(e)) for e in row.encodings))
    return table


def _staging(rows: Sequence[ChainRow]) -> Any:  # noqa: ANN401 - a rich table
    title = "Decode and stage on all cores, ns a change"
    table = report.grid(title, "", "step", "max", "floor", "speed of step")
    for row in rows:
        found = row.staging
        times = (f"{ns:.1f}" for ns in (found.step_ns, found.max_ns, found.floor_ns))
        table.add_row(row.label, *times, f"{found.speed:.2f}")
    table.caption = "Floor: to read all old bits once, as every decoder of max must."
    table.caption_justify = "left"
    return table


def _layout_speeds(rows: Sequence[ChainRow]) -> Any:  # noqa: ANN401 - a rich table
    title = "Encode / decode of others' layouts, ns a change, without digests"
    table = report.grid(title, "", *(row.label for row in rows))
    for name in (*LAYOUTS, rows[0].full_copy.layout):
        found = (row.layouts.get(name, row.full_copy) for row in rows)
        cells = (
            _pair(one.encode_ns, one.decode_ns) if one.layout == name else "-" for one in found
        )
        table.add_row(name, *cells)
    return table


def _pair(encode: float | None, decode: float | None) -> str:
    return f"{encode:.1f} / {decode:.1f}"


def _draw_bits(plot: Axes, rows: Sequence[ChainRow]) -> None:
    at = [100 * row.density for row in rows]
    for number, encoding in enumerate(rows[0].encodings):
        bits = [row.encodings[number].bits for row in rows]
        plot.plot(at, bits, marker=".", linewidth=2, label=f"deltachain {encoding.encoding}")
    for number, name in enumerate(rows[0].layouts):
        bits = [row.layouts[name].bits for row in rows]
        plot.plot(at, bits, MARKERS[number % len(MARKERS)], alpha=0.7, label=name)
    plot.plot([], [], linewidth=1, label=rows[0].full_copy.layout)
    for name, style in zip((WITHOUT_BASE, GIVEN_BASE), ("--", ":"), strict=True):
        plot.plot(at, [row.limits[name] for row in rows], style, color="grey", label=name)
    plot.set_xscale("log")
    plot.minorticks_off()
    plot.set_xticks(TICKS, [f"{value:g}" for value in TICKS])
    plot.set_ylim(bottom=0)
    plot.set_xlabel("changed elements, % of all")
    plot.set_ylabel("bits a changed element")


def _draw_seconds(plot: Axes, row: ChainRow) -> None:
    speeds = list(_speeds_of_links())
    own = len(row.encodings)
    for number, cost in enumerate(crossover.costs(row)):
        seconds = [crossover.serve_seconds(cost, row.nnz, speed) for speed in speeds]
        plot.plot(speeds, seconds, linewidth=2 if number < own else 1)
    plot.set_xscale("log")
    plot.set_yscale("log")
    ticks = {name: bits for name, bits in crossover.BANDWIDTHS.items() if name[0] == "1"}
    plot.minorticks_off()
    plot.set_xticks(list(ticks.values()), list(ticks))
    plot.set_xlabel("speed of the link")
    plot.set_ylabel(f"seconds, {row.nnz / 1e6:.1f} M changes of {row.numel / 1e6:.0f} M weights")


def _speeds_of_links() -> Iterator[float]:
    """Speeds from the slowest to the fastest link, evenly on a logarithmic scale."""
    slowest, fastest = min(crossover.BANDWIDTHS.values()), max(crossover.BANDWIDTHS.values())
    for number in range(POINTS):
        yield slowest * (fastest / slowest) ** (number / (POINTS - 1))
