"""A replica as a target: the ranks of an engine behind one subscriber.

The leader's side: it fetches a plan into the spool of its host, has every rank stage its share,
adds up the effects, and proves the result before any rank writes. If one rank refuses, no rank
writes; if one rank fails during the write, the write is undone on all of them.
"""

import itertools
import logging
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Final, Protocol, TypeVar, cast

import msgspec

from deltachain import errors
from deltachain.chain.fetch import Fetched
from deltachain.subscribe.proof import Effect, check_effect, check_whole
from deltachain.subscribe.targets.base import HeldVersion, Prepared, Target
from deltachain.types import StateDigest, TensorSpec, Version

from . import messages as wire
from .engine import Engine
from .fetcher import Fetchers, elements_of, hosts_of, receive, shown, with_ties
from .layout.classes import ON_HOST, Agreement, agree, orphans, summary
from .pause import PauseHolds
from .spool import Spool, SpoolIndex
from .unused_state import UnusedState

POLL_S: Final = (0.002, 0.05)
"""Shortest and longest wait between two polls of the ranks, in seconds."""

POLL_SHARE: Final = 0.1
"""Wait until the next poll, as a share of the time waited so far.

The end is seen at most this share late, and an engine, which answers between two of its steps, is
asked rarely.
"""

STAGE_S: Final = 900.0  # timeout of staging in seconds; a rank that takes longer is considered dead

_R = TypeVar("_R", bound=wire.RankReply)


def _accepted(
    replies: Sequence[wire.RankReply], kind: type[_R], version: Version | None = None
) -> list[_R]:
    raise_refusal(replies, version=version)
    return [reply for reply in replies if isinstance(reply, kind)]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TicketLease:
    """A ticket and its spool; the ranks keep both while the leader holds this."""

    ticket: int
    spool: Spool


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class PreparedSwap:
    """A swap that all ranks have staged, or with ``back`` its undo; see :class:`Prepared`.

    ``nnz`` counts the elements of all ranks, ``nbytes`` those kept by the rank that keeps most.
    ``unused`` is the state of the tensors that no rank holds, before the swap and after.
    """

    nnz: int
    nbytes: int
    base_too: bool
    can_undo: bool
    unused: tuple[UnusedState, UnusedState]
    back: bool = False
    lease: TicketLease = field(repr=False)

    @property
    def ticket(self) -> int:
        return self.lease.ticket

    def undo(self) -> "PreparedSwap":
        return replace(self, back=not self.back)


def add_up(replies: Sequence[wire.StagedReply], fetched: Fetched) -> tuple[Effect, bool]:
    """Add up the effects of all ranks; return whether ranks with equal elements had equal ones."""
    effects: dict[str, Effect] = {}
    alike = True
    for reply in replies:
        for label, effect in reply.effects:
            first = effects.setdefault(label, effect)
            alike = alike and effect == first
            ends_alike = fetched.from_nothing and effect.written == first.written
            if effect != first and not ends_alike:
                raise errors.BaseMismatchError(
                    f"ranks {label} hold different bits of the same elements",
                    version=fetched.plan.target,
                )
    return sum(effects.values(), Effect()), alike


class Beside(Protocol):
    """What is staged and swapped in together with a replica; its methods raise nothing."""

    def stage(self) -> None: ...

    def swap(self) -> None: ...


SHOWN: Final = 20  # number of reasons in a status

logger = logging.getLogger(__name__)


class ReplicaTarget(Target):
    """All ranks of an engine, as one target; they were started with the same URL."""

    def __init__(self, engine: Engine, url: str, spool: Path, *, of_draft: bool = False) -> None:
        self.beside: Beside | None = None
        self._of_draft = of_draft
        self.agreement: Agreement | None = None
        self._url = url
        self._spool = spool
        self._specs: Mapping[str, TensorSpec] = {}
        self._aliases: Mapping[str, str] = {}
        self._numbers = itertools.count(1)  # of tickets
        self.engine = engine
        self._count = 0  # of ranks; 0 until known
        self._leader = uuid.uuid4().hex
        self._sequence = itertools.count(1)
        self._fetchers = Fetchers(())
        self._asking = Lock()
        self._leases: weakref.WeakSet[TicketLease] = weakref.WeakSet()
        self._held: HeldVersion | None = None
        self.holds = PauseHolds(engine)
        self.ranks: Sequence[wire.RankReply] = ()
        self._named: Version | None = None
        self.oldest = ""  # see `Engine.oldest`; of the last look, so that it may be older
        self._unused = UnusedState()
        self._orphans: Sequence[wire.FindUnusedReply] = ()
        self._leads = False

    def _ask(self, request: wire.AnyRequest, kind: type[_R]) -> list[_R]:
        """Return the replies of all ranks, of the given type; raise a refusal as its error."""
        return _accepted(self._call(request, kind), kind)

    def _call(self, request: wire.AnyRequest, *kinds: type[_R]) -> list[_R | wire.Refusal]:
        """Return the replies of all ranks: refusals, or replies of the given types.

        Raises a :class:`PoisonedError` if a reply has another type, or another request or rank.
        """
        asked = msgspec.structs.replace(
            request,
            leader=self._leader,
            sequence=next(self._sequence),
            of_draft=self._of_draft,
        )
        replies = self.engine.call(asked)
        found = [(reply.rank, reply.leader, reply.sequence) for reply in replies]
        ranks = range(self._count or len(replies))
        expected = [(rank, asked.leader, asked.sequence) for rank in ranks]
        known: tuple[type[wire.RankReply], ...] = (*kinds, wire.Refusal)
        if found != expected or not all(isinstance(reply, known) for reply in replies):
            raise errors.PoisonedError(
                f"the engine mixed up its ranks' answers to {wire.name_of(request)!r}",
                hint="a worker raised in some other call; restart the engine",
            )
        return cast("list[_R | wire.Refusal]", list(replies))

    def _wait(self, ticket: int, kind: type[_R], version: Version | None = None) -> list[_R]:
        return _accepted(self._settle(ticket, kind, version), kind, version)

    def _settle(
        self, ticket: int, kind: type[_R], version: Version | None = None
    ) -> list[_R | wire.Refusal]:
        """Wait until every rank is done with a ticket; return replies and refusals by rank."""
        least, longest = POLL_S
        start = time.monotonic()
        done: dict[int, _R | wire.Refusal] = {}
        while True:
            replies = self._call(wire.PollRequest(ticket=ticket), kind, wire.PendingReply)
            for reply in replies:
                if isinstance(reply, (kind, wire.Refusal)):
                    done.setdefault(reply.rank, reply)
            if len(done) == len(replies):
                return [reply for _, reply in sorted(done.items())]
            taken = time.monotonic() - start
            if taken > STAGE_S:
                message = f"some rank did not stage within {STAGE_S:.0f} s"
                raise errors.ApplyError(message, version=version)
            time.sleep(min(max(POLL_SHARE * taken, least), longest))

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        """Attach every rank, and agree on a class for every tensor; see :class:`Target`.

        An earlier leader of the engine stays in charge until all ranks have agreed.
        """
        self._specs, self._aliases = specs, aliases
        with shown(self._spool) as probe:
            request = wire.AttachRequest(
                url=self._url, specs=tuple(specs.values()), aliases=dict(aliases), probe=probe
            )
            attached = self._ask(request, wire.AttachReply)
        ranks = [reply.tensors for reply in attached]
        self._fetchers = Fetchers(hosts_of([(one.host, one.folder) for one in attached]))
        lost = tuple(orphans(specs, ranks))
        if lost:
            if not self._leads:  # experts that moved change nothing of it
                self._orphans = self._ask(wire.FindUnusedRequest(names=lost), wire.FindUnusedReply)
            more = zip(ranks, self._orphans, strict=True)
            ranks = [one | other.tensors for one, other in more]
        agreement = self.agreement = agree(specs.values(), ranks)
        refused = agreement.refused
        if refused:
            first, why = next(iter(refused.items()))
            raise errors.TensorMismatchError(
                f"{len(refused)} of {len(specs)} tensors have no proven way into this engine; "
                f"{first!r}: {why}",
                tensor=first,
                hint="nothing was written; start the engine with the model of this chain, or, if "
                "that is what it loaded, report its architecture",
            )
        holders = tuple(
            {name: labels[number] for name, labels in agreement.holders.items()}
            for number in range(len(ranks))
        )
        wanted = self._fetchers.wanted(ranks, agreement.classes, specs)
        agreed = wire.AgreeRequest(
            classes=agreement.classes, holders=holders, compared=agreement.compared, wanted=wanted
        )
        self.ranks = replies = self._ask(agreed, wire.AgreeReply)
        ties = [tie for reply in replies for tie in reply.ties]
        self.wanted = with_ties(self._fetchers.of_leader(wanted), ties)
        self._count = len(ranks)
        self._ask(wire.StatusRequest(), wire.StatusReply)  # takes over from an earlier one
        if not self._leads:
            known = self._orphans[0].digests if self._orphans else {}
            unused = [name for name, kind in agreement.classes.items() if kind == "unused"]
            self._unused = UnusedState({name: known.get(name) for name in unused})
        self._leads = True
        logger.info("%s", summary(len(ranks), self.classes()))

    def classes(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for name, kind in self.agreement.classes.items() if self.agreement else ():
            row = found.setdefault(kind, {"tensors": 0, "nbytes": 0})
            row["tensors"] += 1
            row["nbytes"] += self._specs[name].nbytes
        return found

    def on_host(self) -> dict[str, str]:
        reasons = self.agreement.reasons if self.agreement else {}
        return dict(itertools.islice(reasons.items(), SHOWN))

    def name(self, version: Version) -> None:
        if version != self._named:
            self.engine.name_version(version)
            self._named = version

    def pause(self) -> None:
        self.check_leads()
        self.holds.pause()

    def resume(self) -> None:
        self.check_leads()
        self.holds.resume()

    def stop_serving(self) -> None:
        self.holds.doubt()

    def check_leads(self) -> None:
        """Raise :class:`LeaderReplacedError` if another leader has the ranks that this one had."""
        if self._leads:
            self._ask(wire.StatusRequest(), wire.StatusReply)

    def look(self) -> None:
        """Ask every rank and the scheduler for their state; for a thread of its own."""
        self.check_leads()
        self.holds.look()
        self.oldest = self.engine.oldest()

    def held(self) -> HeldVersion | None:
        return self._held

    def state(self) -> StateDigest | None:
        """Recompute the state digest from the live bits of every rank; see :class:`Target`."""
        try:
            return self._state()
        except errors.ExpertsMovedError:
            self.bind(self._specs, self._aliases)
            return self._state()

    def _state(self) -> StateDigest | None:
        self.check_leads()  # another leader's version cannot be judged here
        if not self._loads_the_same():
            return None  # another process wrote to loaded tensors, or the engine cannot load
        number = next(self._numbers)
        try:
            self._ask(wire.StateRequest(ticket=number), wire.StartedReply)
            found = self._wait(number, wire.StateReply)
        except errors.BaseMismatchError:
            return None  # the engine replaced its tensors, or others wrote to them
        except errors.EngineDamagedError:
            self.stop_serving()
            raise
        digests: dict[str, StateDigest] = {}
        for reply in found:
            for holders, digest in reply.digests:
                if digests.setdefault(holders, digest) != digest:
                    return None  # ranks that hold the same elements hold different bits
        if self._unused.total is None:
            return None
        return sum(digests.values(), self._unused.total)

    def _loads_the_same(self) -> bool:
        if self.agreement is None or ON_HOST.isdisjoint(self.agreement.classes.values()):
            return True
        checks = self._call(wire.CheckLoadsRequest(), wire.CheckLoadsReply)
        raise_refusal(_of(errors.ExpertsMovedError, checks))
        return all(isinstance(reply, wire.CheckLoadsReply) and reply.same for reply in checks)

    def stage(
        self, fetched: Fetched, *, base: StateDigest | None, state: StateDigest, budget: int
    ) -> PreparedSwap:
        """Stage a plan on every rank while its objects arrive, and prove the sum.

        If experts have moved, the ranks find them first, and prove the base at their new places.

        Raises:
            ExpertsMovedError: They need other elements than were fetched; see ``wanted``.
        """
        spool = Spool.create(self._spool, SpoolIndex.of(fetched))
        try:
            try:
                return self._stage(spool, fetched, base, state, budget)
            except errors.ExpertsMovedError:
                before = self.wanted
                self.bind(self._specs, self._aliases)
                if self.wanted != before:
                    raise  # other parts of the objects were fetched
                if base is not None and self.state() != base:
                    message = "the experts that the engine moved are not what they were"
                    raise errors.BaseMismatchError(message, version=fetched.plan.target) from None
                return self._stage(spool, fetched, base, state, budget)
        except BaseException:
            spool.close()  # a reference to the error would keep it on the disk
            raise

    def _stage(
        self,
        spool: Spool,
        fetched: Fetched,
        base: StateDigest | None,
        state: StateDigest,
        budget: int,
    ) -> PreparedSwap:
        version = fetched.plan.target
        lease = self._stage_everywhere(spool, fetched, budget)
        check_whole(fetched)
        before, after = self._unused, self._unused.after(fetched)
        try:
            replies = self._wait(lease.ticket, wire.StagedReply, version)
        except errors.StageAbandonedError:  # every object is there now
            self._leases.discard(lease)
            lease = self._stage_everywhere(spool, fetched, budget)
            replies = self._wait(lease.ticket, wire.StagedReply, version)
        effect, alike = add_up(replies, fetched)
        spare = before.effect(after)
        if spare is None and before.total is not None and after.shared_with_used:
            raise errors.OldBitsError(
                f"the digest of {after.shared_with_used!r}, which this engine does not use, is "
                "shared with tensors that it uses",
                hint="publish with encoding='step'",
            )
        if spare is None:
            message = "it is not known what the tensors hold that this engine does not use"
            raise errors.BaseMismatchError(message, version=version)
        alike = alike and before.total is not None
        expected = elements_of(fetched, after.digests.keys())
        if expected not in (None, effect.nnz):
            message = f"the ranks would write {effect.nnz:,} of {expected:,} elements"
            raise errors.BaseMismatchError(message, version=version)
        if self.beside is not None:
            self.beside.stage()
        return PreparedSwap(
            nnz=effect.nnz,
            nbytes=max(reply.nbytes for reply in replies),
            base_too=check_effect(
                fetched, effect + spare, base=base if alike else None, state=state
            ),
            can_undo=all(reply.can_undo for reply in replies),
            unused=(before, after),
            lease=lease,
        )

    def _stage_everywhere(self, spool: Spool, fetched: Fetched, budget: int) -> TicketLease:
        """Have every rank stage while every host fetches; return once all objects are there."""
        while True:
            lease, fetching = self._start_stage(spool, fetched, budget)
            try:
                receive(spool, fetched)
                if fetching is None:
                    return lease
                failed = self._settle(fetching, wire.FetchedReply, fetched.plan.target)
                if not self._fetchers.replaced(failed, fetched.plan.target):
                    return lease
            except BaseException:
                self._leases.discard(lease)  # an error in flight would keep it
                raise
            self._leases.discard(lease)

    def _start_stage(
        self, spool: Spool, fetched: Fetched, budget: int
    ) -> tuple[TicketLease, int | None]:
        """Ask the fetchers to fetch and every rank to stage; return the ticket of the former."""
        mine = spool.folder.name
        with self._asking:  # ranks must not be told to drop the ticket of a concurrent stage
            names, fetching = self._start_fetch(fetched)
            lease = TicketLease(next(self._numbers), spool)
            self._leases.add(lease)
            request = wire.StageRequest(
                ticket=lease.ticket,
                spools=tuple(name or mine for name in names),
                ranks_on_host=self._fetchers.ranks_on_host(),
                budget=budget,
                keep=tuple(one.ticket for one in self._leases),
            )
            try:
                self._ask(request, wire.StartedReply)
            except BaseException:
                self._leases.discard(lease)
                raise
        return lease, fetching

    def _start_fetch(self, fetched: Fetched) -> tuple[tuple[str, ...], int | None]:
        """Ask the fetchers to fetch; return the spools of all ranks, and a ticket."""
        while any(names := self._fetchers.names()):
            ticket, writers = next(self._numbers), self._fetchers.writers(names)
            fetch = wire.FetchRequest(ticket=ticket, spools=writers, index=SpoolIndex.of(fetched))
            started = self._call(fetch, wire.StartedReply)
            if not self._fetchers.replaced(started, fetched.plan.target):
                return names, ticket
        return names, None

    def swap(self, prepared: Prepared, held: HeldVersion) -> float:
        """Pause, write on every rank or on none, name the version, resume; see :class:`Target`.

        A replica that is poisoned, or that other clients paused, stays paused. If another leader
        has attached since, it is neither paused nor resumed: that leader may be writing.
        """
        if not isinstance(prepared, PreparedSwap):
            raise TypeError(f"a replica cannot swap {type(prepared).__name__}")
        may_resume = False
        try:
            self.check_leads()
            may_resume = True  # from here on the pause is this leader's
            self.holds.hold()
        except errors.LeaderReplacedError:
            raise
        except errors.ApplyError as exc:
            if may_resume:
                self.holds.go_on()
            raise errors.PartialApplyError(
                f"the engine did not pause, and nothing was written: {exc.args[0]}",
                version=held.version,
                hint=exc.hint,
            ) from exc
        before, self._held = self._held, None
        self._named = None  # even when healed: the cache may come from other weights
        try:
            seconds = self._swap(prepared, held.version)
            self.name(held.version)
        except errors.PartialApplyError:
            self._held = before
            self.holds.go_on()
            raise
        self._held, self._unused = held, prepared.unused[not prepared.back]
        self.holds.trust()
        if self.beside is not None:
            self.beside.swap()
        self.holds.go_on()
        prepared.lease.spool.close()
        return seconds

    def close(self) -> None: ...

    def _swap(self, prepared: PreparedSwap, version: Version) -> float:
        request = wire.SwapRequest(ticket=prepared.ticket, version=version, back=prepared.back)
        replies = self.ranks = self._call(request, wire.SwapReply)
        failed = [reply for reply in replies if isinstance(reply, wire.Refusal)]
        done = [reply for reply in replies if isinstance(reply, wire.SwapReply)]
        if not failed:
            return max(reply.seconds for reply in done)
        cause = error_of(failed[0], version=version)
        told = cause.args[0]
        unfinished = _of(errors.UnfinishedSwapError, failed)
        undone, moved = _of(errors.PartialApplyError, failed), _of(errors.ExpertsMovedError, failed)
        if len(undone) + len(moved) + len(unfinished) < len(failed):
            raise errors.PoisonedError(told, version=version) from cause
        if done and not prepared.can_undo:
            why = "not every rank has kept the old bits"
        else:
            why = self._take_back(request, [*done, *unfinished])
        if why:
            told = f"{told}; it could not be taken back on every other rank: {why}"
            raise errors.PoisonedError(told, version=version) from cause
        told = f"{told}; every rank has its old bits"
        kind = errors.ExpertsMovedError if moved else errors.PartialApplyError
        raise kind(told, version=version) from cause

    def _take_back(self, request: wire.SwapRequest, to_undo: Sequence[wire.RankReply]) -> str:
        """Undo a swap on some ranks; return the reason if that failed on one of them."""
        if not to_undo:
            return ""
        back = msgspec.structs.replace(request, back=not request.back)
        try:
            again = self._call(back, wire.SwapReply)
        except errors.PartialApplyError as exc:
            return str(exc.args[0])
        replies = [again[reply.rank] for reply in to_undo]
        return next((reply.message for reply in replies if isinstance(reply, wire.Refusal)), "")


def _of(kind: type[errors.ApplyError], replies: Sequence[wire.RankReply]) -> list[wire.Refusal]:
    refusals = [reply for reply in replies if isinstance(reply, wire.Refusal)]
    return [refusal for refusal in refusals if refusal.error == kind.__name__]


def error_of(refusal: wire.Refusal, *, version: int | None = None) -> errors.DeltaChainError:
    kind = getattr(errors, refusal.error, None)
    message, hint = f"rank {refusal.rank}: {refusal.message}", refusal.hint
    if not isinstance(kind, type) or not issubclass(kind, errors.DeltaChainError):
        kind = errors.ApplyError
    if issubclass(kind, errors.DigestMismatchError):
        return errors.ApplyError(message, version=version)  # a refusal has no digests
    if issubclass(kind, errors.ApplyError):
        return kind(message, version=version, hint=hint)
    return kind(message, hint=hint)


def raise_refusal(replies: Sequence[wire.RankReply], *, version: int | None = None) -> None:
    """Raise the error of the first refusal, if any; of a rank that must not serve before others."""
    refusals = [reply for reply in replies if isinstance(reply, wire.Refusal)]
    for refusal in _of(errors.EngineDamagedError, refusals) + refusals:
        raise error_of(refusal, version=version)  # a variable would make a cycle, and keep a stage
