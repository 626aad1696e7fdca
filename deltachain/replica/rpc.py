"""The RPC service of a rank: one handler per request; no handler raises.

After an exception in one worker, an engine may misread every later reply of the others. So every
request gets a reply; errors become a :class:`Refusal`. Handlers return at once: long work runs in a
thread, and ``poll`` returns its result.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, get_ident
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

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
from deltachain.redact import redacted_url
from deltachain.replica.engine import EngineModel
from deltachain.replica.fetcher import fill, folder_id, sees_probe
from deltachain.replica.messages import (
    AgreeReply,
    AgreeRequest,
    AttachReply,
    AttachRequest,
    CheckLoadsReply,
    CheckLoadsRequest,
    FetchedReply,
    FetchRequest,
    FindUnusedReply,
    FindUnusedRequest,
    LastSwapRequest,
    PendingReply,
    PollRequest,
    RankReply,
    RankRequest,
    Refusal,
    StagedReply,
    StageRequest,
    StartedReply,
    StateReply,
    StateRequest,
    StatusReply,
    StatusRequest,
    SwapReply,
    SwapRequest,
    UnusedStateReply,
    UnusedStateRequest,
    addressed,
    call_id,
    decode_request,
    encode_reply,
)
from deltachain.replica.rank import Rank
from deltachain.replica.settings import RankSettings
from deltachain.replica.spool import Spool
from deltachain.threads import Pool, cores
from deltachain.types import TensorSpec

ATTACHING: Final = (FindUnusedRequest, AgreeRequest)
"""Requests of a leader that is not in charge yet: any rank may still refuse it."""


@dataclass(slots=True)
class Lead:
    """What one leader has attached.

    Attributes:
        leader: Id of the leader; empty for none.
        rank: The rank, laid out for the leader's chain; ``None`` before the first attach.
        url: URL of the chain.
        wanted: Elements of each tensor that this host needs; empty for all.
    """

    leader: str = ""
    rank: Rank | None = None
    url: str = ""
    wanted: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Attachments:
    """The leader in charge, and the next one.

    The next one takes over by its first request that is not in ``ATTACHING``, which it sends once
    all ranks have agreed. If one of them refuses, the leader in charge stays so.
    """

    def __init__(self) -> None:
        self._current = Lead()
        self._next: Lead | None = None

    def add(self, attachment: Lead) -> None:
        """Add the next leader; it is in charge at once if there was none."""
        if self._current.rank is None:
            self._current = attachment
        else:
            self._next = attachment

    def of(self, request: RankRequest) -> Lead:
        """Return what the leader of a request has attached.

        Raises:
            LeaderReplacedError: Another leader is in charge.
        """
        if self._next is not None and request.leader == self._next.leader:
            if isinstance(request, ATTACHING):
                return self._next
            self._current, self._next = self._next, None
        if request.leader != self._current.leader:
            raise LeaderReplacedError("another leader has attached this rank since")
        return self._current

    def rank_for(self, specs: Iterable[TensorSpec], aliases: Mapping[str, str]) -> Rank | None:
        """Return a rank that is laid out for these tensors already; ``None`` for none."""
        ranks = [one.rank for one in (self._current, self._next) if one is not None]
        return next((rank for rank in ranks if rank and rank.is_for(specs, aliases)), None)


logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Any], RankReply]
"""Handler of the type of request for which it is registered."""

REMEMBERED: Final = 16
"""Number of tickets whose results a rank keeps."""


class RankService:
    """The service of one rank for the requests of a leader.

    Args:
        model: Factory of the wrapped model of the engine; called at the first attach.
        number: Number of the rank.
        settings: Settings of the rank.
    """

    def __init__(
        self, model: Callable[[], EngineModel], number: int, settings: RankSettings
    ) -> None:
        self.number = number
        self._model = model
        self._settings = settings
        self._attachments = Attachments()
        self._attached = Lead()  # of the leader whose request is handled
        self._version: int | None = None
        self._last_swap: RankReply | None = None
        self._jobs: dict[int, Future[RankReply]] = {}
        self._thread = Pool(1, "deltachain-stage")
        self._fetching = Pool(1, "deltachain-fetch")
        self._settling = Event()
        self._spools: dict[str, Spool] = {}
        self._spool_names: dict[int, str] = {}
        self._handlers: dict[type[RankRequest], Handler] = {
            AttachRequest: self._attach,
            FindUnusedRequest: self._find_unused,
            AgreeRequest: self._agree,
            UnusedStateRequest: self._unused_state,
            CheckLoadsRequest: self._check_loads,
            StateRequest: self._start_state,
            FetchRequest: self._start_fetch,
            StageRequest: self._start_stage,
            PollRequest: self._poll,
            SwapRequest: self._swap,
            LastSwapRequest: self._take_last_swap,
            StatusRequest: self._status,
        }

    @property
    def rank(self) -> Rank:
        """The rank; an :class:`ApplyError` is raised before it is attached."""
        if self._attached.rank is None:
            raise ApplyError(f"rank {self.number} is not attached")
        return self._attached.rank

    def answer(self, text: str | bytes) -> str:
        """Handle an encoded request; never raises."""
        return encode_reply(self.respond(text))

    def respond(self, text: str | bytes) -> RankReply:
        """Handle an encoded request, and return a typed reply; never raises."""
        try:
            request = decode_request(text)
        except ConfigError as exc:
            return addressed(self._refusal(exc), self.number, call_id(text))
        return self.handle(request)

    def handle(self, request: RankRequest) -> RankReply:
        """Handle a request; never raises. Refuse all leaders but one; see :class:`Attachments`."""
        reply = self._dispatch(request)
        if reply.rank != self.number:  # the reply to an earlier swap is addressed already
            reply = addressed(reply, self.number, request)
        if isinstance(request, SwapRequest):
            self._last_swap = reply
        return reply

    def _dispatch(self, request: RankRequest) -> RankReply:
        handler = self._handlers.get(type(request))
        if handler is None:
            return self._refusal(ConfigError(f"no handler for a {type(request).__name__}"))
        try:
            if not isinstance(request, AttachRequest):
                self._attached = self._attachments.of(request)
            return handler(request)
        except Exception as exc:  # noqa: BLE001 - the boundary to the engine: nothing may escape
            return self._refusal(exc)

    def _refusal(self, exc: Exception) -> Refusal:
        if isinstance(exc, DeltaChainError):
            error, message = type(exc).__name__, str(exc.args[0])
        else:
            logger.error("rank %d failed to handle a request", self.number, exc_info=exc)
            error, message = "ApplyError", f"{type(exc).__name__}: {exc}"
        hint = _encodable(str(getattr(exc, "hint", "")))
        return Refusal(error=error, message=_encodable(message), hint=hint)

    def settle(self) -> None:
        """Wait until all work on the weights in this rank's own thread is done.

        A stage whose objects have not all arrived ends instead of waiting for them.
        """
        self._settling.set()
        try:
            self._thread.submit(lambda: None).result()
        finally:
            self._settling.clear()

    def _attach(self, request: AttachRequest) -> AttachReply:
        if self._settings.url and request.url != self._settings.url:
            raise ConfigError(
                f"this replica was started to follow {redacted_url(self._settings.url)}, "
                f"not {redacted_url(request.url)}"
            )
        folder = self._folder_id(*request.probe) if request.probe else ""
        rank = self._attachments.rank_for(request.specs, request.aliases)
        if rank is None:
            self.settle()  # weights hold other bits while their layout is found
            decode = self._settings.decode
            rank = Rank(self._model(), request.specs, request.aliases, decode=decode)
        self._attachments.add(Lead(request.leader, rank, request.url))
        return AttachReply(tensors=rank.report(), host=socket.gethostname(), folder=folder)

    def _folder_id(self, name: str, word: str) -> str:
        """Return the id of this rank's folder of spools; empty if the leader's probe is in it."""
        if sees_probe(self._spool_of(name), word):
            return ""
        try:
            return folder_id(self._settings.spool)
        except OSError as exc:
            raise ConfigError(
                f"{socket.gethostname()} does not see the leader's files, and cannot keep its own "
                f"in {self._settings.spool}: {exc}",
                hint="let this user write to the folder of DELTACHAIN_SPOOL, or set another",
            ) from exc

    def _agree(self, request: AgreeRequest) -> AgreeReply:
        self.rank.agree(
            request.classes,
            request.holders[self.number],
            compared=request.compared,
            alone=len(request.holders) == 1,
        )
        self._attached.wanted = request.wanted[self.number] if request.wanted else {}
        return AgreeReply()

    def _find_unused(self, request: FindUnusedRequest) -> FindUnusedReply:
        return FindUnusedReply(tensors=self.rank.find_unused(request.names))

    def _unused_state(self, request: UnusedStateRequest) -> UnusedStateReply:
        return UnusedStateReply(digests=self.rank.unused_state(request.names))

    def _check_loads(self, _: CheckLoadsRequest) -> CheckLoadsReply:
        return CheckLoadsReply(same=self.rank.loads_the_same())

    def _start_state(self, request: StateRequest) -> StartedReply:
        rank = self.rank
        rank.check_addresses()

        def job() -> StateReply:
            state = rank.state()
            return StateReply(digests=tuple((who, digest) for (who, _), digest in state.items()))

        return self._start(request.ticket, job)

    def _start_fetch(self, request: FetchRequest) -> StartedReply:
        name = request.spools[self.number]
        if not name:
            return self._start(request.ticket, lambda: FetchedReply(nbytes=0), self._fetching)
        self._spool_of(name)  # checks the name
        spool = self._spools[name] = Spool.create(self._settings.spool, request.index, name)
        attached = self._attached

        def job() -> FetchedReply:
            fill(spool, request.index, attached.url, attached.wanted)
            return FetchedReply(nbytes=spool.nbytes)

        return self._start(request.ticket, job, self._fetching)

    def _start_stage(self, request: StageRequest) -> StartedReply:
        name = request.spools[self.number]
        folder = self._spool_of(name)
        self._spool_names[request.ticket] = name
        self._keep(request.keep)
        rank = self.rank
        rank.check_addresses()
        threads = max(1, cores() // max(1, request.ranks_on_host[self.number]))

        handler = get_ident()

        def may_not_wait() -> bool:
            """Whether the engine needs its weights, or no thread could be started for this job."""
            return self._settling.is_set() or get_ident() == handler

        def job() -> StagedReply:
            staged = rank.stage(
                request.ticket,
                folder,
                request.budget,
                threads=threads,
                abandon=may_not_wait,
            )
            return StagedReply(
                effects=tuple((who, effect) for (who, _), effect in staged.effects.items()),
                nbytes=staged.nbytes,
                can_undo=not staged.deferred,
            )

        return self._start(request.ticket, job)

    def _keep(self, tickets: Iterable[int]) -> None:
        """Drop everything staged under other tickets, and the spools that this rank wrote."""
        self.rank.keep(tickets)
        self._spool_names = {n: self._spool_names[n] for n in tickets if n in self._spool_names}
        for name in self._spools.keys() - set(self._spool_names.values()):
            self._spools.pop(name).close()

    def _spool_of(self, name: str) -> Path:
        if not name or Path(name).name != name or name.startswith("."):
            raise ConfigError(f"{name!r} is not a spool")
        return self._settings.spool / name

    def _start(
        self, ticket: int, job: Callable[[], RankReply], pool: Pool | None = None
    ) -> StartedReply:
        def guarded() -> RankReply:
            try:
                return job()
            except Exception as exc:  # noqa: BLE001 - top of a thread: the reply carries it
                return self._refusal(exc)

        recent = {number: job for number, job in self._jobs.items() if number > ticket - REMEMBERED}
        self._jobs = {**recent, ticket: (pool or self._thread).submit(guarded)}
        return StartedReply()

    def _poll(self, request: PollRequest) -> RankReply:
        job = self._jobs.get(request.ticket)
        if job is None:
            raise ApplyError(f"rank {self.number} knows nothing of ticket {request.ticket}")
        return job.result() if job.done() else PendingReply()

    def _swap(self, request: SwapRequest) -> SwapReply:
        seconds = self.rank.swap(request.ticket, request.version, back=request.back)
        self._version = request.version
        spool = self._spools.pop(self._spool_names.get(request.ticket, ""), None)
        if spool is not None:
            spool.close()  # what is read again lies in maps
        return SwapReply(seconds=seconds, version=request.version, pid=os.getpid())

    def _take_last_swap(self, _: LastSwapRequest) -> RankReply:
        last, self._last_swap = self._last_swap, None
        if last is None:
            raise ApplyError("no swap")
        return last

    def _status(self, _: StatusRequest) -> StatusReply:
        return StatusReply(pid=os.getpid(), version=self._version, staged=len(self.rank.staged))


class RankServices:
    """The rank services of a process, by model.

    An engine calls its plug-ins from several places with nothing in common but the model. A service
    lives as long as its model.
    """

    def __init__(self) -> None:
        self._services: WeakKeyDictionary[nn.Module, RankService] = WeakKeyDictionary()

    def of(
        self, model: nn.Module, wrap: Callable[[], EngineModel], number: int, settings: RankSettings
    ) -> RankService:
        """Return the service of the rank with this model; the first call creates it.

        Args:
            model: Model of the engine.
            wrap: Factory of the wrapped model; see :class:`RankService`.
            number: Number of the rank.
            settings: Settings of the rank.
        """
        if model not in self._services:
            self._services[model] = RankService(wrap, number, settings)
        return self._services[model]

    def settle(self, model: nn.Module) -> None:
        """Wait until no service thread reads this model."""
        if model in self._services:
            self._services[model].settle()


def _encodable(message: str) -> str:
    """Escape lone surrogates, which are allowed in file names but not in JSON."""
    return message.encode(errors="backslashreplace").decode()


def error_of(refusal: Refusal, *, version: int | None = None) -> DeltaChainError:
    """Return the error of a rank's refusal."""
    kind = getattr(errors, refusal.error, None)
    message = f"rank {refusal.rank}: {refusal.message}"
    hint = refusal.hint
    if isinstance(kind, type) and issubclass(kind, ApplyError):
        return kind(message, version=version, hint=hint)
    if isinstance(kind, type) and issubclass(kind, DigestMismatchError):
        return ApplyError(message, version=version)  # a refusal lacks the digests for its own type
    if isinstance(kind, type) and issubclass(kind, DeltaChainError):
        return kind(message, hint=hint)
    return ApplyError(message, version=version, hint=hint)


def raise_refusal(replies: Sequence[RankReply], *, version: int | None = None) -> None:
    """Raise the error of the first refusal, if any.

    Raises:
        EngineDamagedError: A rank must not serve; raised before any other rank's error.
        DeltaChainError: The error of the refusal; see :func:`error_of`.
    """
    errors = [error_of(reply, version=version) for reply in replies if isinstance(reply, Refusal)]
    for error in sorted(errors, key=lambda error: not isinstance(error, EngineDamagedError)):
        raise error
