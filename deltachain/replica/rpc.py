"""What the leader asks of a rank, as calls that never raise.

An engine that sees one of its workers raise may misread every later answer of the others. So every
verb returns a *verdict*: what was asked for, or the error in its own words. Verbs return at once;
what takes time runs in a thread, and ``poll`` says whether it is done.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
from torch import nn

from deltachain import errors
from deltachain.errors import (
    ApplyError,
    ConfigError,
    DeltaChainError,
    DigestMismatchError,
    EngineDamagedError,
    LeaderReplacedError,
)
from deltachain.replica.engine import EngineModel
from deltachain.replica.rank import Rank
from deltachain.replica.settings import spool_folder
from deltachain.replica.spool import check_probe
from deltachain.subscribe.proof import Effect
from deltachain.threads import Pool
from deltachain.types import StateDigest, TensorSpec

logger = logging.getLogger(__name__)

RankReply: TypeAlias = dict[str, Any]
"""JSON: ``ok``, ``rank``, and what was asked for or ``error`` and ``message``."""

REMEMBERED: Final = 16
"""Tickets for which a rank remembers its answer."""

VERBS: Final = (
    "attach",
    "unused",
    "agree",
    "unused_state",
    "check",
    "state",
    "stage",
    "poll",
    "swap",
    "verdict",
    "status",
)


_KNOWN: WeakKeyDictionary[nn.Module, RankVerbs] = WeakKeyDictionary()


def verbs_of(model: nn.Module, known: Callable[[], EngineModel], rank: int) -> RankVerbs:
    """The verbs of the rank that has this model: the same whoever asks, for as long as it lives.

    Args:
        model: The engine's.
        known: Makes it known, when it is first asked for.
        rank: Its number.
    """
    if model not in _KNOWN:
        spool = spool_folder(os.environ)
        _KNOWN[model] = RankVerbs(known, rank, spool, os.environ.get("DELTACHAIN_URL", ""))
    return _KNOWN[model]


def settle(model: nn.Module) -> None:
    """Wait until no rank of this model, if it is one, reads it beside its engine's own thread."""
    if model in _KNOWN:
        _KNOWN[model].settle()


class RankVerbs:
    """The verbs of one rank.

    Args:
        model: Makes the engine's model known, when it is first asked for.
        number: Of this rank.
        spool: The one folder that plans are read from.
        url: The one chain that this replica follows; empty for whichever it is asked for.
    """

    def __init__(
        self, model: Callable[[], EngineModel], number: int, spool: Path, url: str
    ) -> None:
        self.number = number
        self._model = model
        self._spool = spool
        self._url = url
        self._rank: Rank | None = None
        self._version: int | None = None
        self._last: RankReply = {}
        self._leader = ""
        self._jobs: dict[int, Future[RankReply]] = {}
        self._thread = Pool(1, "deltachain-stage")

    @property
    def rank(self) -> Rank:
        """The rank, once it is attached."""
        if self._rank is None:
            raise ApplyError(f"rank {self.number} is not attached")
        return self._rank

    def do(self, verb: str, arguments: Mapping[str, Any]) -> RankReply:
        """Answer one verb; never raises. The number of the call comes back with its answer."""
        asked = {name: value for name, value in arguments.items() if name != "turn"}
        leader = str(arguments.get("turn", "")).partition(":")[0]
        attaches = verb == "attach"
        if attaches and self._url in ("", asked.get("url")):
            self._leader = leader  # one of another chain is refused, and replaces nobody
        if attaches or leader == self._leader:
            answer = self._answer(verb, asked)
        else:
            answer = self._refusal(
                LeaderReplacedError("another leader has attached this rank since")
            )
        if "turn" in arguments:
            answer.setdefault("turn", arguments["turn"])  # a verdict has that of its swap
        if verb == "swap":
            self._last = answer
        return answer

    def _answer(self, verb: str, arguments: Mapping[str, Any]) -> RankReply:
        if verb not in VERBS:
            return self._refusal(ConfigError(f"no verb {verb!r}"))
        try:
            return {"ok": True, "rank": self.number, **getattr(self, f"_{verb}")(**arguments)}
        except Exception as exc:  # noqa: BLE001 - the boundary to the engine: nothing may escape
            return self._refusal(exc)

    def _refusal(self, exc: Exception) -> RankReply:
        if not isinstance(exc, DeltaChainError):
            logger.error("rank %d", self.number, exc_info=exc)
        known = isinstance(exc, DeltaChainError)
        answer = {
            "ok": False,
            "rank": self.number,
            "error": type(exc).__name__ if known else "ApplyError",
            "message": exc.args[0] if known else f"{type(exc).__name__}: {exc}",
        }
        hint = getattr(exc, "hint", "")
        return answer | {"hint": hint} if hint else answer

    def settle(self) -> None:
        """Wait until what was asked of this rank's own thread is done."""
        self._thread.submit(lambda: None).result()

    def _attach(
        self,
        url: str,
        specs: list[list[Any]],
        aliases: dict[str, str],
        probe: list[str] | None = None,
    ) -> dict[str, Any]:
        if self._url and url != self._url:
            raise ConfigError(f"this replica was started to follow {self._url}, not {url}")
        if probe is not None:
            check_probe(self._spool_of(probe[0]), probe[1])
        tensors = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in specs]
        if self._rank is None or not self._rank.is_for(tensors, aliases):
            self._rank = Rank(self._model(), tensors, aliases)
        report = self._rank.report()
        return {"tensors": {name: msgspec.to_builtins(one) for name, one in report.items()}}

    def _agree(self, classes: dict[str, Any], holders: list[dict[str, list[str]]]) -> RankReply:
        mine = {name: tuple(labels) for name, labels in holders[self.number].items()}
        self.rank.agree(classes, mine)
        return {}

    def _unused(self, names: list[str]) -> RankReply:
        found = self.rank.find_unused(names)
        return {"tensors": {name: msgspec.to_builtins(one) for name, one in found.items()}}

    def _unused_state(self, names: list[str]) -> RankReply:
        found = self.rank.unused_state(names)
        return {"digests": {name: str(digest) for name, digest in found.items()}}

    def _check(self) -> RankReply:
        return {"same": self.rank.loads_the_same()}

    def _state(self, ticket: int) -> RankReply:
        self.rank.check_addresses()

        def job() -> RankReply:
            state = self.rank.state()
            return {"state": [[label, str(digest)] for (label, _), digest in state.items()]}

        return self._start(ticket, job)

    def _stage(self, ticket: int, spool: str, budget: int, keep: list[int]) -> RankReply:
        folder = self._spool_of(spool)
        self.rank.keep(keep)
        self.rank.check_addresses()

        def job() -> RankReply:
            staged = self.rank.stage(ticket, folder, budget)
            return {
                "effects": [[who, _lanes(effect)] for (who, _), effect in staged.effects.items()],
                "nbytes": staged.nbytes,
                "can_undo": not staged.deferred,
            }

        return self._start(ticket, job)

    def _spool_of(self, name: str) -> Path:
        if not name or Path(name).name != name or name.startswith("."):
            raise ConfigError(f"{name!r} is not a spool")
        return self._spool / name

    def _start(self, ticket: int, job: Callable[[], RankReply]) -> RankReply:
        def guarded() -> RankReply:
            try:
                return {"ok": True, "rank": self.number, "done": True, **job()}
            except Exception as exc:  # noqa: BLE001 - top of a thread: the verdict carries it
                return {**self._refusal(exc), "done": True}

        recent = {number: job for number, job in self._jobs.items() if number > ticket - REMEMBERED}
        self._jobs = {**recent, ticket: self._thread.submit(guarded)}
        return {}

    def _poll(self, ticket: int) -> RankReply:
        job = self._jobs.get(ticket)
        if job is None:
            raise ApplyError(f"rank {self.number} knows nothing of ticket {ticket}")
        if not job.done():
            return {"done": False}
        return job.result()

    def _swap(self, ticket: int, version: int, back: bool) -> RankReply:
        seconds = self.rank.swap(ticket, version, back=back)
        self._version = version
        return {"seconds": seconds, "version": version, "pid": os.getpid()}

    def _verdict(self) -> RankReply:
        """The verdict of the last swap, given once."""
        last, self._last = self._last, {"ok": False, "error": "ApplyError", "message": "no swap"}
        return last

    def _status(self) -> RankReply:
        return {"pid": os.getpid(), "version": self._version, "staged": len(self.rank.staged)}


def error_of(verdict: Mapping[str, Any], *, version: int | None = None) -> DeltaChainError:
    """The error that a rank's refusal stands for."""
    kind = getattr(errors, str(verdict.get("error")), None)
    message = f"rank {verdict.get('rank')}: {verdict.get('message')}"
    hint = str(verdict.get("hint", ""))
    if isinstance(kind, type) and issubclass(kind, ApplyError):
        return kind(message, version=version, hint=hint)
    if isinstance(kind, type) and issubclass(kind, DigestMismatchError):
        return ApplyError(message, version=version)  # no verdict has the digests that it needs
    if isinstance(kind, type) and issubclass(kind, DeltaChainError):
        return kind(message, hint=hint)
    return ApplyError(message, version=version, hint=hint)


def raise_refusal(verdicts: Sequence[Mapping[str, Any]], *, version: int | None = None) -> None:
    """Raise what the first of the ranks refused with, if any did.

    Raises:
        EngineDamagedError: A rank must not serve; before anything that others refused with.
        DeltaChainError: As :func:`error_of` has it.
    """
    errors = [error_of(verdict, version=version) for verdict in verdicts if not verdict["ok"]]
    for error in sorted(errors, key=lambda error: not isinstance(error, EngineDamagedError)):
        raise error


def effect_of(lanes: list[Any]) -> Effect:
    """An effect as a verdict carries it."""
    change, written, nnz = lanes
    return Effect(StateDigest.parse(change), StateDigest.parse(written), nnz)


def _lanes(effect: Effect) -> list[Any]:
    return [str(effect.change), str(effect.written), effect.nnz]
