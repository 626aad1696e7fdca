"""A replica as a target: the ranks of an engine behind one subscriber.

The leader's side. It decodes a plan once for the host, has every rank stage what it owns, adds up
what they answer, and proves the result before any of them writes. One rank's refusal is every
rank's refusal; one rank's failure in the middle is taken back on all of them.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final

import msgspec

from deltachain.chain.fetch import Fetched
from deltachain.errors import (
    ApplyError,
    BaseMismatchError,
    LeaderReplacedError,
    PartialApplyError,
    PoisonedError,
    TensorMismatchError,
)
from deltachain.replica.engine import Engine
from deltachain.replica.layout.update_path import ON_HOST, Agreement, Classified, agree, orphans
from deltachain.replica.pause import Serving
from deltachain.replica.rpc import effect_of, error_of, raise_refusal
from deltachain.replica.spool import Spool, shown
from deltachain.replica.ticket import Alive, Ticket
from deltachain.replica.unused_state import UnusedState, unused_state
from deltachain.subscribe.proof import Effect, check_whole, judge
from deltachain.subscribe.targets.base import HeldVersion, Prepared
from deltachain.types import StateDigest, TensorSpec, Version

POLL_S: Final = (0.002, 0.05)
"""Least and longest wait between two looks at what the ranks do."""

POLL_SHARE: Final = 0.25
"""Of the time that they have taken so far, the wait until the next look: nothing is done much later
than it could be, and an engine, which looks between two of its steps, is not asked much more often.
"""

SHOWN: Final = 20
"""Reasons that a status lists."""

STAGE_S: Final = 900.0
"""A rank that stages for longer than this is taken for dead."""

logger = logging.getLogger(__name__)

Verdicts = Sequence[Mapping[str, Any]]


class ReplicaTarget:
    """Every rank of an engine, as one target.

    Args:
        engine: The replica.
        url: The chain, as the ranks were told at their start.
        spool: A folder that the leader and all ranks of the host see.
    """

    def __init__(self, engine: Engine, url: str, spool: Path) -> None:
        self.engine = engine
        self.agreement: Agreement | None = None
        self._url = url
        self._spool = spool
        self._specs: Mapping[str, TensorSpec] = {}
        self._numbers = itertools.count(1)
        self._turns = itertools.count(1)
        self._leader = uuid.uuid4().hex
        self._asking = Lock()
        self._alive: weakref.WeakSet[Alive] = weakref.WeakSet()
        self._held: HeldVersion | None = None
        self._serving = Serving(engine)
        self.ranks: Verdicts = ()
        self._named: Version | None = None
        self._unused = UnusedState()

    @property
    def paused(self) -> bool:
        """Whether a caller paused it."""
        return self._serving.paused

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        """Attach every rank, and let them agree on a way for every tensor; see :class:`Target`.

        Raises:
            ConfigError: A rank does not see the folder of spools.
            TensorMismatchError: Some tensor has no way into this engine, or is of another model.
            EngineDamagedError: A rank must not serve.
        """
        self._specs = specs
        rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in specs.values()]
        with shown(self._spool) as probe:
            asked = {"url": self._url, "specs": rows, "aliases": dict(aliases), "probe": probe}
            found = self._ask("attach", **asked)
        ranks = [
            {n: msgspec.convert(one, Classified) for n, one in verdict["tensors"].items()}
            for verdict in found
        ]
        lost = orphans(specs, ranks)
        for number, verdict in enumerate(self._ask("unused", names=lost) if lost else ()):
            ranks[number] |= {
                name: msgspec.convert(one, Classified) for name, one in verdict["tensors"].items()
            }
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
        holders = [
            {name: list(labels[number]) for name, labels in agreement.holders.items()}
            for number in range(len(found))
        ]
        self.ranks = self._ask("agree", classes=agreement.classes, holders=holders)
        unused = [name for name, kind in agreement.classes.items() if kind == "unused"]
        digests = self._ask("unused_state", names=unused)[0]["digests"] if unused else {}
        known = {name: StateDigest.parse(digest) for name, digest in digests.items()}
        self._unused = unused_state(unused, known)
        logger.info("%s", _summary(len(found), self.classes()))

    def classes(self) -> dict[str, dict[str, int]]:
        """Tensors and bytes of the chain, by the way they reach live weights."""
        found: dict[str, dict[str, int]] = {}
        for name, kind in self.agreement.classes.items() if self.agreement else ():
            row = found.setdefault(kind, {"tensors": 0, "nbytes": 0})
            row["tensors"] += 1
            row["nbytes"] += self._specs[name].nbytes
        return found

    def _agreed(self) -> Mapping[str, str]:
        return self.agreement.classes if self.agreement else {}

    def on_host(self) -> dict[str, str]:
        """Some tensors that are not written in place, and why."""
        reasons = self.agreement.reasons if self.agreement else {}
        return dict(itertools.islice(reasons.items(), SHOWN))

    def name(self, version: Version) -> None:
        """Let tokens be known by a version, if they are not yet."""
        if version != self._named:
            self.engine.name_version(version)
            self._named = version

    def pause(self) -> None:
        """Generate nothing until ``resume``, whatever is swapped meanwhile.

        Raises:
            LeaderReplacedError: That is no longer ours to say.
        """
        self._check_leads()
        self._serving.pause()

    def resume(self) -> None:
        """Generate again; see :meth:`pause`."""
        self._check_leads()
        self._serving.resume()

    def stop_serving(self) -> None:
        """Generate nothing until a swap has succeeded."""
        self._serving.doubt()

    def _check_leads(self) -> None:
        if self.agreement is not None:
            self._ask("status")

    def held(self) -> HeldVersion | None:
        """What the last swap wrote."""
        return self._held

    def state(self) -> StateDigest | None:
        """Recomputed from live bits on every rank; see :class:`Target`."""
        self._check_leads()  # what another leader holds is not ours to judge
        if any(kind in ON_HOST for kind in self._agreed().values()):
            checks = self._answers("check")
            if not all(verdict["ok"] and verdict["same"] for verdict in checks):
                return None  # somebody else wrote to what the engine loads, or it cannot load
        number = next(self._numbers)
        try:
            self._ask("state", ticket=number)
            found = [verdict["state"] for verdict in self._await(number, None)]
        except BaseMismatchError:
            return None  # the engine replaced its tensors
        lanes: dict[str, str] = {}
        for rank in found:
            for label, digest in rank:
                if lanes.setdefault(label, digest) != digest:
                    return None  # ranks that hold the same elements hold different bits
        if self._unused.total is None:
            return None
        return sum((StateDigest.parse(digest) for digest in lanes.values()), self._unused.total)

    def stage(
        self, fetched: Fetched, *, base: StateDigest | None, state: StateDigest, budget: int
    ) -> Ticket:
        """Decode once, stage on every rank, and prove the sum; see :class:`Target`."""
        check_whole(fetched)
        version = fetched.plan.target
        before, after = self._unused, self._unused.after(fetched)
        spool = Spool.write(self._spool, fetched, leave_out=after.digests.keys())
        with self._asking:  # ranks must not be told to forget what another stage asks them for
            alive = Alive(next(self._numbers), spool)
            self._alive.add(alive)
            self._ask(
                "stage",
                ticket=alive.number,
                spool=spool.folder.name,
                budget=budget,
                keep=[one.number for one in self._alive],
            )
        verdicts = self._await(alive.number, version)
        effect, alike = _add_up(verdicts, fetched)
        spare = before.effect(after)
        if spare is None:
            raise BaseMismatchError(
                "it is not known what the tensors hold that this engine does not use",
                version=version,
            )
        alike = alike and before.total is not None
        if effect.nnz != alive.spool.nnz:
            raise BaseMismatchError(
                f"the ranks would write {effect.nnz:,} of {alive.spool.nnz:,} elements",
                version=version,
            )
        return Ticket(
            number=alive.number,
            nnz=effect.nnz,
            nbytes=max(int(verdict["nbytes"]) for verdict in verdicts),
            base_too=judge(fetched, effect + spare, base=base if alike else None, state=state),
            can_undo=all(verdict["can_undo"] for verdict in verdicts),
            unused=(before, after),
            alive=alive,
        )

    def swap(self, prepared: Prepared, held: HeldVersion) -> float:
        """Pause, write on every rank or on none, name the version, resume; see :class:`Target`.

        A replica that is poisoned, or that others paused, stays paused. One that another leader has
        attached since is neither paused nor resumed: the other may be writing.
        """
        if not isinstance(prepared, Ticket):
            raise TypeError(f"a replica cannot swap {type(prepared).__name__}")
        may_resume = False
        try:
            self._check_leads()
            may_resume = True  # from here on it is we who paused it
            self._serving.hold()
        except LeaderReplacedError:
            raise
        except ApplyError as exc:
            if may_resume:
                self._serving.go_on()
            raise PartialApplyError(
                f"the engine did not pause, and nothing was written: {exc.args[0]}",
                version=held.version,
                hint=exc.hint,
            ) from exc
        before, self._held = self._held, None
        self._named = None  # also when healed: what was cached may come of other weights
        try:
            seconds = self._swap(prepared, held.version)
            self.name(held.version)
        except PartialApplyError:
            self._held = before
            self._serving.go_on()
            raise
        self._held, self._unused = held, prepared.leaves
        self._serving.trust()
        self._serving.go_on()
        prepared.alive.spool.close()
        return seconds

    def close(self) -> None:
        """Nothing to give back; see :class:`Target`."""

    def _swap(self, ticket: Ticket, version: Version) -> float:
        """Write on every rank; where one could not, take it back on those that could."""
        arguments: dict[str, Any] = {"ticket": ticket.number, "version": version}
        verdicts = self.ranks = self._answers("swap", **arguments, back=ticket.back)
        failed = [verdict for verdict in verdicts if not verdict["ok"]]
        if not failed:
            return max(float(verdict["seconds"]) for verdict in verdicts)
        cause = error_of(failed[0], version=version)
        told = cause.args[0]
        if any(verdict["error"] != "PartialApplyError" for verdict in failed):
            raise PoisonedError(told, version=version) from cause
        done = [verdict["rank"] for verdict in verdicts if verdict["ok"]]
        if done and (not ticket.can_undo or not self._takes_back(arguments, ticket, done)):
            raise PoisonedError(
                f"{told}; it could not be taken back on every other rank", version=version
            ) from cause
        raise PartialApplyError(f"{told}; every rank has its old bits", version=version) from cause

    def _takes_back(self, arguments: dict[str, Any], ticket: Ticket, ranks: list[int]) -> bool:
        try:
            again = self._answers("swap", **arguments, back=not ticket.back)
        except PartialApplyError:
            return False
        return all(again[rank]["ok"] for rank in ranks)

    def _ask(self, verb: str, **arguments: Any) -> Verdicts:  # noqa: ANN401
        """Every rank's answer; a refusal is raised."""
        verdicts = self._answers(verb, **arguments)
        raise_refusal(verdicts)
        return verdicts

    def _answers(self, verb: str, **arguments: Any) -> Verdicts:  # noqa: ANN401
        turn = f"{self._leader}:{next(self._turns)}"
        verdicts = self.engine.call(verb, turn=turn, **arguments)
        count = len(self.ranks) or len(verdicts)
        expected = [(rank, turn) for rank in range(count)]
        if [(verdict.get("rank"), verdict.get("turn")) for verdict in verdicts] != expected:
            raise PoisonedError(
                f"the engine mixed up its ranks' answers to {verb!r}",
                hint="a worker raised in some other call; restart the engine",
            )
        return verdicts

    def _await(self, ticket: int, version: Version | None) -> Verdicts:
        """Wait until every rank is done with a ticket; the first refusal is raised."""
        least, longest = POLL_S
        start = time.monotonic()
        answers: dict[int, Mapping[str, Any]] = {}
        while True:
            verdicts = self._answers("poll", ticket=ticket)
            for verdict in verdicts:
                if verdict.get("done") or not verdict["ok"]:
                    answers.setdefault(verdict["rank"], verdict)
            if len(answers) == len(verdicts):
                break
            taken = time.monotonic() - start
            if taken > STAGE_S:
                raise ApplyError(f"some rank did not stage within {STAGE_S:.0f} s", version=version)
            time.sleep(min(max(POLL_SHARE * taken, least), longest))
        found = [verdict for _, verdict in sorted(answers.items())]
        raise_refusal(found, version=version)
        return found


def _summary(ranks: int, classes: Mapping[str, Mapping[str, int]]) -> str:
    """How the tensors of a chain reach live weights, in words."""
    ways = [
        f"{row['tensors']} {kind.replace('_', ' ')} ({row['nbytes']:,} B)"
        for kind, row in classes.items()
    ]
    return f"tensors on {ranks} rank{'s' if ranks > 1 else ''}: {', '.join(ways)}"


def _add_up(verdicts: Verdicts, fetched: Fetched) -> tuple[Effect, bool]:
    """What all ranks together do, and whether those that hold the same elements do the same.

    Raises:
        BaseMismatchError: They do not, and would hold different bits afterwards.
    """
    effects: dict[str, Effect] = {}
    alike = True
    for verdict in verdicts:
        for label, lanes in verdict["effects"]:
            effect = effect_of(lanes)
            first = effects.setdefault(label, effect)
            alike = alike and effect == first
            ends_alike = fetched.from_nothing and effect.written == first.written
            if effect != first and not ends_alike:
                raise BaseMismatchError(
                    f"ranks {label} hold different bits of the same elements",
                    version=fetched.plan.target,
                )
    return sum(effects.values(), Effect()), alike
