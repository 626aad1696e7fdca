"""``deltachain inspect``: show the contents of a delta, an anchor or a tensor table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from deltachain.cli import console as c
from deltachain.cli.keygen import signed, signers
from deltachain.cli.options import AsJson, At, AtStep, AtVersion, TagName, choice_of, opened
from deltachain.errors import BrokenChainError, ObjectNotFoundError

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain, Committed
    from deltachain.chain.tags import VersionChoice
    from deltachain.codec import Part
    from deltachain.format.documents import EdgeSummary

SHOWN = 12  # rows of a table without --all


def inspect(  # noqa: PLR0913 - one argument an option
    place: Annotated[
        str, typer.Argument(metavar="FILE|URL", help="An object's file, or the URL of a chain.")
    ],
    *,
    version: AtVersion = None,
    step: AtStep = None,
    tag: TagName = "",
    at: At = "",
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Show the newest anchor up to the version.")
    ] = False,
    tensor_table: Annotated[
        bool, typer.Option("--table", help="Show the tensors of the model.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List all tensors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a delta: changed elements by tensor, bytes by stream.

    All bytes are verified against the digests of the part.

    Example: `deltachain inspect /mnt/policy --version 7`
    """
    if Path(place).is_file():
        report = _file(Path(place))
    else:
        choice = choice_of(version, step=step, tag=tag, at=at)
        report = _chain(place, choice, anchor=anchor, tensor_table=tensor_table)
    c.show(report, lambda found: _show(found, None if everything else SHOWN), as_json=as_json)


def _file(path: Path) -> dict[str, Any]:
    from deltachain.codec import Part
    from deltachain.file_access import FileReader

    reader = FileReader(path)
    part = Part(reader.read_at, reader.nbytes, key=str(path))
    return {"file": str(path), "directory": part.digest, **_contents([part], reader.nbytes)}


def _chain(url: str, choice: VersionChoice, *, anchor: bool, tensor_table: bool) -> dict[str, Any]:
    from deltachain.chain.tags import choose

    chain = opened(url)
    if tensor_table:
        return _table(chain)
    committed = choose(chain, choice)
    edge = _newest_anchor(chain, committed) if anchor else committed.manifest.summary()
    about = {
        "url": chain.store.url,
        **c.fields(edge, "version", "kind", "base", "state"),
        **signers(committed if edge.version == committed.version else chain.read(edge.version)),
    }
    reference = chain.edge(edge).reference
    if reference is None:
        return about | _edge(chain, edge)
    where = f"{reference.repo or reference.path} {reference.revision}".strip()
    files = [c.fields(file, "name", "nbytes", "blake3") for file in reference.files]
    return about | {"checkpoint": where, "files": files}


def _edge(chain: Chain, edge: EdgeSummary) -> dict[str, Any]:
    from deltachain.chain.ancestry import PRUNED
    from deltachain.chain.chain import Chain
    from deltachain.chain.fetch import fetching, scratch
    from deltachain.chain.plan import Plan
    from deltachain.cli.progress import watching

    plan = Plan(held=edge.base, target=edge.version, edges=(edge,))
    refs = chain.edge(edge).parts
    try:
        with watching(chain.store, f"reading version {edge.version}") as store:
            read = Chain(store, chain.identity, chain.table, trust=chain.trust)
            with fetching(read, plan, hold=False, room=scratch()) as fetched:
                contents = _contents(fetched.parts, sum(ref.nbytes for ref in refs))
    except ObjectNotFoundError as exc:
        chain.prunes.refresh()
        if not chain.prunes.is_pruned(edge):
            raise
        message = f"the {edge.kind} to version {edge.version} was pruned"
        raise BrokenChainError(message, version=edge.version, hint=PRUNED) from exc
    return {"objects": [ref.key for ref in refs], **contents}


def _newest_anchor(chain: Chain, committed: Committed) -> EdgeSummary:
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


def _table(chain: Chain) -> dict[str, Any]:
    specs = sorted(chain.table.specs(), key=lambda spec: (-spec.nbytes, spec.name))
    rows = [c.fields(spec, "name", "dtype", "shape", "nbytes") for spec in specs]
    aliases = dict(chain.table.aliases)
    report = {"url": chain.store.url, "table": chain.identity.table, "tensors": rows}
    return report | ({"aliases": aliases} if aliases else {})


def _contents(parts: Sequence[Part], nbytes: int) -> dict[str, Any]:
    for part in parts:
        part.verify()
    rows = [row for part in parts for row in part.rows.values()]
    nnz = sum(row.nnz for row in rows)
    streams: Counter[str] = Counter()
    for part in parts:
        for stream in part.directory.streams:
            streams[_kind(stream.name, part)] += sum(stream.stored)
    contents = {
        "nbytes": nbytes,
        "parts": len(parts),
        "nnz": nnz,
        "numel": sum(row.spec.numel for row in rows),
        "bits_per_change": c.bits_per_change(nbytes, nnz),
        "directory_nbytes": nbytes - streams.total(),
        "streams": dict(streams.most_common()),
        "rows": [
            {
                **c.fields(row, "name", "dtype", "shape", "encoding", "nnz"),
                "numel": row.spec.numel,
                "density": row.nnz / row.spec.numel if row.spec.numel else 0.0,
                "digest": row.digest or None,
            }
            for row in sorted(rows, key=lambda r: (-r.nnz, r.name))
        ],
    }
    return {"contents": contents}


def _kind(stream: str, part: Part) -> str:
    from deltachain.codec import ENCODINGS

    if part.compressed:
        return stream.partition(".")[2]
    whole = part.rows.get(stream)
    if whole is not None and not ENCODINGS.get(whole.encoding).sparse:
        return whole.encoding
    return stream.rpartition(".")[2]


def _show(report: Mapping[str, Any], limit: int | None) -> None:
    named = {name: str(value) for name, value in report.items() if isinstance(value, str | int)}
    if "signatures" in report and (by := signed(report)):
        named["signed by"] = by
    if report.get("aliases"):
        named["tied"] = ", ".join(f"{alias} = {of}" for alias, of in report["aliases"].items())
    contents = report.get("contents")
    if contents:
        bits = contents["bits_per_change"]
        named["changed"] = (
            f"{c.count(contents['nnz'])} of {c.count(contents['numel'])} elements in "
            f"{len(contents['rows']):,} tensors"
        )
        named["size"] = (
            f"{c.nbytes(contents['nbytes'])} in {c.plural(contents['parts'], 'object')}, "
            f"{c.nbytes(contents['directory_nbytes'])} of header and directory"
            + (f", {bits:.2f} bits an element" if bits else "")
        )
    c.out().print(c.facts(**named))
    if contents:
        most = max(contents["streams"].values(), default=1) or 1
        streams = [
            (c.clean(kind), c.nbytes(stored), c.bar(stored / most))
            for kind, stored in contents["streams"].items()
        ]
        _print("Bytes by stream", c.table(("stream", ">bytes", ""), streams))
    for name, rows in (("tensors", contents and contents["rows"]), *report.items()):
        if name in ("tensors", "files") and rows:
            _print(f"{name.capitalize()} ({len(rows):,})", _rows(rows[:limit]))
            if rest := len(rows[limit or len(rows) :]):
                c.out().print(f"and {rest:,} more: --all", style="dim")


def _rows(rows: Sequence[Mapping[str, Any]]) -> object:
    shown: dict[str, Callable[[Any], str]] = {
        "~name": c.clean,
        "dtype": str,
        "shape": lambda shape: " x ".join(map(str, shape)) or "scalar",
        "encoding": str,
        ">nbytes": c.nbytes,
        ">nnz": c.count,
        ">density": c.percent,
        "blake3": lambda digest: c.clean(digest[:16]),
    }
    named = {title: title.lstrip(">~") for title in shown}
    titles = [title for title, name in named.items() if name in rows[0]]
    cells = ([shown[title](row[named[title]]) for title in titles] for row in rows)
    return c.table(titles, cells, "blake3", "dtype", "encoding", "shape")


def _print(title: str, table: object) -> None:
    c.out().print(Text(f"\n{title}", "bold"))
    c.out().print(table)
