"""Pruner: retires edges in a record, and deletes their objects after a grace."""

import dataclasses
import logging
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

from msgspec.structs import replace

from deltachain import errors
from deltachain.chain import tags
from deltachain.chain.ancestry import SPANS
from deltachain.chain.chain import Chain, Committed, check_write_access, plan_present
from deltachain.chain.heartbeat import newest_prune
from deltachain.chain.plan import VERSIONS_LISTED, Plan
from deltachain.format.documents import EdgeSummary, PrunedKind, PrunedRange, PruneRecord
from deltachain.format.keys import HEAD_KEY, prune_key
from deltachain.maintain.survey import Survey, by_version, with_objects
from deltachain.setting_types import AtLeastOne, NotNegative, check_kinds
from deltachain.store import ObjectInfo
from deltachain.store.base import already_exists
from deltachain.threads import Pool
from deltachain.types import Version


def span_of(edge: EdgeSummary) -> int:
    return 0 if edge.base is None else edge.version - edge.base


def times_of(record: PruneRecord | None, edges: Iterable[EdgeSummary]) -> dict[EdgeSummary, float]:
    if record is None:
        return {}
    found = ((edge, record.range_of(edge.kind, edge.base, edge.version)) for edge in edges)
    return {edge: row.after for edge, row in found if row is not None}


def ended_in(record: PruneRecord | None, edges: Iterable[EdgeSummary]) -> set[EdgeSummary]:
    """Return the edges whose grace a record ended: no later record takes them back."""
    times = times_of(record, edges)
    return {edge for edge, after in times.items() if record is not None and after <= record.time}


def ends_a_grace(record: PruneRecord, now: float) -> bool:
    return any(record.time < row.after <= now for row in record.pruned)


def ranges(
    edges: Iterable[EdgeSummary], after: Mapping[EdgeSummary, float], now: float
) -> tuple[PrunedRange, ...]:
    """Return pruned edges as ranges that contain no other edge."""
    lines: dict[tuple[str, int], list[tuple[Version, PrunedRange | None]]] = defaultdict(list)
    for edge in edges:
        if edge.kind != "base":
            own = _range(edge, after[edge]) if edge in after else None
            lines[edge.kind, span_of(edge)].append((edge.version, own))
    found: list[PrunedRange] = []
    for _, line in sorted(lines.items()):
        previous: PrunedRange | None = None
        for _, one in sorted(line, key=lambda place: place[0]):
            if one is not None and previous is not None and _alike(previous, one, now):
                found.pop()
                last, late = max(previous.last, one.last), max(previous.after, one.after)
                one = replace(previous, last=last, after=late)  # noqa: PLW2901 - both in one
            if one is not None:
                found.append(one)
            previous = one
    return tuple(found)


def _alike(one: PrunedRange, other: PrunedRange, now: float) -> bool:
    return one.after == other.after or max(one.after, other.after) <= now


def _range(edge: EdgeSummary, after: float) -> PrunedRange:
    kind, version = cast("PrunedKind", edge.kind), edge.version
    return PrunedRange(kind=kind, span=span_of(edge), first=version, last=version, after=after)


KEEP_LAST: Final = 1024  # newest versions that are kept by default
ANCHORS_KEPT: Final = 2
"""Newest anchors that are kept in any case, so that newcomers have a second way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRule:
    """Rule of what pruning keeps. A version is kept if any part of the rule names it."""

    # Number of newest versions; every edge among them is kept, for followers. Versions that the
    # head's manifest lists are kept in any case.
    last: AtLeastOne = KEEP_LAST
    # Seconds before the head's commit, by the publisher's clock; as for `last`.
    within_s: NotNegative | None = None
    every: AtLeastOne | None = None  # keep each version that this number divides; `None` for none
    tags: bool = True  # whether to keep every tagged version

    def __post_init__(self) -> None:
        check_kinds(self)

    def kept(self, first: Version, tagged: Iterable[Version]) -> frozenset[Version]:
        multiples = range(0, first + 1, self.every) if self.every else range(0)
        old = (version for version in tagged if self.tags and version <= first)
        return frozenset({first, *multiples, *old})


def newest_edges(
    edges: Collection[EdgeSummary], there: Collection[EdgeSummary], *, first: Version
) -> set[EdgeSummary]:
    """Return the edges of the newest versions, from an anchor before them on, and newest anchors.

    That is the newest anchor from which every one of them can be reached that can be reached at
    all; where payloads were lost, a skip from before it may lead around them.
    """
    anchors = sorted((edge.version for edge in edges if edge.base is None), reverse=True)
    newest = {
        edge for edge in edges if edge.base is None and edge.version in anchors[:ANCHORS_KEPT]
    }
    wanted = {version for version in _reached(there) if version >= first}
    for begin in anchors:
        if begin <= first and wanted <= _reached(e for e in there if _begins(e) >= begin):
            return newest | {edge for edge in edges if _begins(edge) >= begin}
    return set(edges)


def _reached(edges: Iterable[EdgeSummary]) -> set[Version]:
    """Return the versions that edges, by version, lead to from nothing."""
    found: set[Version] = set()
    for edge in edges:
        if edge.base is None or edge.base in found:
            found.add(edge.version)
    return found


def _begins(edge: EdgeSummary) -> Version:
    return edge.version if edge.base is None else edge.base


def ways_to(
    chain: Chain,
    versions: Iterable[Version],
    head: Committed,
    edges: Collection[EdgeSummary],
    ended: Collection[EdgeSummary],
) -> set[EdgeSummary]:
    """Return the edges of the plans that lead readers from nothing to the head and to versions.

    A reader knows the anchors that the manifest of a version and the next one list. These stay as
    well, so that it finds its way also when others are gone.
    """
    stay = {*_plan(chain, head, edges, ended).edges, *_listed(chain, head, edges)}
    lost = []
    for version in versions:
        committed = chain.find(version)
        try:
            if committed is not None:
                stay.update(_plan(chain, committed, edges, ended).edges)
                stay.update(_listed(chain, committed, edges))
                continue
        except errors.BrokenChainError:
            pass
        lost.append(version)
    if lost:
        logger.warning(
            "kept versions that cannot be reached any more: %d, version %d first",
            len(lost),
            lost[0],
        )
    return stay


def _plan(
    chain: Chain,
    target: Committed,
    edges: Collection[EdgeSummary],
    ended: Collection[EdgeSummary],
) -> Plan:
    """Return a reader's plan from nothing, if need be over pruned edges that are still there.

    Where that leads on, the plan starts at an anchor that manifests list for good: the head hint
    names others tomorrow.
    """
    listed = _listed(chain, target, edges)
    hinted = [edge for edge in edges if edge.base is None and edge not in listed]
    avoided = [*hinted, *ended]
    for avoid, pruned in ((avoided, False), (avoided, True), (ended, False), (ended, True)):
        with suppress(errors.BrokenChainError):
            return plan_present(chain, None, target, avoid=avoid, pruned=pruned)
    return plan_present(chain, None, target, pruned=True)


def _listed(
    chain: Chain, committed: Committed, edges: Collection[EdgeSummary]
) -> list[EdgeSummary]:
    """Return the anchors that a manifest and the next one list."""
    later = chain.find(committed.version + 1)
    found = {*committed.manifest.recent, *(later.manifest.recent if later else ())}
    places = {(edge.version, edge.record) for edge in found if edge.base is None}
    return [
        edge
        for edge in edges
        if edge.base is None
        and edge.version <= committed.version
        and (edge.version, edge.record) in places
    ]


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
        if not (_is_settled(folder, version, mine) or own.get(version) in gone):
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


logger = logging.getLogger(__name__)

GRACE_S: Final = 3600.0
"""Seconds from a prune record to the deletion of objects: longer than any plan is in use."""

DELETES: Final = 8  # objects deleted at a time
TRIES: Final = 5  # attempts to write a record while another maintainer writes records too


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What one round of pruning does."""

    head: Version
    before: PruneRecord | None
    time: float  # time of the store, in seconds since 1970; not before the newest record
    retired: tuple[EdgeSummary, ...]
    after: Mapping[EdgeSummary, float]  # earliest time of deletion of every pruned edge
    edges: tuple[EdgeSummary, ...]
    # Objects of pruned edges whose grace is over, and that no way needs.
    due: tuple[ObjectInfo, ...]
    waiting: tuple[ObjectInfo, ...]
    orphans: tuple[ObjectInfo, ...]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in (*self.due, *self.orphans))


class Pruner:
    """Prunes one chain, in two phases.

    A record names the edges that planners must not use from now on. Their objects are deleted when
    the grace is over by the clock of the store, after a proof that the head and every kept version
    can still be reached from nothing.

    The grace is over for good with a record made after it. Until then another record may take an
    edge back, from then on none does, and objects are deleted only from then on: who was stopped
    before a deletion deletes nothing that somebody relies on since.
    """

    def __init__(
        self,
        survey: Survey,
        rule: KeepRule,
        *,
        grace_s: float = GRACE_S,
        tagged: Callable[[Chain], Iterable[Version]] | None = None,
    ) -> None:
        self.survey, self.rule, self.grace_s = survey, rule, grace_s
        self._chain, self._tagged = survey.chain, tagged or _tagged
        self._id = uuid.uuid4().hex
        self._known = -1

    def plan(self, *, dry: bool = False) -> PrunePlan | None:
        """Decide what the next round does; ``None`` without versions. Deletes nothing."""
        chain = self._chain
        record = self._newest()
        head = chain.head()
        if head is None:
            return None
        now = time.time() if dry else store_time(chain, head)
        now = max(now, record.time if record else now)  # a clock that was set back ends no grace
        first = self._first(head)
        edges, objects = self.survey.edges(head), self.survey.objects()
        past, ended = times_of(record, edges), ended_in(record, edges)
        kept = sorted(self.rule.kept(first, self._tagged(chain)))
        ways = ways_to(chain, kept, head, edges, ended)
        stay = ways | newest_edges(edges, with_objects(edges, objects), first=first)
        # No range can tell an edge from one that stays at the same place: a version may have two
        # anchors. A base checkpoint is never pruned.
        places = {(edge.kind, span_of(edge), edge.version) for edge in stay}
        wanted = {
            edge
            for edge in edges
            if edge.kind != "base" and (edge.kind, span_of(edge), edge.version) not in places
        }
        gone = ended | {edge for edge in wanted if edge in past and past[edge] <= now}
        withheld = self._whole(ended & stay, objects)
        self._say_withheld(ended & ways)
        retired = tuple(sorted(wanted - past.keys(), key=_order))
        after = {edge: past[edge] for edge in past if edge in gone or edge in wanted}
        after |= dict.fromkeys(retired, max(now + self.grace_s, math.nextafter(now, math.inf)))
        return PrunePlan(
            head=head.version,
            before=record,
            time=now,
            retired=retired,
            after=after,
            edges=edges,
            due=self._objects(gone - withheld, objects),
            waiting=self._objects(after.keys() - gone, objects),
            orphans=orphans(self.survey, head, objects, gone),
        )

    def record(self, plan: PrunePlan) -> PruneRecord | None:
        """Write the record of a plan; ``None`` if the newest one says the same.

        With it the grace of each edge that is due is over for good.
        """
        chain, newest = self._chain, self._newest()
        rows = ranges(plan.edges, plan.after, plan.time)
        if newest is None and not rows:
            return None
        if newest and rows == newest.pruned and not ends_a_grace(newest, plan.time):
            return None
        if newest != plan.before:  # which may name edges, or keep some, that the plan does not
            key = prune_key(newest.number if newest else 0)
            raise already_exists(key, chain.store.url)
        self._say_taken_back(plan, newest)
        record = PruneRecord(
            chain=chain.identity.chain,
            number=newest.number + 1 if newest else 0,
            head=plan.head,
            maintainer=self._id,
            time=plan.time,
            pruned=rows,
        )
        key, data = prune_key(record.number), chain.trust.seal(record, chain.identity.chain)
        chain.store.put_if_absent(key, data)
        if chain.store.get(key) != data:
            raise self._another(chain.prunes.read(record.number))
        self._known = record.number
        return record

    def _say_taken_back(self, plan: PrunePlan, newest: PruneRecord | None) -> None:
        """Warn of edges that another maintainer retired, and that this record does not."""
        if newest is None or newest.maintainer == self._id:
            return
        back = sum(newest.covers(edge) and edge not in plan.after for edge in plan.edges)
        if back:
            logger.warning(
                "%d edges that maintainer %s retired are kept: its rule is another one, or a "
                "version was tagged since; give all maintainers of a chain the same rule",
                back,
                newest.maintainer[:8],
            )

    def _say_withheld(self, edges: Collection[EdgeSummary]) -> None:
        """Warn of edges that are needed, and that no record takes back."""
        if edges:
            logger.warning(
                "%d edges are needed, to version %d first, and their grace is over: they are not "
                "deleted here, another maintainer may delete them at any moment; pull what you "
                "need from them, and restart the publisher, which adds an anchor",
                len(edges),
                min(edge.version for edge in edges),
            )

    def run(self, deleted: Callable[[ObjectInfo], None] = lambda _: None) -> PrunePlan | None:
        """Do one round: write a record if needed, and delete what is due."""
        check_write_access(self._chain)
        plan = None
        for attempt in range(TRIES):
            plan = self.plan()
            if plan is None:
                return None
            try:
                self.record(plan)
                break
            except errors.AlreadyExistsError:
                if attempt == TRIES - 1:
                    raise
        if plan is not None and (plan.due or plan.orphans):
            return self._delete(plan, deleted)
        return plan

    def _delete(self, plan: PrunePlan, deleted: Callable[[ObjectInfo], None]) -> PrunePlan | None:
        """Delete due objects and orphans, after another look at tags and records."""
        again = self.plan()
        if again is None:
            return None
        still = {info.key for info in (*again.due, *again.orphans)}
        missing = [info.key for info in plan.due if info.key not in still]
        kept = self._chain.store.find_all(missing) if missing else {}
        if kept:  # else another maintainer deleted them
            logger.warning("%d objects are kept, because they are needed again", len(kept))

        def delete(info: ObjectInfo) -> None:
            self._chain.store.delete(info.key)
            deleted(info)

        with Pool(DELETES) as pool:
            due = tuple(info for info in plan.due if info.key in still)
            unnamed = tuple(info for info in plan.orphans if info.key in still)
            for _ in pool.map(delete, (*due, *unnamed)):
                pass
        return dataclasses.replace(plan, due=due, orphans=unnamed)

    def _whole(
        self, edges: Collection[EdgeSummary], objects: Mapping[str, ObjectInfo]
    ) -> set[EdgeSummary]:
        sizes = {key: info.nbytes for key, info in objects.items()}
        return {
            edge
            for edge, parts in self.survey.parts_of(edges).items()
            if parts is not None and all(sizes.get(key) == n for key, n in parts.items())
        }

    def _first(self, head: Committed) -> Version:
        first = max(0, head.version - max(self.rule.last, VERSIONS_LISTED + 1) + 1)
        within = self.rule.within_s
        if within is None:
            return first
        oldest = head.manifest.time - within
        low, high = -1, first  # of the versions before, the first within the time
        while high - low > 1:
            middle = (low + high) // 2
            found = self._chain.find(middle)
            if found is not None and found.manifest.time >= oldest:
                high = middle
            else:
                low = middle
        return high

    def _objects(
        self, edges: Iterable[EdgeSummary], objects: Mapping[str, ObjectInfo]
    ) -> tuple[ObjectInfo, ...]:
        there = by_version(objects)
        wanted = [edge for edge in edges if (f"{edge.kind}s", edge.version) in there]
        found = []
        for edge, parts in self.survey.parts_of(wanted).items():
            found += [objects[key] for key in parts or () if key in objects]
            if parts is None:
                logger.warning("%s to version %d has no document", edge.kind, edge.version)
        return tuple(found)

    def _newest(self) -> PruneRecord | None:
        record = newest_prune(self._chain)
        decides = self._chain.store.capabilities.conditional_put
        if record is not None and not decides and -1 < self._known < record.number:
            raise self._another(record)
        self._known = record.number if record else self._known
        return record

    def _another(self, record: PruneRecord) -> errors.ChainError:
        return errors.ChainError(
            f"another maintainer ({record.maintainer[:8]}) wrote prune record {record.number}, and "
            f"{self._chain.store.url} cannot decide races",
            hint="run one maintainer for this URL, or use a store with conditional writes",
        )


def _tagged(chain: Chain) -> Iterable[Version]:
    return [tag.version for tag in tags.read_all(chain) if tag.version is not None]


def _order(edge: EdgeSummary) -> tuple[str, Version, Version]:
    return edge.kind, edge.version, -1 if edge.base is None else edge.base


def store_time(chain: Chain, head: Committed) -> float:
    """Return the time by the clock of the store, in seconds since 1970.

    Writes the head hint again, as it is, since a store tells the time of each write.
    """
    store = chain.store
    try:
        store.put(HEAD_KEY, store.get(HEAD_KEY))
    except errors.ObjectNotFoundError:
        chain.write_head(head.version, [])
    info = store.find(HEAD_KEY)
    if info is None or info.modified is None:
        raise errors.ChainError(
            f"{store.url} does not tell when an object was written: nothing can be pruned",
            hint="use a store that tells times",
        )
    return info.modified
