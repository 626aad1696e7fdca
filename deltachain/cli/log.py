"""``deltachain log``: the versions of a chain, newest first."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from deltachain.cli import console as c
from deltachain.cli.keygen import SHOWN_DIGITS, signed, signers
from deltachain.cli.options import AsJson, At, AtStep, TagName, Url, choice_of, opened
from deltachain.errors import BrokenChainError, ChainError, FormatError, ObjectNotFoundError

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

GIVE_WAY: Final = ("epoch", "committed", "dense", "bits", "density", "state", "signed by")

READS: Final = 16  # manifests read at a time

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
    as_json: AsJson = False,
) -> None:
    """Show the versions of a chain, newest first.

    Prints changed elements, payload size and state digest of each version, with tags and added
    edges. Objects of a `pruned` edge are or will be deleted. A missing manifest has a row, and the
    exit code is then 4.

    Example: `deltachain log /mnt/policy -n 5`

    Example: `deltachain log /mnt/policy --at 2026-11-23T09:00`
    """
    from deltachain.chain.tags import VersionChoice, choose
    from deltachain.verify import edge_records

    choice = choice_of(version, step=step, tag=tag, at=at)
    chain = opened(url)
    head = choose(chain, VersionChoice())
    last = head.version if choice == VersionChoice() else choose(chain, choice).version
    first = max(0, last - limit + 1)
    shown, missing = _read_present(chain, first, last)
    added: dict[int, list[Edge]] = defaultdict(list)
    for record, summary in edge_records(chain, first, last):
        added[summary.version].append(record.edge)
    model, (tags, prunes) = _model(chain), _records(chain)
    report = {
        "url": chain.store.url,
        "chain": chain.identity.chain,
        "head": head.version,
        "model": model,
        "versions": [
            _version(one, added[one.version], tags, prunes, model["nbytes"]) for one in shown[::-1]
        ],
        "missing": missing,
    }
    c.show(report, lambda found: _show(found, head), as_json=as_json)
    if missing:
        raise _gone(missing)


def _read_present(chain: Chain, first: int, last: int) -> tuple[list[Committed], list[int]]:
    present: list[Committed] = []
    missing: list[int] = []
    while first <= last:
        try:
            for committed in chain.history(first, last, reads=READS):
                present.append(committed)
                first = committed.version + 1
        except BrokenChainError:
            if chain.has(first):
                raise
            missing.append(first)
            first += 1
    return present, missing


def _records(chain: Chain) -> tuple[tuple[Tag, ...], PruneRecord | None]:
    from deltachain.chain.tags import read_all

    tags: tuple[Tag, ...] = ()
    try:
        tags = read_all(chain)
        return tags, chain.prunes.newest()
    except (FormatError, ChainError, ObjectNotFoundError) as error:
        logger.warning("tags or pruned versions are not marked: %s", error)
    return tags, None


def _gone(missing: Sequence[int]) -> BrokenChainError:
    from deltachain.format.keys import manifest_key

    several = len(missing) > 1
    return BrokenChainError(
        f"the manifest{'s' if several else ''} of version{'s' if several else ''} "
        f"{c.ranges(missing)} {'are' if several else 'is'} missing; all others are shown",
        version=missing[0],
        hint=f"restore {manifest_key(missing[0])}{', ...' if several else ''} from a backup, "
        "then see `deltachain verify`",
    )


def _model(chain: Chain) -> dict[str, Any]:
    specs = chain.table.specs()
    return {
        "tensors": len(specs),
        "numel": sum(spec.numel for spec in specs),
        "nbytes": sum(spec.nbytes for spec in specs),
        "dtypes": dict(Counter(spec.dtype for spec in specs).most_common()),
        "aliases": len(chain.table.aliases),
    }


def _version(
    committed: Committed,
    added: Sequence[Edge],
    tags: Sequence[Tag],
    prunes: PruneRecord | None,
    dense_nbytes: int,
) -> dict[str, Any]:
    from deltachain.format.documents import reverted_to

    manifest = committed.manifest

    def edge(one: Edge) -> dict[str, Any]:
        pruned = prunes is not None and prunes.range_of(one.kind, one.base, manifest.version)
        return {
            **c.fields(one, "kind", "base", "nbytes"),
            "parts": len(one.parts),
            "encodings": list(one.encodings),
            "dense_ratio": round(dense_nbytes / one.nbytes, 2) if one.nbytes else None,
            "pruned": bool(pruned),
        }

    return {
        **c.fields(manifest, "version", "epoch", "step", "time", "nnz", "numel", "density"),
        **edge(manifest.edge),
        "bits_per_change": c.bits_per_change(manifest.edge.nbytes, manifest.nnz),
        **c.fields(manifest, "state", "metadata"),
        "manifest": committed.digest,
        **signers(committed),
        "reverted_to": reverted_to(manifest),
        "edges": [edge(one) for one in added],
        "tags": [tag.name for tag in tags if tag.version == manifest.version],
    }


def _show(report: Mapping[str, Any], head: Committed) -> None:
    model, versions = report["model"], report["versions"]
    dtypes = ", ".join(f"{dtype} in {n:,}" for dtype, n in model["dtypes"].items())
    tied = f", {model['aliases']} tied" if model["aliases"] else ""
    about = {
        "chain": f"{report['chain']}  at {report['url']}",
        "head": f"version {head.version}, epoch {head.manifest.epoch}, state {head.manifest.state}",
        "model": f"{c.count(model['numel'])} elements in {model['tensors']:,} tensors{tied}, "
        f"{c.nbytes(model['nbytes'])} ({dtypes})",
    }
    if by := signed(signers(head)):
        about["signed by"] = by
    columns = [*COLUMNS, "signed by"] if any(v["signatures"] for v in versions) else COLUMNS
    blocks = {version["version"]: list(_rows(version)) for version in versions}
    for gone in report["missing"]:
        blocks[gone] = [{">version": str(gone), "kind": Text("missing", "red")}]
    rows = [row for _, block in sorted(blocks.items(), reverse=True) for row in block]
    cells = ([row.get(title, "") for title in columns] for row in rows)
    out = c.out()
    out.print(c.facts(**about))
    out.print()
    out.print(c.table(columns, cells, *GIVE_WAY))


def _rows(version: Mapping[str, Any]) -> Iterator[dict[str, Text | str]]:
    bits, is_delta = version["bits_per_change"], version["kind"] == "delta"
    back = version["reverted_to"]
    kind = Text(version["kind"], "" if is_delta else "cyan")
    kind = kind if back is None else Text(f"revert to {back}", "yellow")
    yield {
        ">version": str(version["version"]),
        ">epoch": Text(str(version["epoch"]), "dim"),
        "kind": kind.append(" pruned" if version["pruned"] else "", "dim"),
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
    for name in version["tags"]:
        yield {"kind": Text(f"tag {name}", "green")}
    for edge in version["edges"]:
        yield {
            "kind": Text(f"+ {edge['kind']}{' pruned' if edge['pruned'] else ''}", "cyan"),
            "committed": Text("" if edge["base"] is None else f"from {edge['base']}", "dim"),
            ">bytes": Text(_stored(edge), "dim"),
        }


def _stored(edge: Mapping[str, Any]) -> str:
    parts = f" in {edge['parts']}" if edge["parts"] > 1 else ""
    return c.nbytes(edge["nbytes"]) + parts
