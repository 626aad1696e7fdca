"""``deltachain inspect``: show the contents of a delta, an anchor or a tensor table."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, At, AtStep, TagName, choice_of
from deltachain.cli.signing import signed, signers
from deltachain.errors import BrokenChainError, ObjectNotFoundError

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain, Committed
    from deltachain.chain.tags import VersionChoice
    from deltachain.format.documents import BaseRef, EdgeSummary

TENSORS_SHOWN = 12


def inspect(  # noqa: PLR0913 - one argument an option
    place: Annotated[
        str, typer.Argument(metavar="FILE|URL", help="A delta file, or the URL of a chain.")
    ],
    *,
    version: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The version. Default: the head.")
    ] = None,
    step: AtStep = None,
    tag: TagName = "",
    at: At = "",
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Show the newest anchor up to the version.")
    ] = False,
    tensor_table: Annotated[
        bool, typer.Option("--table", help="Show the tensors of the model.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List all tensors.")] = (False),
    as_json: AsJson = False,
) -> None:
    """Show the contents of a delta: changed elements by tensor, and bytes by stream.

    All bytes are verified against the digests of the part.

    Example: `deltachain inspect /mnt/policy --version 7`
    """
    if Path(place).is_file():
        report = _file(Path(place))
    else:
        choice = choice_of(version, step=step, tag=tag, at=at)
        report = _chain(place, choice, anchor=anchor, tensor_table=tensor_table)
    if as_json:
        c.write_json(report)
        return
    _show_facts(report)
    limit = None if everything else TENSORS_SHOWN
    if "contents" in report:
        _show_contents(report["contents"], limit)
    for name in ("files", "tensors"):
        if name in report:
            _show_list(name, report[name], limit)


def _file(path: Path) -> dict[str, Any]:
    from deltachain.cli.anatomy import dissect
    from deltachain.codec import Part
    from deltachain.file_reader import FileReader

    reader = FileReader(path)
    part = Part(reader.read_at, reader.nbytes, key=str(path))
    return {
        "file": str(path),
        "directory": part.digest,
        "contents": dissect([part], [reader.nbytes]),
    }


def _chain(url: str, choice: VersionChoice, *, anchor: bool, tensor_table: bool) -> dict[str, Any]:
    from deltachain.chain.chain import Chain
    from deltachain.chain.tags import choose
    from deltachain.store import open_store

    chain = Chain.open(open_store(url))
    if tensor_table:
        return _table(chain)
    committed = choose(chain, choice)
    edge = _newest_anchor(chain, committed) if anchor else committed.manifest.summary()
    about = {
        "url": chain.store.url,
        "version": edge.version,
        "kind": edge.kind,
        "base": edge.base,
        "state": edge.state,
        **signers(committed if edge.version == committed.version else chain.read(edge.version)),
    }
    reference = chain.edge(edge).reference
    return about | (_edge(chain, edge) if reference is None else _reference(reference))


def _edge(chain: Chain, edge: EdgeSummary) -> dict[str, Any]:
    from deltachain.chain.ancestry import PRUNED
    from deltachain.chain.chain import Chain
    from deltachain.chain.fetch import fetch
    from deltachain.chain.plan import Plan
    from deltachain.cli.anatomy import dissect
    from deltachain.cli.progress import watching

    plan = Plan(held=edge.base, target=edge.version, edges=(edge,))
    refs = chain.edge(edge).parts
    try:
        with watching(chain.store, f"reading version {edge.version}") as store:
            parts = fetch(Chain(store, chain.identity, chain.table, trust=chain.trust), plan).parts
            contents = dissect(parts, [ref.nbytes for ref in refs])
    except ObjectNotFoundError as exc:
        chain.prunes.refresh()
        if not chain.prunes.is_pruned(edge):
            raise
        message = f"the {edge.kind} to version {edge.version} was pruned"
        raise BrokenChainError(message, version=edge.version, hint=PRUNED) from exc
    return {"objects": [ref.key for ref in refs], "contents": contents}


def _newest_anchor(chain: Chain, committed: Committed) -> EdgeSummary:
    """Return the newest anchor up to a version.

    Raises:
        BrokenChainError: There is no anchor.
    """
    from deltachain.verify import edge_records

    added = (summary for _, summary in edge_records(chain, 0, committed.version))
    known = (*committed.manifest.recent, committed.manifest.summary(), *added)
    anchors = [edge for edge in known if edge.kind == "anchor"]
    if not anchors:
        raise BrokenChainError(
            f"no anchor is known at or before version {committed.version}",
            version=committed.version,
        )
    return max(anchors, key=lambda edge: edge.version)


def _reference(reference: BaseRef) -> dict[str, Any]:
    rows = [
        {"name": file.name, "nbytes": file.nbytes, "blake3": file.blake3}
        for file in reference.files
    ]
    where = reference.repo or reference.path
    return {"checkpoint": f"{where} {reference.revision}".strip(), "files": rows}


def _table(chain: Chain) -> dict[str, Any]:
    specs = sorted(chain.table.specs(), key=lambda spec: (-spec.nbytes, spec.name))
    rows = [
        {"name": s.name, "dtype": s.dtype, "shape": list(s.shape), "nbytes": s.nbytes}
        for s in specs
    ]
    aliases = dict(chain.table.aliases)
    return {"url": chain.store.url, "table": chain.identity.table, "tensors": rows} | (
        {"aliases": aliases} if aliases else {}
    )


def _show_facts(report: Mapping[str, Any]) -> None:
    named = {
        name: str(value)
        for name, value in report.items()
        if value is not None and isinstance(value, str | int)
    }
    if "signatures" in report and (by := signed(report)):
        named["signed by"] = by
    if report.get("aliases"):
        named["tied"] = ", ".join(f"{alias} = {of}" for alias, of in report["aliases"].items())
    contents = report.get("contents")
    if contents:
        bits = contents["bits_per_change"]
        named["changed"] = (
            f"{c.count(contents['nnz'])} of {c.count(contents['numel'])} elements in "
            f"{contents['tensors']:,} tensors"
        )
        named["size"] = (
            f"{c.nbytes(contents['nbytes'])} in {c.plural(contents['parts'], 'object')}"
            + (f", {bits:.2f} bits an element" if bits else "")
        )
        named["layout"] = (
            f"{c.plural(contents['frames'], 'frame')}, "
            f"{c.plural(contents['segments'], 'segment')}, "
            f"header and directory {c.nbytes(contents['directory_nbytes'])}"
        )
    c.out().print(c.facts(**named))


def _show_contents(contents: Mapping[str, Any], limit: int | None) -> None:
    out = c.out()
    streams = contents["streams"]
    if streams:
        out.print(c.heading("Bytes by stream"))
        out.print(_streams(streams))
    if contents["magnitudes"]:
        out.print(c.heading("Steps by magnitude"))
        out.print(_histogram(contents["magnitudes"], "units in the last place"))
    if contents["densities"]["whole"] < contents["tensors"]:
        out.print(c.heading("Tensors by density"))
        out.print(_histogram(contents["densities"], "changed share"))
    if contents["tensors"]:
        _show_rows(contents["rows"], limit)


def _streams(streams: Mapping[str, Mapping[str, Any]]) -> object:
    total = sum(stream["stored"] for stream in streams.values())
    grid = c.table("stream", ">raw", ">stored", ">bits each", "")
    for kind, stream in streams.items():
        share = stream["stored"] / total if total else 0.0
        bits = stream["bits_per_change"]
        grid.add_row(
            c.clean(kind),
            c.nbytes(stream["raw"]),
            c.nbytes(stream["stored"]),
            "" if bits is None else f"{bits:.2f}",
            c.bar(share),
        )
    return c.fitted(grid, c.out().width, "raw")


def _histogram(classes: Mapping[str, int], title: str) -> object:
    total = sum(classes.values())
    grid = c.table(title, ">number", ">share", "")
    for label, n in classes.items():
        share = n / total if total else 0.0
        grid.add_row(label, c.count(n), c.percent(share), c.bar(share))
    return c.fitted(grid, c.out().width)


def _show_rows(rows: Sequence[Mapping[str, Any]], limit: int | None) -> None:
    shown = rows[:limit]
    title = "Tensors" if len(shown) == len(rows) else f"The {len(shown)} with the most elements"
    grid = c.table("~tensor", "dtype", "shape", "encoding", ">elements", ">density", "")
    densest = max((row["density"] for row in shown), default=0.0) or 1.0
    for row in shown:
        grid.add_row(
            c.clean(row["name"]),
            row["dtype"],
            _shape(row["shape"]),
            row["encoding"],
            c.count(row["nnz"]),
            c.percent(row["density"]),
            c.bar(row["density"] / densest, 12),
        )
    out = c.out()
    out.print(c.heading(title))
    out.print(c.fitted(grid, out.width, "dtype", "encoding", "shape"))
    _say_rest(len(rows) - len(shown))


def _show_list(title: str, rows: Sequence[Mapping[str, Any]], limit: int | None) -> None:
    """Print the files of a base reference, or the tensors of a table."""
    grid = c.table("~name", "dtype", "shape", ">bytes") if title == "tensors" else (
        c.table("~name", ">bytes", "blake3")
    )  # fmt: skip
    for row in rows[:limit]:
        size = c.nbytes(row["nbytes"])
        if title == "tensors":
            grid.add_row(c.clean(row["name"]), row["dtype"], _shape(row["shape"]), size)
        else:
            grid.add_row(c.clean(row["name"]), size, c.clean(row["blake3"][:16]))
    out = c.out()
    out.print(c.heading(f"{title.capitalize()} ({len(rows):,})"))
    out.print(c.fitted(grid, out.width, "blake3"))
    _say_rest(len(rows) - len(rows[:limit]))


def _say_rest(n: int) -> None:
    if n:
        c.out().print(f"and {n:,} more: --all", style="dim")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
