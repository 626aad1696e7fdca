"""Orphans: payload objects that no document names, and none will."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from deltachain.chain.chain import Committed
from deltachain.chain.skips import SPANS
from deltachain.format.documents import EdgeSummary
from deltachain.format.prune_record import closes
from deltachain.maintain.survey import Survey, by_version
from deltachain.store import ObjectInfo


def orphans(
    survey: Survey,
    head: Committed,
    objects: Mapping[str, ObjectInfo],
    gone: Collection[EdgeSummary],
) -> tuple[ObjectInfo, ...]:
    """Return the orphans among payload objects.

    Parts of a delta are orphans if their version is committed with other parts: its manifest never
    changes. Parts of an anchor or a skip may be named later, unless a record of that kind leads to
    their version already, or the delta to it is pruned: nothing is added to such a version. Parts
    that an unreadable record may name stay: others may be able to read it.

    Args:
        survey: Survey of the chain, up to ``head``.
        head: The newest version.
        objects: Payload objects, by key.
        gone: Pruned edges whose grace is over.
    """
    edges = survey.edges(head)
    known: dict[tuple[str, int], list[EdgeSummary]] = {}
    for edge in edges:
        known.setdefault((f"{edge.kind}s", edge.version), []).append(edge)
    own = {edge.version: edge for edge in edges if not edge.record}
    suspects: dict[EdgeSummary, None] = {}
    lines = {line: infos for line, infos in by_version(objects).items() if line[1] <= head.version}
    for folder, version in lines:
        if folder == "deltas" and version in own:
            suspects[own[version]] = None
        suspects |= dict.fromkeys(known.get((folder, version), ()))
    parts = survey.parts_of(suspects)
    found, unreadable = [], survey.unreadable()
    for (folder, version), infos in lines.items():
        if (folder, version) in unreadable:
            continue
        mine = [own[version]] if folder == "deltas" and version in own else []
        mine += known.get((folder, version), [])
        is_gone = own.get(version) in gone or closes(survey.forgotten, version)
        if not (_is_settled(folder, version, mine) or is_gone):
            continue
        named = [parts[edge] for edge in mine]
        if all(one is not None for one in named):
            keys = {key for one in named for key in one or ()}
            found += [info for info in infos if info.key not in keys]
    return tuple(found)


def _is_settled(folder: str, version: int, edges: Sequence[EdgeSummary]) -> bool:
    """Return whether every edge to a version that may have parts in a folder is known."""
    if folder == "deltas":
        return bool(edges)
    records = sum(1 for edge in edges if edge.record)
    spans = sum(version % span == 0 for span in SPANS)  # none: a skip of another program
    return records >= (1 if folder == "anchors" or not spans else spans)
