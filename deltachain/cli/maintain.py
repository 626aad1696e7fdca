"""``deltachain maintain``: add skips and anchors and prune, round after round."""

from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from deltachain.cli import console as c
from deltachain.cli import prune as pruning
from deltachain.cli.options import AsJsonLines, Base, Once, Url, opened
from deltachain.cli.serving import end, stopping
from deltachain.errors import DeltaChainError, ObjectNotFoundError, no_version

if TYPE_CHECKING:
    from deltachain.maintain import Maintained, Maintainer


def maintain(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    every: Annotated[str, typer.Option(metavar="SPAN", help="Time between rounds.")] = "60s",
    once: Once = False,
    delete: Annotated[
        bool, typer.Option("--prune/--no-prune", help="Prune versions outside the rule, or not.")
    ] = True,
    keep_last: pruning.KeepLast = 1024,
    keep_within: pruning.KeepWithin = None,
    keep_every: pruning.KeepEvery = None,
    keep_tags: pruning.KeepTags = True,
    grace: pruning.Grace = "1h",
    base: Base = None,
    as_json: AsJsonLines = False,
) -> None:
    """Keep a chain cheap to join and bounded in size, until Ctrl-C.

    Each round folds deltas into skips over 8, 64 and 512 versions, adds an anchor if joining is
    expensive, and prunes: a record names the unused edges, whose objects are deleted after the
    grace. Runs next to publishers, followers and other maintainers, or before the chain exists,
    with the right to write and without torch. With `--once` it fails if newcomers cannot join.

    Example: `deltachain maintain s3://bucket/run-1 --every 5m --keep-last 500`
    """
    rule = pruning.rule_of(keep_last, keep_within, keep_every, tags=keep_tags)
    stop, pause, grace_s = Event(), pruning.seconds(every), pruning.seconds(grace)
    maintainer: Maintainer | None = None

    def begun() -> "Maintainer":
        from deltachain.maintain import Maintainer

        chain = opened(url, writing=True)
        pruner = pruning.pruner_of(chain, rule, grace_s) if delete else None
        return Maintainer(chain, pruner, base=base)

    with stopping(stop) as by:
        while not stop.is_set():
            try:
                maintainer = maintainer or begun()
                found = maintainer.round()
                if found is not None:
                    _tell(found, as_json=as_json, once=once)
                if once:
                    _check_joinable(found, url)
            except DeltaChainError as error:
                is_early = maintainer is None and isinstance(error, ObjectNotFoundError)
                if once or not (error.retryable or is_early):
                    raise
                c.say_error(error)  # the next round tries again
            if once or stop.wait(pause):
                break
    end(by)


def _check_joinable(found: "Maintained | None", url: str) -> None:
    if found is None:
        raise no_version(url)
    if found.no_way is not None:
        raise found.no_way


def _tell(found: "Maintained", *, as_json: bool, once: bool) -> None:
    """Print what a round did; nothing for one of many rounds without work."""
    report = None if found.pruned is None else pruning.pruned(found.pruned)
    if as_json:
        c.write_json(
            {
                "head": found.head,
                "skips": [pruning.edge_row(edge) for edge in found.skips],
                "anchors": [pruning.edge_row(edge) for edge in found.anchors],
                "failed": list(found.failed),
                "pruned": report,
            }
        )
        return
    words = []
    if found.skips:
        size = c.nbytes(sum(edge.nbytes for edge in found.skips))
        words.append(f"skips added: {len(found.skips):,}, {size}")
    words += [f"anchor of version {e.version} added, {c.nbytes(e.nbytes)}" for e in found.anchors]
    if report is not None and (report["retired"] or report["deleted"]["objects"]):
        words += pruning.words_of(report)[: 3 if report["waiting"]["objects"] else 2]
    if words:
        c.out().print(f"version {found.head:>5}  " + "; ".join(words), soft_wrap=True)
    elif once and not found.failed:
        c.say(f"nothing to do up to version {found.head}")
    is_first_said = once and found.no_way is not None
    for failure in found.failed[is_first_said:]:
        c.say(f"warning  {failure}", "yellow")
