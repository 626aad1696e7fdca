"""A replica as a target: the ranks of an engine behind one subscriber.

The leader's side: it fetches a plan into the spool of its host, has every rank stage its share,
adds up the effects, and proves the result before any rank writes. If one rank refuses, no rank
writes; if one rank fails during the write, the write is undone on all of them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from deltachain.chain.fetch import Fetched
from deltachain.errors import (
    ApplyError,
    BaseMismatchError,
    EngineDamagedError,
    LeaderReplacedError,
    OldBitsError,
    PartialApplyError,
    PoisonedError,
    StageAbandonedError,
    TensorMismatchError,
    UnfinishedSwapError,
)
from deltachain.replica.client import RankClient
from deltachain.replica.engine import Engine
from deltachain.replica.fetcher import Fetchers, elements_of
from deltachain.replica.hosts import hosts_of, shown
from deltachain.replica.layout.update_path import ON_HOST, Agreement, agree, orphans, summary
from deltachain.replica.messages import (
    AgreeReply,
    AgreeRequest,
    AttachReply,
    AttachRequest,
    CheckLoadsReply,
    CheckLoadsRequest,
    FindUnusedReply,
    FindUnusedRequest,
    RankReply,
    Refusal,
    StagedReply,
    StartedReply,
    StateReply,
    StateRequest,
    StatusReply,
    StatusRequest,
    SwapReply,
    SwapRequest,
    UnusedStateReply,
    UnusedStateRequest,
)
from deltachain.replica.pause import PauseHolds
from deltachain.replica.prepared import PreparedSwap, add_up
from deltachain.replica.rpc import error_of
from deltachain.replica.spool import Spool, SpoolIndex
from deltachain.replica.stage_calls import StageCalls
from deltachain.replica.unused_state import UnusedState, unused_state
from deltachain.subscribe.proof import check_whole, judge
from deltachain.subscribe.targets.base import HeldVersion, Prepared, Target
from deltachain.types import StateDigest, TensorSpec, Version

SHOWN: Final = 20
"""Number of reasons in a status."""

logger = logging.getLogger(__name__)


class ReplicaTarget(Target):
    """All ranks of an engine, as one target.

    Args:
        engine: The replica.
        url: URL of the chain, as given to the ranks at their start.
        spool: Folder shared by the leader and all ranks of the host.
    """

    def __init__(self, engine: Engine, url: str, spool: Path) -> None:
        self.agreement: Agreement | None = None
        self._url = url
        self._spool = spool
        self._specs: Mapping[str, TensorSpec] = {}
        self._numbers = itertools.count(1)
        self._client = RankClient(engine)
        self._stages = StageCalls(self._client, self._numbers)
        self._held: HeldVersion | None = None
        self._holds = PauseHolds(engine)
        self.ranks: Sequence[RankReply] = ()
        self._named: Version | None = None
        self._unused = UnusedState()
        self._leads = False

    @property
    def engine(self) -> Engine:
        """The replica."""
        return self._client.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._client.engine = engine

    @property
    def why_paused(self) -> str:
        """Why generation is paused, apart from swaps; empty if it is not. See :meth:`look`."""
        return self._holds.why

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        """Attach every rank, and agree on a class for every tensor; see :class:`Target`.

        An earlier leader of the engine stays in charge until all ranks have agreed.

        Raises:
            ConfigError: A rank neither sees the leader's spools nor can keep its own.
            TensorMismatchError: A tensor cannot be updated in this engine, or is of another model.
            EngineDamagedError: A rank must not serve.
        """
        self._specs = specs
        with shown(self._spool) as probe:
            request = AttachRequest(
                url=self._url, specs=tuple(specs.values()), aliases=dict(aliases), probe=probe
            )
            attached = self._client.ask(request, AttachReply)
        ranks = [reply.tensors for reply in attached]
        self._stages.fetchers = Fetchers(hosts_of([(one.host, one.folder) for one in attached]))
        lost = tuple(orphans(specs, ranks))
        if lost:
            more = self._client.ask(FindUnusedRequest(names=lost), FindUnusedReply)
            ranks = [one | other.tensors for one, other in zip(ranks, more, strict=True)]
        agreement = self.agreement = agree(specs.values(), ranks)
        refused = agreement.refused
        if refused:
            first, why = next(iter(refused.items()))
            raise TensorMismatchError(
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
        wanted = self._stages.fetchers.wanted(ranks, agreement.classes, specs)
        agreed = AgreeRequest(
            classes=agreement.classes, holders=holders, compared=agreement.compared, wanted=wanted
        )
        self.ranks = self._client.ask(agreed, AgreeReply)
        self._client.count = len(ranks)
        self._client.ask(StatusRequest(), StatusReply)  # takes over from an earlier leader
        self._leads = True
        self._unused = self._state_of_unused()
        logger.info("%s", summary(len(ranks), self.classes()))

    def _state_of_unused(self) -> UnusedState:
        unused = tuple(name for name, kind in self._agreed().items() if kind == "unused")
        if not unused:
            return UnusedState()
        first = self._client.ask(UnusedStateRequest(names=unused), UnusedStateReply)[0]
        return unused_state(unused, first.digests)

    def classes(self) -> dict[str, dict[str, int]]:
        """Return the numbers of tensors and bytes of the chain, by class."""
        found: dict[str, dict[str, int]] = {}
        for name, kind in self.agreement.classes.items() if self.agreement else ():
            row = found.setdefault(kind, {"tensors": 0, "nbytes": 0})
            row["tensors"] += 1
            row["nbytes"] += self._specs[name].nbytes
        return found

    def _agreed(self) -> Mapping[str, str]:
        return self.agreement.classes if self.agreement else {}

    def on_host(self) -> dict[str, str]:
        """Return the first tensors that are not written in place, with the reasons."""
        reasons = self.agreement.reasons if self.agreement else {}
        return dict(itertools.islice(reasons.items(), SHOWN))

    def name(self, version: Version) -> None:
        """Label tokens with a version, unless they are already."""
        if version != self._named:
            self.engine.name_version(version)
            self._named = version

    def pause(self) -> None:
        """Pause until ``resume``, regardless of swaps meanwhile.

        Raises:
            LeaderReplacedError: Another leader has attached the ranks since.
        """
        self.check_leads()
        self._holds.pause()

    def resume(self) -> None:
        """Resume generation; see :meth:`pause`."""
        self.check_leads()
        self._holds.resume()

    def stop_serving(self) -> None:
        """Pause until a swap has succeeded."""
        self._holds.doubt()

    def check_leads(self) -> None:
        """Raise if another leader has the ranks, once this one had them.

        Raises:
            LeaderReplacedError: It has.
        """
        if self._leads:
            self._client.ask(StatusRequest(), StatusReply)

    def look(self) -> None:
        """Ask every rank and the scheduler for their state; for a thread of its own.

        Raises:
            LeaderReplacedError: Another leader has attached the ranks since.
            ApplyError: The engine did not answer.
        """
        self.check_leads()
        self._holds.look()

    def held(self) -> HeldVersion | None:
        """Return the version that the last swap wrote."""
        return self._held

    def state(self) -> StateDigest | None:
        """Recompute the state digest from the live bits of every rank; see :class:`Target`."""
        self.check_leads()  # another leader's version cannot be judged here
        if not self._loads_the_same():
            return None  # another process wrote to loaded tensors, or the engine cannot load
        number = next(self._numbers)
        try:
            self._client.ask(StateRequest(ticket=number), StartedReply)
            found = self._client.wait(number, StateReply)
        except BaseMismatchError:
            return None  # the engine replaced its tensors, or others wrote to them
        except EngineDamagedError:
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
        if all(kind not in ON_HOST for kind in self._agreed().values()):
            return True
        checks = self._client.call(CheckLoadsRequest(), CheckLoadsReply)
        return all(isinstance(reply, CheckLoadsReply) and reply.same for reply in checks)

    def stage(
        self, fetched: Fetched, *, base: StateDigest | None, state: StateDigest, budget: int
    ) -> PreparedSwap:
        """Stage a plan on every rank while its objects arrive, and prove the sum.

        See :class:`Target`.
        """
        spool = Spool.create(self._spool, SpoolIndex.of(fetched))
        try:
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
        lease = self._stages.everywhere(spool, fetched, budget)
        check_whole(fetched)
        before, after = self._unused, self._unused.after(fetched)
        try:
            replies = self._client.wait(lease.ticket, StagedReply, version)
        except StageAbandonedError:  # every object is there now
            self._stages.drop(lease)
            lease = self._stages.everywhere(spool, fetched, budget)
            replies = self._client.wait(lease.ticket, StagedReply, version)
        effect, alike = add_up(replies, fetched)
        spare = before.effect(after)
        if spare is None and before.total is not None and after.shared_with_used:
            raise OldBitsError(
                f"the digest of {after.shared_with_used!r}, which this engine does not use, is "
                "shared with tensors that it uses",
                hint="publish with encoding='step'",
            )
        if spare is None:
            raise BaseMismatchError(
                "it is not known what the tensors hold that this engine does not use",
                version=version,
            )
        alike = alike and before.total is not None
        expected = elements_of(fetched, after.digests.keys())
        if expected not in (None, effect.nnz):
            raise BaseMismatchError(
                f"the ranks would write {effect.nnz:,} of {expected:,} elements",
                version=version,
            )
        return PreparedSwap(
            nnz=effect.nnz,
            nbytes=max(reply.nbytes for reply in replies),
            base_too=judge(fetched, effect + spare, base=base if alike else None, state=state),
            can_undo=all(reply.can_undo for reply in replies),
            unused=(before, after),
            lease=lease,
        )

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
            self._holds.hold()
        except LeaderReplacedError:
            raise
        except ApplyError as exc:
            if may_resume:
                self._holds.go_on()
            raise PartialApplyError(
                f"the engine did not pause, and nothing was written: {exc.args[0]}",
                version=held.version,
                hint=exc.hint,
            ) from exc
        before, self._held = self._held, None
        self._named = None  # even when healed: the cache may come from other weights
        try:
            seconds = self._swap(prepared, held.version)
            self.name(held.version)
        except PartialApplyError:
            self._held = before
            self._holds.go_on()
            raise
        self._held, self._unused = held, prepared.unused_after
        self._holds.trust()
        self._holds.go_on()
        prepared.lease.spool.close()
        return seconds

    def close(self) -> None:
        """Do nothing: the engine keeps its weights; see :class:`Target`."""

    def _swap(self, prepared: PreparedSwap, version: Version) -> float:
        """Write on every rank; if one fails, undo the write on the others."""
        request = SwapRequest(ticket=prepared.ticket, version=version, back=prepared.back)
        replies = self.ranks = self._client.call(request, SwapReply)
        failed = [reply for reply in replies if isinstance(reply, Refusal)]
        done = [reply for reply in replies if isinstance(reply, SwapReply)]
        if not failed:
            return max(reply.seconds for reply in done)
        cause = error_of(failed[0], version=version)
        told = cause.args[0]
        unfinished = [reply for reply in failed if reply.error == UnfinishedSwapError.__name__]
        undone = [reply for reply in failed if reply.error == PartialApplyError.__name__]
        if len(undone) + len(unfinished) < len(failed):
            raise PoisonedError(told, version=version) from cause
        if done and not prepared.can_undo:
            why = "not every rank has kept the old bits"
        else:
            why = self._take_back(request, [*done, *unfinished])
        if why:
            raise PoisonedError(
                f"{told}; it could not be taken back on every other rank: {why}", version=version
            ) from cause
        raise PartialApplyError(f"{told}; every rank has its old bits", version=version) from cause

    def _take_back(self, request: SwapRequest, to_undo: Sequence[RankReply]) -> str:
        """Undo a swap on some ranks; return the reason if that failed on one of them."""
        if not to_undo:
            return ""
        back = msgspec.structs.replace(request, back=not request.back)
        try:
            again = self._client.call(back, SwapReply)
        except PartialApplyError as exc:
            return str(exc.args[0])
        replies = [again[reply.rank] for reply in to_undo]
        return next((reply.message for reply in replies if isinstance(reply, Refusal)), "")
