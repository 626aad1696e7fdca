"""``deltachain stats``: size of a chain."""

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, Url, opened
from deltachain.cli.prune import KeepEvery, KeepLast, KeepWithin, pruned, rule_of
from deltachain.errors import BrokenChainError, no_version

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain, Committed
    from deltachain.maintain.survey import Survey

AGES: Final = (1, 10, 100, 1000, 10_000)
"""Versions behind the head of the followers that are looked at."""


def stats(
    url: Url,
    *,
    keep_last: KeepLast = 1024,
    keep_within: KeepWithin = None,
    keep_every: KeepEvery = None,
    as_json: AsJson = False,
) -> None:
    """Show the objects in a chain's store, the cost of joining it, and what a prune would free.

    Example: `deltachain stats s3://bucket/run-1`
    """
    from deltachain.maintain.survey import Survey

    chain = opened(url)
    head = chain.head()
    if head is None:
        raise no_version(url)
    objects, nbytes = Counter[str](), Counter[str]()
    for info in chain.store.list():
        kind = info.key.partition("/")[0]
        objects[kind] += 1
        nbytes[kind] += info.nbytes
    ages = (None, *(age for age in AGES if age <= head.version))
    report = {
        "url": chain.store.url,
        "chain": chain.identity.chain,
        "head": head.version,
        "kinds": [
            {"kind": kind, "objects": objects[kind], "nbytes": size}
            for kind, size in nbytes.most_common()
        ],
        "nbytes": nbytes.total(),
        "readers": [_reader(chain, head, age) for age in ages],
        "prune": _dry_prune(Survey(chain), keep_last, keep_within, keep_every),
    }
    c.show(report, _show, as_json=as_json)


def _reader(chain: "Chain", head: "Committed", age: int | None) -> dict[str, Any]:
    """Return what a newcomer, or a follower so many versions behind, fetches."""
    from deltachain.chain.chain import plan_present

    try:
        plan = plan_present(chain, None if age is None else head.version - age, head)
    except BrokenChainError:
        return {"age": age, "nbytes": None, "edges": None, "objects": None}
    edges = len(plan.edges)
    return {"age": age, "nbytes": plan.nbytes, "edges": edges, "objects": plan.requests}


def _dry_prune(
    survey: "Survey", last: int, within: str | None, every: int | None
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
    out.print(c.facts(chain=f"{report['chain']}  at {report['url']}", head=f"{report['head']}"))
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
