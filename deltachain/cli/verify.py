"""``deltachain verify``: verify all objects and states of a chain."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, At, AtStep, Base, TagName, Url, choice_of, opened

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain
    from deltachain.verify import EdgeProof, VersionProof


def verify(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    first: Annotated[int, typer.Option("--from", min=0, metavar="N", help="First version.")] = 0,
    last: Annotated[
        int | None,
        typer.Option(
            "--to",
            min=0,
            metavar="N",
            help="Last version. Default: the head. `--step`, `--tag` and `--at` name it too.",
        ),
    ] = None,
    step: AtStep = None,
    tag: TagName = "",
    at: At = "",
    base: Base = None,
    as_json: AsJson = False,
) -> None:
    """Verify every byte, link and state of a chain.

    Rebuilds the weights from version to version in a temporary file (TMPDIR), and recomputes each
    state digest; anchors and skips must lead to the same. A missing payload is pruned if a prune
    record names it, expired if a later anchor replaces it. The first error ends the command with
    its exit code.

    Example: `deltachain verify /mnt/policy --from 100`
    """
    from deltachain.chain.tags import choose
    from deltachain.cli.progress import counted
    from deltachain.verify import newest
    from deltachain.verify import verify as prove

    start, choice = time.perf_counter(), choice_of(last, step=step, tag=tag, at=at)
    chain = opened(url)
    if choice.is_search:
        last = choose(chain, choice).version
    end = newest(chain) if last is None else last
    proofs = prove(chain, first=first, last=end, base=base)
    done = list(counted(proofs, max(end - first + 1, 0), "proving versions"))
    report = _report(chain, done, time.perf_counter() - start)
    if as_json:
        rows = [dataclasses.asdict(proof) | {"state": str(proof.state)} for proof in done]
        c.write_json(report | {"versions": rows})
    else:
        _show(report, done)


def _report(chain: "Chain", done: "Sequence[VersionProof]", seconds: float) -> dict[str, Any]:
    kinds: dict[str, list[EdgeProof]] = defaultdict(list)
    signed: dict[str, list[int]] = defaultdict(list)
    for proof in done:
        for edge in proof.edges:
            kinds[edge.kind].append(edge)
        for key_id in dict.fromkeys(proof.signed_by or proof.signatures):
            signed[key_id].append(proof.version)
    gone = [edge for proof in done for edge in proof.edges if edge.expired]
    return {
        "url": chain.store.url,
        "chain": chain.identity.chain,
        "first": done[0].version,
        "last": done[-1].version,
        "epoch": done[-1].epoch,
        "state": str(done[-1].state),
        "seconds": round(seconds, 3),
        "edges": {kind: _totals(edges) for kind, edges in kinds.items()},
        "expired": [edge.expired for edge in gone if not edge.pruned],
        "pruned": [edge.expired for edge in gone if edge.pruned],
        "signed": dict(signed),
        "checked": chain.trust.trusted is not None,
        "not_rebuilt": [proof.version for proof in done if not proof.rebuilt],
        "refetched": [key for proof in done for edge in proof.edges for key in edge.refetched],
    }


def _totals(edges: "Sequence[EdgeProof]") -> dict[str, int]:
    return {
        "edges": len(edges),
        "proven": sum(edge.proven for edge in edges),
        "objects": sum(edge.parts for edge in edges),
        "nbytes": sum(edge.nbytes for edge in edges),
        "frames": sum(edge.frames for edge in edges),
        "nnz": sum(edge.nnz for edge in edges),
    }


def _show(report: dict[str, Any], done: "Sequence[VersionProof]") -> None:
    out = c.out()
    rows = (
        (
            kind,
            f"{totals['edges']:,}",
            f"{totals['proven']:,}",
            f"{totals['objects']:,}",
            c.nbytes(totals["nbytes"]),
            f"{totals['frames']:,}",
            c.count(totals["nnz"]),
        )
        for kind, totals in report["edges"].items()
    )
    titles = ("edges", ">number", ">proven", ">objects", ">bytes", ">frames", ">elements")
    out.print(c.table(titles, rows, "frames", "objects", "elements"))
    for words in _unproven(done):
        out.print(f"\n{words}")
    if report["pruned"]:
        out.print(f"\npayloads of {c.plural(len(report['pruned']), 'edge')} were pruned")
    if report["expired"] or report["not_rebuilt"]:
        out.print(f"\n{_expired(report)}", style="yellow" if report["expired"] else "")
    for key in report["refetched"]:
        out.print(f"\n{key}: corrupt on the first read, intact on the second", style="yellow")
    unchecked = "" if report["checked"] else "; not checked, since no keys are trusted"
    for key_id, versions in report["signed"].items():
        by = f"\nsigned by {c.clean(key_id[:64])}: versions {c.ranges(versions)}{unchecked}"
        out.print(by, soft_wrap=True)
    rebuilt = [proof.version for proof in done if proof.rebuilt]
    span = f"version {rebuilt[0]} is" if len(rebuilt) == 1 else f"versions {c.ranges(rebuilt)} are"
    out.print()
    c.done(f"{span} proven in {report['seconds']:.1f} s; state {report['state']}")


def _unproven(done: "Sequence[VersionProof]") -> Iterator[str]:
    first = done[0].version
    edges = [(proof.version, edge) for proof in done if proof.rebuilt for edge in proof.edges]
    for version, edge in edges:
        if not edge.proven and not edge.expired:
            why = f"it starts before version {first}"
            if edge.base is not None and edge.base >= first:
                why = f"version {edge.base} cannot be rebuilt"
            yield f"{edge.kind} {edge.base} to {version}: read, but not proven: {why}"


def _expired(report: dict[str, Any]) -> str:
    gone, versions = report["expired"], report["not_rebuilt"]
    words = []
    if gone:
        words.append(f"payloads of {c.plural(len(gone), 'edge')} have expired, {gone[0]} first")
    if versions:
        causes = ["were pruned"] * bool(report["pruned"]) + ["have expired"] * bool(gone)
        words.append(
            f"version{'' if len(versions) == 1 else 's'} {c.ranges(versions)} cannot be rebuilt, "
            f"because payloads {' or '.join(causes or ['have expired'])}; the manifests are intact"
        )
    return "; ".join(words)
