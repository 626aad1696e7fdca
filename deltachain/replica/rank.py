"""One rank of a replica, and its service: it stages and writes its share of each tensor.

A rank decides nothing. The leader names the plan to stage, the rank replies with the effects on its
bits, and writes them on request. A *ticket*, a number chosen by the leader, identifies each stage.
"""

import logging
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event, Lock, get_ident
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import torch
from msgspec.structs import replace
from torch import nn

from deltachain import errors
from deltachain.chain.tensor_plan import TensorPlan
from deltachain.checkpoint import Checkpoint
from deltachain.format.keys import digest_key
from deltachain.kernels import host, staging, torch_kernels
from deltachain.redact import redacted_url
from deltachain.subscribe.targets.base import take_back, write_all
from deltachain.subscribe.targets.tensor_patch import LiveElements, WholeTensor, state_of, warm_up
from deltachain.threads import Pool, cores
from deltachain.types import StateDigest, TensorSpec, Version

from . import messages as wire
from .batches import DeviceStager, HostStager, Stager
from .engine import EngineModel
from .fetcher import fill, folder_id, sees_probe, with_ties
from .freed_memory import reusing_memory, trim_memory
from .host_copies import HostCopies
from .layout.classes import ON_HOST, Classified, TensorClass
from .layout.derived import find_unused
from .layout.discover import Layout, discover, rediscover
from .layout.expert_slots import ExpertSlots
from .layout.in_place import again, read_back
from .layout.kept_proof import find_layout, keep, loaded_digest
from .layout.loaded_checkpoint import LoadedCheckpoint
from .layout.model_state import ModelState
from .layout.module_members import undisturbed
from .layout.runtime_tables import RuntimeTables
from .moved_tensors import REPLACED, LateTies, LiveRecord, find_late_ties
from .placements import HolderKey, Placement, Window
from .settings import RankSettings
from .spool import Spool, SpoolReader
from .staged import NOTHING, RankStaged, Share, stage


def settle() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def settled() -> Iterator[None]:
    """Synchronise before and after: other streams read old bits before, and new bits after.

    Tensors made meanwhile take the memory of freed ones.
    """
    settle()
    try:
        with reusing_memory():
            yield
    finally:
        settle()


@cache
def stage_stream(where: torch.device) -> torch.cuda.Stream:
    """Return the stream of all stages on a device: what one frees, no other stream can take."""
    return torch.cuda.Stream(where)


@contextmanager
def own_stream(model: EngineModel) -> Iterator[None]:
    """Use a separate stream, so that staging does not queue behind the engine's kernels."""
    where = next((tensor.device for tensor in model.tensors().values()), torch.device("cpu"))
    if where.type != "cuda":
        yield
        return
    with torch.cuda.device(where), torch.cuda.stream(stage_stream(where)):
        yield
        torch.cuda.current_stream(where).synchronize()


class Rank:
    """A rank's share of the model.

    The constructor finds its layout, which blocks the engine; see :func:`discover.discover`. With a
    folder of ``proofs``, it takes the layout of an earlier start that is kept there, proven again.
    Changes are decoded on the ``host`` or the ``device``, by default where the weights are.
    """

    def __init__(
        self,
        model: EngineModel,
        specs: Iterable[TensorSpec],
        aliases: Mapping[str, str],
        *,
        decode: str = "",
        proofs: Path | None = None,
    ) -> None:
        self.model = model
        self._decode = decode
        self._stager: tuple[Layout, tuple[Stager, ...], frozenset[str]] | None = None
        self.staged: dict[int, RankStaged] = {}
        self._written: set[int] = set()
        self._void: set[int] = set()  # tickets staged before experts moved
        self._unloaded: int | None = None  # ticket whose old bits are yet to be loaded again
        self._alone = True
        self._changing = Lock()
        self._aliases = aliases
        self._specs = {spec.name: spec for spec in specs}
        self._source = LoadedCheckpoint(Checkpoint(model.checkpoint), self._specs, aliases)
        with settled():
            self._experts = ExpertSlots(model, self._source)
            self._attached, self._proof, is_kept = find_layout(model, self._source, proofs)
            self._copies = HostCopies(model, self._source, self._specs)
            # They take memory that test loads left.
            self._copies.keep(n for n, one in self._attached.classes.items() if one in ON_HOST)
        trim_memory()
        self._is_searched, self._proofs = not is_kept, proofs  # just now
        self._tables = RuntimeTables(model.modules())
        self._classes: Mapping[str, TensorClass] = {}
        self._holders: Mapping[str, tuple[str, ...]] = {}
        self.ties = LateTies()
        self._record = self._recorded(None)
        warm_up(self._specs.values())

    def is_for(self, specs: Iterable[TensorSpec], aliases: Mapping[str, str]) -> bool:
        return {spec.name: spec for spec in specs} == self._specs and aliases == self._aliases

    def report(self) -> dict[str, Classified]:
        return self._attached.report()

    def agree(
        self,
        classes: Mapping[str, TensorClass],
        holders: Mapping[str, tuple[str, ...]],
        *,
        compared: Container[str] | None = None,
        alone: bool = True,
    ) -> None:
        """Accept the classes that all ranks agreed on, and make the host copies that they need.

        Existing copies stay: they have the bits that the engine loaded last.
        """
        self._require(classes)
        self._classes, self._holders, self._alone = classes, holders, alone
        if compared is not None:
            self._attached = self._attached.comparing(compared)
        self._stager = None
        self.keep(())
        self._record = self._recorded(self._record)
        self._copies.keep(n for n, kind in classes.items() if kind in ON_HOST and holders[n])
        ignored = self._attached.idle.union(n for n, kind in classes.items() if kind == "unused")
        used = [name for name in classes if name not in ignored]
        self.ties = LateTies(find_late_ties(self._source, ignored, used))
        self._batched()

    def _require(self, classes: Mapping[str, TensorClass]) -> None:
        mine = self._attached.classes
        other = {
            name: kind
            for name, kind in classes.items()
            if kind != "refused" and mine[name] not in ("absent", "unused", kind)
        }
        if not other:
            return
        with settled():
            found = discover(self.model, self._source, other)
        for name, kind in other.items():
            if found.classes[name] != kind:
                raise errors.TensorMismatchError(
                    f"{name!r} is {found.classes[name]} on one rank and {kind} on another",
                    tensor=name,
                )
        self._attached = found

    def find_unused(self, names: Iterable[str]) -> dict[str, Classified]:
        """Test whether the engine uses tensors that no rank holds; blocks the engine."""
        model, held = self.model, read_back(self._source, self._attached.places).held
        rewrites = again(self._source, held)
        with settled(), undisturbed(model.modules().values(), model.tensors(), rewrites) as saved:
            found = find_unused(ModelState(model, self._source, saved), self._attached, names)
        return {
            name: Classified(kind="refused", reason=f"the engine keeps it nowhere, but {why}")
            if why
            else Classified(kind="unused", reason="nothing that the engine holds follows it")
            for name, why in found.items()
        }

    def unused_state(self, names: Iterable[str]) -> dict[str, StateDigest]:
        held = [name for name in names if self._source.names[name]]
        return {n: host.digest(digest_key(self._specs[n]), self._source.bits(n)) for n in held}

    def state(self) -> dict[HolderKey, StateDigest]:
        parts: list[tuple[HolderKey, TensorSpec, LiveElements]] = []
        for name, spec in self._specs.items():
            if name in self._copies.bits:
                parts.append(
                    ((self._holders[name][0], 0), spec, WholeTensor(self._copies.bits[name]))
                )
            else:
                parts += [(slot, spec, place) for place, slot in self._places(name)]
        on_host = all(torch_kernels.on_host(one) for one in self.model.tensors().values())
        total: dict[HolderKey, StateDigest] = defaultdict(StateDigest)
        with Pool(cores() if on_host else 0) as pool:
            found = pool.map(lambda part: state_of(*part[1:]), parts)
            for (slot, _, _), digest in zip(parts, found, strict=True):
                total[slot] += digest
        trim_memory()  # the load that was compared
        return dict(total)

    def stage(
        self,
        ticket: int,
        folder: Path,
        budget: int,
        *,
        threads: int = 1,
        abandon: Callable[[], bool] = lambda: False,
    ) -> RankStaged:
        """Compute the writes of a spooled plan on this rank, without writing anything.

        May run in another thread than the other methods, and before all objects have arrived.
        """
        attached = self._attached
        with own_stream(self.model):
            tied: dict[str, list[TensorPlan]] = {}
            plans = SpoolReader(folder, abandon).plans(*self._batched())
            staged = stage(self.ties.noted(plans, tied), self._share, budget, threads)
            self.ties.check(tied, self._share)
        if self._copies.bits:
            trim_memory()  # a load needs it: of the one before, and of decoding
        with self._changing:
            if self._attached is not attached:
                raise errors.BaseMismatchError(REPLACED)
            self._written.discard(ticket)
            self.staged[ticket] = staged
        return staged

    def keep(self, tickets: Iterable[int]) -> None:
        for ticket in self.staged.keys() - set(tickets):
            del self.staged[ticket]
        self._written.intersection_update(self.staged)

    def swap(self, ticket: int, version: Version, *, back: bool) -> float:
        """Write staged bits, or undo that, all or nothing; return the seconds of writing.

        Do nothing if that is done already: after a failure the leader requests the undo from all
        ranks, even from those that failed and have undone the write themselves. A rank beside
        others that failed to load leaves loading the old bits to this request: ranks may exchange
        values while they load, so all load at once.
        """
        staged = self.staged.get(ticket)
        if staged is None:
            kind = errors.ExpertsMovedError if ticket in self._void else errors.PartialApplyError
            raise kind(f"nothing is staged under ticket {ticket}", version=version)
        self._is_searched = False
        self.check_addresses()
        is_done = (ticket in self._written) != back
        if is_done and ticket != self._unloaded:
            return 0.0
        start = time.perf_counter()
        with settled():
            try:
                if is_done:
                    changed = staged.names & self._copies.bits.keys()
                    self._copies.load_old(self._attached, changed, version)
                    self._unloaded = None
                else:
                    self._swap(staged, ticket, version, back=back)
            finally:
                self._record = self._recorded(self._record)
        return time.perf_counter() - start

    def _swap(self, staged: RankStaged, ticket: int, version: Version, *, back: bool) -> None:
        self._unloaded = None
        on_host = staged.names & self._copies.bits.keys()
        together = bool(on_host) and not self._alone  # ranks may exchange values while they load
        try:
            written = write_all(staged.undoes() if back else staged.writes(self._share), version)
        except errors.PartialApplyError as exc:
            if together:  # the others load: load the old bits as often as they load the new ones
                self._copies.load_old(self._attached, on_host, version)
                raise self._unfinished(ticket, version, str(exc.args[0])) from exc
            raise
        try:
            self._copies.load(self._attached, on_host)
            self._copies.read_back(self._attached, on_host)
        except Exception as exc:
            take_back(written, version, exc)
            if together:
                why = f"the engine could not load version {version}: {exc}"
                raise self._unfinished(ticket, version, why) from exc
            self._copies.load_old(self._attached, on_host, version)
            raise errors.PartialApplyError(
                f"the engine could not load version {version}; the old bits are back: {exc}",
                version=version,
            ) from exc
        self._tables.forget()
        (self._written.remove if back else self._written.add)(ticket)
        settle()  # include the device's work in the measured time

    def _unfinished(self, ticket: int, version: Version, why: str) -> errors.UnfinishedSwapError:
        self._unloaded = ticket
        return errors.UnfinishedSwapError(why, version=version)

    def _batched(self) -> tuple[tuple[Stager, ...], frozenset[str]]:
        """Return where tensors are staged in batches, and the names of those that need not be read.

        Both are as lasting as the layout. Of a tensor that is not here, a late tie may be.
        """
        if self._stager is None or self._stager[0] is not self._attached:
            kinds: dict[type[Stager], dict[str, list[tuple[HolderKey, Placement]]]] = {
                HostStager: {},
                DeviceStager: {},
            }
            absent = set()
            for name, kind in self._classes.items():
                places = [] if kind == "refused" else self._held(name)
                stagers = {self._stager_of(place) for _, place in places}
                if len(stagers) == 1 and (stager := stagers.pop()) is not None:
                    kinds[stager][name] = places
                if not places and kind != "refused":
                    absent.add(name)
            made = tuple(make(held, self._specs) for make, held in kinds.items() if held)
            for one in made:
                one.warm_up()
            self._stager = self._attached, made, frozenset(absent) - self.ties.names
        return self._stager[1:]

    def _stager_of(self, place: Placement) -> type[Stager] | None:
        """Return what stages changes of a place in batches, if anything does."""
        on_host = torch_kernels.on_host(place.live)
        wanted = self._decode or ("host" if on_host else "device")
        if wanted == "device" and staging.decodes_on(place.live.device):
            return DeviceStager
        return HostStager if on_host else None

    def _held(self, name: str) -> list[tuple[HolderKey, Placement]]:
        """Return the places of a tensor that have elements: in the engine, or in its copy."""
        if name in self._copies.bits:
            bits = self._copies.bits[name]
            signed = bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}")
            places = [(Placement(torch.from_numpy(signed), 0, (1,)), (self._holders[name][0], 0))]
        else:
            places = list(self._places(name))
        return [(slot, place) for place, slot in places if place.numel]

    def _share(self, name: str) -> Share:
        if self._classes[name] == "refused":
            raise errors.TensorMismatchError(
                f"{name!r} cannot be written in this engine", tensor=name
            )
        if name in self._copies.bits:
            copy = WholeTensor(self._copies.bits[name])
            return Share((((self._holders[name][0], 0), copy),), 0, self._specs[name].numel)
        places = self._held(name)
        if not places:
            return NOTHING
        spans = [place.span for _, place in places]
        return Share(places, min(low for low, _ in spans), max(high for _, high in spans))

    def _places(self, name: str) -> Iterator[tuple[Placement, HolderKey]]:
        if self._classes[name] != "in_place":
            return
        seen: Counter[Window] = Counter()
        places = self._attached.places.get(name, ())
        for place, label in zip(places, self._holders[name], strict=True):
            yield place, (label, seen[place.window])
            seen[place.window] += 1

    def loads_the_same(self) -> bool:
        """Load every host copy again; return whether that changed no bit and no output.

        Blocks the engine. Afterwards it holds the copies, even if another process had written. A
        search for the layout ended with just this load, so that the first call loads nothing. Nor
        does it beside a kept proof of an engine that held and computed the same.
        """
        self.check_experts()
        proof, self._proof = self._proof if self._alone else None, None
        is_searched, self._is_searched = self._is_searched, False
        if is_searched and proof is None:
            return True
        with settled():
            layers = self._attached.layers
            state = ModelState(self.model, self._source, layers=layers)
            held = loaded_digest(state, layers, self._copies.bits) if proof else ""
            if proof is not None and held == proof.loaded:
                return True
            if not is_searched:
                self._copies.load(self._attached, self._copies.bits)
                self._record = self._recorded(self._record)
                try:
                    state.expect_same()
                    self._copies.read_back(self._attached, self._copies.bits)
                except errors.TensorMismatchError:
                    return False
            if proof is not None and self._proofs is not None:
                keep(self._proofs, replace(proof, loaded=held))
        return True

    def _recorded(self, first: LiveRecord | None) -> LiveRecord:
        placed = (place for places in self._attached.places.values() for place in places)
        storages = {one.live.untyped_storage().data_ptr() for one in placed}
        return LiveRecord(self.model, storages, first)

    def check_experts(self) -> None:
        """Raise an :class:`ExpertsMovedError` if experts have moved since :meth:`find_experts`."""
        if self.model.slots() != self._experts.slots:
            raise errors.ExpertsMovedError("the engine moved experts to other slots")

    def find_experts(self) -> None:
        """Find the places of all tensors again if experts have moved.

        Afterwards all ranks must agree again. Call it in the engine's own thread only.
        """
        if self.model.slots() == self._experts.slots:
            return
        with settled():
            found = ExpertSlots(self.model, self._source, self._experts)
            layout = found.moved(self._attached, self._experts)
        with self._changing:
            self._experts, self._attached = found, layout
            self._record = self._recorded(None)
            self._void |= self.staged.keys()
            self.keep(())

    def check_addresses(self) -> None:
        """Check whether the engine moved or replaced tensors; if so, find their places again.

        Call it in the engine's own thread only: the engine must neither run nor load meanwhile.
        """
        self.check_experts()
        why = self._record.difference(self.model)
        if not why:
            return
        with settled():
            found = rediscover(self.model, self._source, self._attached)
        with self._changing:
            self._attached = found
            self._record = self._recorded(self._record)
            self.staged.clear()
            self._written.clear()
        raise errors.BaseMismatchError(why)


# After an exception in one worker, an engine may misread every later reply of the others. So every
# request gets a reply; errors become a :class:`Refusal`. Handlers return at once: long work runs in
# a thread, and ``poll`` returns its result.


ATTACHING: Final = (wire.FindUnusedRequest, wire.AgreeRequest)
"""Requests of a leader that is not in charge yet: any rank may still refuse it."""


@dataclass(slots=True)
class Lead:
    """What one leader has attached, and the elements that its host needs; empty for all."""

    leader: str = ""
    rank: Rank | None = None
    url: str = ""
    wanted: Mapping[str, tuple[int, int]] = field(default_factory=dict)


logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Any], wire.RankReply]
"""Handler of the type of request for which it is registered."""

REMEMBERED: Final = 16  # number of tickets whose results a rank keeps


class RankService:
    def __init__(
        self, model: Callable[[], EngineModel], number: int, settings: RankSettings
    ) -> None:
        self.number = number
        self._model = model
        self._settings = settings
        self._lead, self._next = Lead(), Lead()  # of the leader in charge, and of the next one
        self._attached = Lead()  # of the leader whose request is handled
        self._version: int | None = None
        self._last_swap: wire.RankReply | None = None
        self._jobs: dict[int, Future[wire.RankReply]] = {}
        self._thread = Pool(1, "deltachain-stage")
        self._fetching = Pool(1, "deltachain-fetch")
        self._settling = Event()
        self._spools: dict[str, Spool] = {}
        self._spool_names: dict[int, str] = {}
        self._handlers: dict[type[wire.RankRequest], Handler] = {
            wire.AttachRequest: self._attach,
            wire.FindUnusedRequest: self._find_unused,
            wire.AgreeRequest: self._agree,
            wire.CheckLoadsRequest: lambda _: wire.CheckLoadsReply(same=self.rank.loads_the_same()),
            wire.StateRequest: self._start_state,
            wire.FetchRequest: self._start_fetch,
            wire.StageRequest: self._start_stage,
            wire.PollRequest: self._poll,
            wire.SwapRequest: self._swap,
            wire.LastSwapRequest: self._take_last_swap,
            wire.StatusRequest: self._status,
        }

    @property
    def rank(self) -> Rank:
        if self._attached.rank is None:
            raise errors.ApplyError(f"rank {self.number} is not attached")
        return self._attached.rank

    def answer(self, text: str | bytes) -> str:
        return wire.encode_reply(self.respond(text))

    def respond(self, text: str | bytes) -> wire.RankReply:
        try:
            request = wire.decode_request(text)
        except errors.ConfigError as exc:
            return self.refuse(wire.call_id(text), exc)
        return self.handle(request)

    def refuse(self, request: wire.RankRequest | wire.CallId, exc: Exception) -> wire.Refusal:
        return wire.addressed(self._refusal(exc), self.number, request)

    def handle(self, request: wire.RankRequest) -> wire.RankReply:
        try:
            if not isinstance(request, wire.AttachRequest):
                self._attached = self._lead_of(request)
            reply = self._handlers[type(request)](request)
        except Exception as exc:  # noqa: BLE001 - the boundary to the engine: nothing may escape
            reply = self._refusal(exc)
        if reply.rank != self.number:  # the reply to an earlier swap is addressed already
            reply = wire.addressed(reply, self.number, request)
        if isinstance(request, wire.SwapRequest):
            self._last_swap = reply
        return reply

    def _lead_of(self, request: wire.RankRequest) -> Lead:
        """Return what the leader of a request has attached, unless another one is in charge.

        The next one takes over by its first request that is not in ``ATTACHING``, which it sends
        once all ranks have agreed. If one of them refuses, the leader in charge stays so.
        """
        if self._next.rank is not None and request.leader == self._next.leader:
            if isinstance(request, ATTACHING):
                return self._next
            self._lead, self._next = self._next, Lead()
        if request.leader != self._lead.leader:
            raise errors.LeaderReplacedError("another leader has attached this rank since")
        return self._lead

    def _refusal(self, exc: Exception) -> wire.Refusal:
        error, message = type(exc).__name__, str(exc.args[0] if exc.args else "")
        if not isinstance(exc, errors.DeltaChainError):
            logger.error("rank %d failed to handle a request", self.number, exc_info=exc)
            error, message = "ApplyError", f"{error}: {exc}"
        hint = str(getattr(exc, "hint", ""))
        # A file name may have lone surrogates, which JSON cannot carry.
        told = [text.encode(errors="backslashreplace").decode() for text in (message, hint)]
        return wire.Refusal(error=error, message=told[0], hint=told[1])

    def settle(self) -> None:
        """Wait until all work on the weights in this rank's own thread is done.

        A stage whose objects have not all arrived ends instead of waiting for them.
        """
        self._settling.set()
        try:
            self._thread.submit(lambda: None).result()
        finally:
            self._settling.clear()

    def _attach(self, request: wire.AttachRequest) -> wire.AttachReply:
        if self._settings.url and request.url != self._settings.url:
            raise errors.ConfigError(
                f"this replica was started to follow {redacted_url(self._settings.url)}, "
                f"not {redacted_url(request.url)}"
            )
        folder = self._folder_id(*request.probe) if request.probe else ""
        known = (one.rank for one in (self._lead, self._next) if one.rank is not None)
        rank = next((one for one in known if one.is_for(request.specs, request.aliases)), None)
        if rank is not None:
            rank.find_experts()
        else:
            self.settle()  # weights hold other bits while their layout is found
            decode, proofs = self._settings.decode, self._settings.proofs
            rank = Rank(self._model(), request.specs, request.aliases, decode=decode, proofs=proofs)
        lead = Lead(request.leader, rank, request.url)
        if self._lead.rank is None:
            self._lead = lead
        else:
            self._next = lead
        return wire.AttachReply(tensors=rank.report(), host=socket.gethostname(), folder=folder)

    def _folder_id(self, name: str, word: str) -> str:
        """Return the id of this rank's folder of spools; empty if the leader's probe is in it."""
        if sees_probe(self._spool_of(name), word):
            return ""
        try:
            return folder_id(self._settings.spool)
        except OSError as exc:
            raise errors.ConfigError(
                f"{socket.gethostname()} does not see the leader's files, and cannot keep its own "
                f"in {self._settings.spool}: {exc}",
                hint="let this user write to the folder of DELTACHAIN_SPOOL, or set another",
            ) from exc

    def _agree(self, request: wire.AgreeRequest) -> wire.AgreeReply:
        self.rank.agree(
            request.classes,
            request.holders[self.number],
            compared=request.compared,
            alone=len(request.holders) == 1,
        )
        ties = self.rank.ties.ties
        wanted = request.wanted[self.number] if request.wanted else {}
        self._attached.wanted = with_ties(wanted, ties)
        return wire.AgreeReply(ties=ties)

    def _find_unused(self, request: wire.FindUnusedRequest) -> wire.FindUnusedReply:
        digests = self.rank.unused_state(request.names)
        return wire.FindUnusedReply(tensors=self.rank.find_unused(request.names), digests=digests)

    def _start_state(self, request: wire.StateRequest) -> wire.StartedReply:
        rank = self.rank
        rank.check_addresses()

        def job() -> wire.StateReply:
            found = rank.state().items()
            return wire.StateReply(digests=tuple((who, digest) for (who, _), digest in found))

        return self._start(request.ticket, job)

    def _start_fetch(self, request: wire.FetchRequest) -> wire.StartedReply:
        name = request.spools[self.number]
        if not name:
            return self._start(request.ticket, lambda: wire.FetchedReply(nbytes=0), self._fetching)
        self._spool_of(name)  # checks the name
        spool = self._spools[name] = Spool.create(self._settings.spool, request.index, name)
        attached = self._attached

        def job() -> wire.FetchedReply:
            fill(spool, request.index, attached.url, attached.wanted)
            return wire.FetchedReply(nbytes=spool.nbytes)

        return self._start(request.ticket, job, self._fetching)

    def _start_stage(self, request: wire.StageRequest) -> wire.StartedReply:
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

        def job() -> wire.StagedReply:
            staged = rank.stage(
                request.ticket, folder, request.budget, threads=threads, abandon=may_not_wait
            )
            return wire.StagedReply(
                effects=tuple((who, effect) for (who, _), effect in staged.effects.items()),
                nbytes=staged.nbytes,
                can_undo=not staged.deferred,
            )

        return self._start(request.ticket, job)

    def _keep(self, tickets: Iterable[int]) -> None:
        self.rank.keep(tickets)
        self._spool_names = {n: self._spool_names[n] for n in tickets if n in self._spool_names}
        for name in self._spools.keys() - set(self._spool_names.values()):
            self._spools.pop(name).close()

    def _spool_of(self, name: str) -> Path:
        if not name or Path(name).name != name or name.startswith("."):
            raise errors.ConfigError(f"{name!r} is not a spool")
        return self._settings.spool / name

    def _start(
        self, ticket: int, job: Callable[[], wire.RankReply], pool: Pool | None = None
    ) -> wire.StartedReply:
        def guarded() -> wire.RankReply:
            try:
                return job()
            except Exception as exc:  # noqa: BLE001 - top of a thread: the reply carries it
                return self._refusal(exc)

        recent = {number: job for number, job in self._jobs.items() if number > ticket - REMEMBERED}
        self._jobs = {**recent, ticket: (pool or self._thread).submit(guarded)}
        return wire.StartedReply()

    def _poll(self, request: wire.PollRequest) -> wire.RankReply:
        job = self._jobs.get(request.ticket)
        if job is None:
            raise errors.ApplyError(f"rank {self.number} knows nothing of ticket {request.ticket}")
        if not job.done():
            return wire.PendingReply()
        reply = job.result()
        if not isinstance(reply, wire.FetchedReply):
            self.rank.check_experts()  # in the engine's own thread: none moves meanwhile
        return reply

    def _swap(self, request: wire.SwapRequest) -> wire.SwapReply:
        seconds = self.rank.swap(request.ticket, request.version, back=request.back)
        self._version = request.version
        spool = self._spools.pop(self._spool_names.get(request.ticket, ""), None)
        if spool is not None:
            spool.close()  # what is read again lies in maps
        return wire.SwapReply(seconds=seconds, version=request.version, pid=os.getpid())

    def _take_last_swap(self, _: wire.LastSwapRequest) -> wire.RankReply:
        last, self._last_swap = self._last_swap, None
        if last is None:
            raise errors.ApplyError("no swap")
        return last

    def _status(self, _: wire.StatusRequest) -> wire.StatusReply:
        return wire.StatusReply(
            pid=os.getpid(), version=self._version, staged=len(self.rank.staged)
        )


NO_DRAFT: Final = errors.ConfigError(
    "this engine drafts with no model of its own that could follow another chain",
    hint="unset DELTACHAIN_DRAFT_URL",
)


class RankServices(WeakKeyDictionary[nn.Module, RankService]):
    """The rank services of a process, by model, which is all that calls of an engine share."""

    def of(
        self, model: nn.Module, wrap: Callable[[], EngineModel], number: int, settings: RankSettings
    ) -> RankService:
        """Return the service of the rank with this model; the first call creates it."""
        if model not in self:
            self[model] = RankService(wrap, number, settings)
        return self[model]

    def settle(self, model: nn.Module) -> None:
        if model in self:
            self[model].settle()
