"""``deltachain stats``: size of a chain."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, Url
from deltachain.cli.prune import KeepEvery, KeepLast, KeepWithin, pruned, rule_of
from deltachain.errors import BrokenChainError, no_version

if TYPE_CHECKING:
    from deltachain.maintain.survey import ReaderPlan, Survey


def stats(
    url: Url,
    *,
    keep_last: KeepLast = 1024,
    keep_within: KeepWithin = None,
    keep_every: KeepEvery = None,
    as_json: AsJson = False,
) -> None:
    """Show the objects in a chain's store, and the cost of joining it.

    Lists every object. The last line shows how much `deltachain prune` would free.

    Example: `deltachain stats s3://bucket/run-1`
    """
    from deltachain.chain.chain import Chain
    from deltachain.maintain.survey import Survey, reader_plans, totals
    from deltachain.store import open_store

    chain = Chain.open(open_store(url))
    head = chain.head()
    if head is None:
        raise no_version(url)
    by_kind = {total.kind: total for total in totals(chain.store.list())}
    survey = Survey(chain)
    kinds = [c.fields(total, "kind", "objects", "nbytes") for total in by_kind.values()]
    report = {
        "url": chain.store.url,
        "chain": chain.identity.chain,
        "head": head.version,
        "kinds": kinds,
        "nbytes": sum(total.nbytes for total in by_kind.values()),
        "readers": [_reader(one) for one in reader_plans(chain, head)],
        "prune": _dry_prune(survey, keep_last, keep_within, keep_every),
    }
    if as_json:
        c.write_json(report)
    else:
        _show(report)


def _reader(one: ReaderPlan) -> dict[str, Any]:
    plan = one.plan
    return {
        "age": one.age,
        "nbytes": None if plan is None else plan.nbytes,
        "edges": None if plan is None else len(plan.edges),
        "objects": None if plan is None else plan.requests,
    }


def _dry_prune(
    survey: Survey, last: int, within: str | None, every: int | None
) -> dict[str, Any] | None:
    """Return what pruning would do; ``None`` if newcomers have no way, so that it is refused."""
    from deltachain.maintain import Pruner

    try:
        plan = Pruner(survey, rule_of(last, within, every)).plan(dry=True)
    except BrokenChainError:
        return None
    return None if plan is None else pruned(plan)


def _show(report: dict[str, Any]) -> None:
    out, most = c.out(), max(report["nbytes"], 1)
    out.print(
        c.facts(
            chain=f"{report['chain']}  at {report['url']}",
            head=f"{report['head']}",
        )
    )
    kinds = (
        (k["kind"], f"{k['objects']:,}", c.nbytes(k["nbytes"]), c.bar(k["nbytes"] / most))
        for k in report["kinds"]
    )
    readers = []
    for row in report["readers"]:
        who = "newcomer" if row["age"] is None else f"{row['age']:,} behind"
        if row["edges"] is None:
            readers.append((who, "none", "no way: restart the publisher"))
        else:
            readers.append((who, f"{row['edges']:,}", c.nbytes(row["nbytes"])))
    out.print()
    out.print(c.table(("objects", ">number", ">bytes", ""), kinds))
    out.print()
    out.print(c.table(("reader", ">edges", ">bytes"), readers))
    prune = report["prune"]
    if prune is None:
        out.print("\npruning would free nothing, since newcomers have no way to the head")
        return
    freed = prune["deleted"]["nbytes"] + prune["waiting"]["nbytes"]
    out.print(f"\npruning would free {c.nbytes(freed)}: deltachain prune URL --dry-run")
