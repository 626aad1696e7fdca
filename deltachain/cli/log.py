"""``deltachain log``: the versions of a chain, newest first."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, At, AtStep, TagName, Url, choice_of
from deltachain.cli.signing import SHOWN_DIGITS, signed, signers
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ConfigError,
    FormatError,
    ObjectNotFoundError,
)

COLUMNS: Final = (
    ">version",
    ">epoch",
    "kind",
    ">step",
    "committed",
    ">changed",
    ">density",
    ">bytes",
    ">bits",
    ">dense",
    "state",
)
"""Columns; ``bits``: payload bits for each change; ``dense``: payload over size of all weights."""

READS: Final = 16
"""Manifests read at a time."""

GIVE_WAY: Final = ("epoch", "committed", "dense", "bits", "density", "state")
"""Columns that are left out where the terminal is too narrow, in this order."""

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain, Committed
    from deltachain.format.documents import Edge, PruneRecord, Tag

logger = logging.getLogger(__name__)


def log(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, metavar="N", help="Versions to show.")
    ] = 20,
    version: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="The newest version to show. Default: the head."),
    ] = None,
    step: AtStep = None,
    tag: TagName = "",
    at: At = "",
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Draw changed elements and bytes instead of the table."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the versions of a chain, newest first.

    Prints changed elements, payload size and state digest of each version. Edges that were added
    later, such as anchors, follow below their version, and so do tags. The objects of an edge that
    is marked `pruned` are deleted, or will be. A version whose manifest is missing has a row that
    says so, and the exit code is then 4.

    Example: `deltachain log /mnt/policy -n 5`

    Example: `deltachain log /mnt/policy --at 2026-11-23T09:00`

    Example: `deltachain log /mnt/policy --plot -n 500`
    """
    from deltachain.chain.chain import Chain
    from deltachain.chain.tags import VersionChoice, choose
    from deltachain.store import open_store
    from deltachain.verify import edge_records

    if plot and as_json:
        raise ConfigError("--plot and --json exclude each other", hint="leave out one of them")
    choice = choice_of(version, step=step, tag=tag, at=at)
    chain = Chain.open(open_store(url))
    head = choose(chain, VersionChoice())
    last = head.version if choice == VersionChoice() else choose(chain, choice).version
    first = max(0, last - limit + 1)
    shown, missing = read_present(chain, first, last)
    if plot:
        _plot(shown)
        _tell_missing(missing)
        return
    records: dict[int, list[Edge]] = defaultdict(list)
    for record, summary in edge_records(chain, first, last):
        records[summary.version].append(record.edge)
    model, marks = describe_model(chain), _marks(chain)
    versions = [_version(committed, records, model["nbytes"]) for committed in shown[::-1]]
    for row in versions:
        row["tags"] = [tag.name for tag in marks.tags if tag.version == row["version"]]
        for edge in (row, *row["edges"]):
            edge["pruned"] = marks.is_pruned(edge["kind"], edge["base"], row["version"])
    if as_json:
        c.write_json(
            {
                "url": chain.store.url,
                "chain": chain.identity.chain,
                "head": head.version,
                "model": model,
                "versions": versions,
                "missing": missing,
            }
        )
    else:
        _show(chain, head, model, versions, missing)
    _tell_missing(missing)


def read_present(chain: Chain, first: int, last: int) -> tuple[list[Committed], list[int]]:
    """Read the manifests of a range of versions, oldest first.

    Returns:
        The manifests, and the versions of those that are missing.

    Raises:
        BrokenChainError: A manifest names another parent than the one before it.
    """
    found: list[Committed] = []
    missing: list[int] = []
    while first <= last:
        try:
            for committed in chain.history(first, last, reads=READS):
                found.append(committed)
                first = committed.version + 1
        except BrokenChainError:
            if chain.has(first):
                raise
            missing.append(first)
            first += 1
    return found, missing


@dataclass(frozen=True, slots=True)
class _Marks:
    """What later records say of versions."""

    tags: tuple[Tag, ...]
    prunes: PruneRecord | None

    def is_pruned(self, kind: str, base: int | None, version: int) -> bool:
        return self.prunes is not None and self.prunes.range_of(kind, base, version) is not None


def _marks(chain: Chain) -> _Marks:
    """Read tags and the newest prune record; say so where one cannot be used, and go on."""
    from deltachain.chain.tags import read_all

    tags: tuple[Tag, ...] = ()
    prunes: PruneRecord | None = None
    try:
        tags = read_all(chain)
        prunes = chain.prunes.newest()
    except (FormatError, ChainError, ObjectNotFoundError) as error:
        logger.warning("tags or pruned versions are not marked: %s", error)
    return _Marks(tags, prunes)


def _tell_missing(missing: Sequence[int]) -> None:
    """Raise if manifests are missing, once all others are shown.

    Raises:
        BrokenChainError: Some are.
    """
    from deltachain.format.keys import manifest_key

    if missing:
        several = len(missing) > 1
        raise BrokenChainError(
            f"the manifest{'s' if several else ''} of version{'s' if several else ''} "
            f"{c.ranges(missing)} {'are' if several else 'is'} missing; all others are shown",
            version=missing[0],
            hint=f"restore {manifest_key(missing[0])}{', ...' if several else ''} from a backup, "
            "then see `deltachain verify`",
        )


def _plot(versions: Sequence[Committed]) -> None:
    from deltachain.cli.plot import columns

    out = c.out()
    ends = str(versions[0].version), str(versions[-1].version)
    density = [committed.manifest.density for committed in versions]
    stored = [float(committed.manifest.edge.nbytes) for committed in versions]
    out.print(columns("changed elements", density, ends, c.percent, out.width))
    out.print(columns("\nbytes", stored, ends, lambda size: c.nbytes(int(size)), out.width))


def describe_model(chain: Chain) -> dict[str, Any]:
    """Summarise number, sizes and wire dtypes of the chain's tensors."""
    specs = chain.table.specs()
    return {
        "tensors": len(specs),
        "numel": sum(spec.numel for spec in specs),
        "nbytes": sum(spec.nbytes for spec in specs),
        "dtypes": dict(Counter(spec.dtype for spec in specs).most_common()),
        "aliases": len(chain.table.aliases),
    }


def _version(
    committed: Committed, records: Mapping[int, list[Edge]], dense_nbytes: int
) -> dict[str, Any]:
    from deltachain.format.documents import reverted_to

    manifest = committed.manifest
    edge = manifest.edge
    return {
        "version": manifest.version,
        "epoch": manifest.epoch,
        **_edge(edge, dense_nbytes),
        "step": manifest.step,
        "time": manifest.time,
        "nnz": manifest.nnz,
        "numel": manifest.numel,
        "density": manifest.density,
        "bits_per_change": c.bits_per_change(edge.nbytes, manifest.nnz),
        "state": manifest.state,
        "manifest": committed.digest,
        "metadata": manifest.metadata,
        **signers(committed),
        "reverted_to": reverted_to(manifest),
        "edges": [_edge(added, dense_nbytes) for added in records.get(manifest.version, [])],
    }


def _edge(edge: Edge, dense_nbytes: int) -> dict[str, Any]:
    return {
        "kind": edge.kind,
        "base": edge.base,
        "nbytes": edge.nbytes,
        "parts": len(edge.parts),
        "encodings": list(edge.encodings),
        "dense_ratio": round(dense_nbytes / edge.nbytes, 2) if edge.nbytes else None,
    }


def _show(
    chain: Chain,
    head: Committed,
    model: Mapping[str, Any],
    versions: Iterable[Mapping[str, Any]],
    missing: Iterable[int],
) -> None:
    dtypes = ", ".join(f"{dtype} in {n:,}" for dtype, n in model["dtypes"].items())
    tied = f", {model['aliases']} tied" if model["aliases"] else ""
    out = c.out()
    out.print(
        c.facts(
            chain=f"{chain.identity.chain}  at {chain.store.url}",
            head=f"version {head.version}, epoch {head.manifest.epoch}, "
            f"state {head.manifest.state}",
            model=f"{c.count(model['numel'])} elements in {model['tensors']:,} tensors{tied}, "
            f"{c.nbytes(model['nbytes'])} ({dtypes})",
            **({"signed by": by} if (by := signed(signers(head))) else {}),
        )
    )
    rows: list[tuple[Mapping[str, Text | str], str]] = []
    columns = [*COLUMNS]
    gaps = sorted(missing)
    for version in versions:
        while gaps and gaps[-1] > version["version"]:
            rows.append((_gap(gaps.pop()), ""))
        rows.append((_row(version), ""))
        rows += [({"kind": Text(f"tag {name}", "green")}, "") for name in version["tags"]]
        rows += [(_added(edge), "dim") for edge in version["edges"]]
        if version["signatures"] and "signed by" not in columns:
            columns.append("signed by")
    rows += [(_gap(version), "") for version in reversed(gaps)]
    grid = c.table(*columns)
    for row, style in rows:
        grid.add_row(*(row.get(name, "") for name in columns), style=style)
    out.print()
    out.print(c.fitted(grid, out.width, *GIVE_WAY))


def _gap(version: int) -> dict[str, Text | str]:
    """Format the cells of a version without a manifest."""
    return {">version": str(version), "kind": Text("missing", "red")}


def _row(version: Mapping[str, Any]) -> dict[str, Text | str]:
    """Format the cells of a version, by column."""
    bits = version["bits_per_change"]
    is_delta = version["kind"] == "delta"
    return {
        ">version": str(version["version"]),
        ">epoch": Text(str(version["epoch"]), "dim"),
        "kind": _kind(version),
        ">step": "" if version["step"] is None else str(version["step"]),
        "committed": Text(c.moment(version["time"]), "dim"),
        ">changed": c.count(version["nnz"]),
        ">density": c.percent(version["density"]),
        ">bytes": _stored(version),
        ">bits": f"{bits:.2f}" if bits and is_delta else "",
        ">dense": f"1/{version['dense_ratio']:,.0f}" if version["nbytes"] and is_delta else "",
        "state": Text(version["state"][:8], "dim"),
        "signed by": Text(signed(version, SHOWN_DIGITS).partition(" (")[0], "dim"),
    }


def _kind(version: Mapping[str, Any]) -> Text:
    if version["reverted_to"] is not None:
        text = Text(f"revert to {version['reverted_to']}", "yellow")
    else:
        text = Text(version["kind"], "" if version["kind"] == "delta" else "cyan")
    return text.append(" pruned", "dim") if version["pruned"] else text


def _added(edge: Mapping[str, Any]) -> dict[str, Text | str]:
    """Format the cells of an edge that was added after its version's commit."""
    return {
        "kind": Text(f"+ {edge['kind']}{' pruned' if edge['pruned'] else ''}", "cyan"),
        "committed": "" if edge["base"] is None else f"from {edge['base']}",
        ">bytes": _stored(edge),
    }


def _stored(edge: Mapping[str, Any]) -> str:
    """Format the size of an edge, and its number of objects if above 1."""
    parts = f" in {edge['parts']}" if edge["parts"] > 1 else ""
    return c.nbytes(edge["nbytes"]) + parts
