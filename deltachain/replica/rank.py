"""One rank of a replica: stages and writes its share of each tensor.

A rank decides nothing. The leader names the plan to stage, the rank replies with the effects on its
bits, and writes them on request. A *ticket*, a number chosen by the leader, identifies each stage.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.errors import (
    BaseMismatchError,
    PartialApplyError,
    PoisonedError,
    TensorMismatchError,
    UnfinishedSwapError,
)
from deltachain.format.keys import digest_key
from deltachain.kernels import device, host, staging
from deltachain.kernels.protocol import same_bits
from deltachain.replica.device_staging import DeviceStager
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.discover import Layout, discover, rediscover
from deltachain.replica.layout.fresh_load import expect_fresh
from deltachain.replica.layout.load_methods import LoadGroup, LoadMethod, load_with
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, tensor_of
from deltachain.replica.layout.members import SavedBits, undisturbed
from deltachain.replica.layout.model_state import ModelState
from deltachain.replica.layout.runtime_tables import RuntimeTables
from deltachain.replica.layout.unused import find_unused
from deltachain.replica.layout.update_path import ON_HOST, Classified, TensorClass
from deltachain.replica.live_record import REPLACED, LateTies, LiveRecord, find_late_ties
from deltachain.replica.spool_reader import SpoolReader, TensorPlan
from deltachain.replica.staged import NOTHING, HolderKey, RankStaged, Share, stage
from deltachain.replica.windows import Placement, Window
from deltachain.subscribe.targets.base import take_back, write_all
from deltachain.subscribe.targets.patch import WholeTensor, state_of, warm_up
from deltachain.types import StateDigest, TensorSpec, Version


class HostCopies:
    """Copies of the tensors that an engine does not hold as they are in the checkpoint.

    Args:
        model: Model of the engine.
        source: The checkpoint that the engine loaded.
        specs: Specs of the chain's tensors.
    """

    def __init__(
        self, model: EngineModel, source: LoadedCheckpoint, specs: Mapping[str, TensorSpec]
    ) -> None:
        self._model, self._source, self._specs = model, source, specs
        self._bits: dict[str, npt.NDArray[Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._bits[name]

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors that have a copy."""
        return frozenset(self._bits)

    def keep(self, names: Iterable[str]) -> None:
        """Keep copies of these tensors alone; new ones have the bits of the checkpoint."""
        self._bits = {
            name: self._bits[name] if name in self._bits else self._source.copy(name)
            for name in names
        }

    def load(self, layout: Layout, names: Collection[str]) -> None:
        """Let the engine load changed copies, together with the rest of their groups.

        Raises:
            Exception: Any error of the engine.
        """
        changed = _groups_of(layout, names)
        for way in dict.fromkeys(way for way, _ in changed):
            groups = [group for mine, group in changed if mine == way]
            layers = frozenset().union(*(group.layers for group in groups))
            if not all(group.layers for group in groups):
                layers = frozenset()
            wanted = [name for group in groups for name in group.names if name in self._bits]
            load_with(self._model, way, layers, self.clones(wanted))

    def read_back(self, layout: Layout, names: Collection[str]) -> None:
        """Prove that loaded tensors are stored where they can be read back, and layers are fresh.

        Raises:
            TensorMismatchError: A live tensor holds other bits than were loaded, or a layer is not
                what a fresh load gives.
        """
        fresh = [group for _, group in _groups_of(layout, names) if group in layout.comparable]
        # First, and in order: ranks may exchange values while they quantise.
        expect_fresh(self._model, fresh, self.clones, self._specs)
        for name in layout.readable.keys() & set(names):
            for place in layout.readable[name]:
                if not same_bits(place.view, place.take(self._bits[name])):
                    raise TensorMismatchError(f"{name!r} is not what was loaded", tensor=name)

    def load_old(self, layout: Layout, names: Collection[str], version: Version) -> None:
        """Load copies that have the old bits again.

        Args:
            layout: Layout of the rank.
            names: Tensors that a swap changed.
            version: Version that could not be loaded, for the error message.

        Raises:
            PoisonedError: The engine cannot load them, either.
        """
        try:
            self.load(layout, names)
            self.read_back(layout, names)
        except Exception as exc:
            raise PoisonedError(
                f"the engine could load neither version {version} nor the old bits: {exc}",
                version=version,
            ) from exc

    def clones(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of copies under all names that the engine's checkpoint has for them."""
        for name in names:
            for here in self._source.names[name]:
                yield here, tensor_of(self._specs[name], self._bits[name])


def _groups_of(layout: Layout, names: Collection[str]) -> list[tuple[LoadMethod, LoadGroup]]:
    """Return the groups with one of the tensors, and the methods that load them."""
    return [(way, g) for way, g in layout.groups if not set(names).isdisjoint(g.names)]


def settle() -> None:
    """Wait until the device, if any, has finished all its work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def settled() -> Iterator[None]:
    """Synchronise before and after: other streams read old bits before, and new bits after."""
    settle()
    try:
        yield
    finally:
        settle()


@contextmanager
def own_stream(model: EngineModel) -> Iterator[None]:
    """Use a separate stream, so that staging does not queue behind the engine's kernels."""
    where = next((tensor.device for tensor in model.tensors().values()), torch.device("cpu"))
    if where.type != "cuda":
        yield
        return
    with torch.cuda.device(where), torch.cuda.stream(torch.cuda.Stream(where)):
        yield
        torch.cuda.current_stream(where).synchronize()


class Rank:
    """A rank's share of the model.

    The constructor discovers its layout, which blocks the engine; see :func:`discover.discover`.

    Args:
        model: Model of the engine.
        specs: Specs of the chain's tensors.
        aliases: Other names of tied tensors.
        decode: Where changes are decoded: ``host`` or ``device``; where the weights are by default.
    """

    def __init__(
        self,
        model: EngineModel,
        specs: Iterable[TensorSpec],
        aliases: Mapping[str, str],
        *,
        decode: str = "",
    ) -> None:
        self.model = model
        self._decode = decode
        self._stager: tuple[Layout, DeviceStager] | None = None
        self.staged: dict[int, RankStaged] = {}
        self._written: set[int] = set()
        self._unloaded: int | None = None  # ticket whose old bits are yet to be loaded again
        self._alone = True
        self._changing = Lock()
        self._aliases = aliases
        self._specs = {spec.name: spec for spec in specs}
        self._source = LoadedCheckpoint(Checkpoint(model.checkpoint), self._specs, aliases)
        with settled():
            self._attached = discover(model, self._source)
        self._tables = RuntimeTables(model.modules())
        self._classes: Mapping[str, TensorClass] = {}
        self._holders: Mapping[str, tuple[str, ...]] = {}
        self._copies = HostCopies(model, self._source, self._specs)
        self._ties = LateTies()
        self._record = self._recorded(None)
        warm_up(self._specs.values())

    def is_for(self, specs: Iterable[TensorSpec], aliases: Mapping[str, str]) -> bool:
        """Return whether the rank was attached for these tensors."""
        return {spec.name: spec for spec in specs} == self._specs and aliases == self._aliases

    def report(self) -> dict[str, Classified]:
        """Return the class of every tensor, for the leader."""
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

        Args:
            classes: Class of every tensor.
            holders: Ranks that hold each window of each tensor of this rank.
            compared: Tensors whose layers every rank compares with a fresh load; ``None`` for all
                that this rank can compare.
            alone: Whether there is no other rank.

        Raises:
            TensorMismatchError: A tensor has a worse class on another rank, and this class is not
                proven to work on this rank.
        """
        self._require(classes)
        self._classes, self._holders, self._alone = classes, holders, alone
        if compared is not None:
            self._attached = self._attached.comparing(compared)
        self._stager = None
        self.keep(())
        self._record = self._recorded(self._record)
        self._copies.keep(
            name for name, kind in classes.items() if kind in ON_HOST and holders[name]
        )
        unused = {name for name, kind in classes.items() if kind == "unused"}
        ignored = unused | self._attached.idle
        used = [name for name in classes if name not in ignored]
        self._ties = LateTies(find_late_ties(self._source, ignored, used))
        self._device_stager()

    def _require(self, classes: Mapping[str, TensorClass]) -> None:
        """Prove the classes that other ranks assigned to tensors of this rank."""
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
                raise TensorMismatchError(
                    f"{name!r} is {found.classes[name]} on one rank and {kind} on another",
                    tensor=name,
                )
        self._attached = found

    def find_unused(self, names: Iterable[str]) -> dict[str, Classified]:
        """Test whether the engine uses tensors that no rank holds.

        Blocks the engine, whose weights are the same afterwards.
        """
        model = self.model
        with settled(), undisturbed(model.modules().values(), model.tensors()) as bits:
            found = find_unused(ModelState(model, bits), self._source, self._attached, names)
        return {
            name: Classified(kind="refused", reason=f"the engine keeps it nowhere, but {why}")
            if why
            else Classified(kind="unused", reason="nothing that the engine holds follows it")
            for name, why in found.items()
        }

    def unused_state(self, names: Iterable[str]) -> dict[str, StateDigest]:
        """Return the state digests of the given tensors that are in the engine's checkpoint."""
        return {
            name: host.digest(digest_key(self._specs[name]), self._source.copy(name))
            for name in names
            if self._source.names[name]
        }

    def state(self) -> dict[HolderKey, StateDigest]:
        """Return the state digests of this rank's elements, by the ranks that hold them."""
        total: dict[HolderKey, StateDigest] = defaultdict(StateDigest)
        for name, spec in self._specs.items():
            if name in self._copies:
                copy = WholeTensor(self._copies[name])
                total[self._holders[name][0], 0] += state_of(spec, copy)
                continue
            for place, slot in self._places(name):
                total[slot] += state_of(spec, place)
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

        Args:
            ticket: Ticket under which the result is kept.
            folder: Folder of the spool.
            budget: Bytes of old and new bits to keep.
            threads: Number of threads that inflate and decode.
            abandon: Called while an object is awaited; returns whether to stop.

        Raises:
            ApplyError: An object of the plan was not fetched.
            BaseMismatchError: The engine was found meanwhile to have replaced live tensors.
            TensorMismatchError: The plan changes a tensor that cannot be updated, or parts tensors
                that the engine keeps as one.
        """
        attached = self._attached
        with own_stream(self.model):
            tied: dict[str, list[TensorPlan]] = {}
            plans = self._ties.noted(SpoolReader(folder, abandon).tensor_plans(), tied)
            staged = stage(plans, self._share, budget, threads, self._device_stager())
            self._ties.check(tied, self._share)
        with self._changing:
            if self._attached is not attached:
                raise BaseMismatchError(REPLACED)
            self._written.discard(ticket)
            self.staged[ticket] = staged
        return staged

    def keep(self, tickets: Iterable[int]) -> None:
        """Drop everything staged under other tickets."""
        for ticket in self.staged.keys() - set(tickets):
            del self.staged[ticket]
        self._written.intersection_update(self.staged)

    def swap(self, ticket: int, version: Version, *, back: bool) -> float:
        """Write staged bits, or undo that, all or nothing; return the seconds of writing.

        Do nothing if that is done already: after a failure the leader requests the undo from all
        ranks, even from those that failed and have undone the write themselves. A rank beside
        others that failed to load leaves loading the old bits to this request: ranks may exchange
        values while they load, so all load at once.

        Args:
            ticket: Ticket of the stage.
            version: Version to write, for error messages.
            back: Whether to undo the write.

        Raises:
            PartialApplyError: The write failed, and the old bits are restored.
            UnfinishedSwapError: The engine could not load; the request to undo the write restores
                the old bits.
            PoisonedError: The write failed, and restoring the old bits failed too.
        """
        staged = self.staged.get(ticket)
        if staged is None:
            raise PartialApplyError(f"nothing is staged under ticket {ticket}", version=version)
        self.check_addresses()
        is_done = (ticket in self._written) != back
        if is_done and ticket != self._unloaded:
            return 0.0
        start = time.perf_counter()
        with settled():
            try:
                if is_done:
                    changed = staged.names & self._copies.names
                    self._copies.load_old(self._attached, changed, version)
                    self._unloaded = None
                else:
                    self._swap(staged, ticket, version, back=back)
            finally:
                self._record = self._recorded(self._record)
        return time.perf_counter() - start

    def _swap(self, staged: RankStaged, ticket: int, version: Version, *, back: bool) -> None:
        self._unloaded = None
        on_host = staged.names & self._copies.names
        together = bool(on_host) and not self._alone  # ranks may exchange values while they load
        try:
            written = write_all(staged.undoes() if back else staged.writes(self._share), version)
        except PartialApplyError as exc:
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
            raise PartialApplyError(
                f"the engine could not load version {version}; the old bits are back: {exc}",
                version=version,
            ) from exc
        self._tables.forget()
        (self._written.remove if back else self._written.add)(ticket)
        settle()  # include the device's work in the measured time

    def _unfinished(self, ticket: int, version: Version, why: str) -> UnfinishedSwapError:
        """Return the error of a swap whose old bits are loaded by the request to undo it."""
        self._unloaded = ticket
        return UnfinishedSwapError(why, version=version)

    def _device_stager(self) -> DeviceStager | None:
        """Return the stager of the tensors in place on a device; ``None`` if there are none."""
        if self._stager is None or self._stager[0] is not self._attached:
            places = {
                name: [(slot, place) for place, slot in self._places(name) if self._decodes(place)]
                for name in self._specs
                if name not in self._copies
            }
            self._stager = self._attached, DeviceStager(places, self._specs)
            self._stager[1].warm_up()
        stager = self._stager[1]
        return stager if stager.tensors else None

    def _decodes(self, place: Placement) -> bool:
        """Return whether changes of a place are decoded where it is, in batches."""
        wanted = self._decode or ("host" if device.on_host(place.live) else "device")
        return place.numel > 0 and wanted == "device" and staging.decodes_on(place.live.device)

    def _share(self, name: str) -> Share:
        """Return what this rank holds of a tensor.

        Raises:
            TensorMismatchError: The tensor cannot be updated.
        """
        if self._classes[name] == "refused":
            raise TensorMismatchError(f"{name!r} cannot be written in this engine", tensor=name)
        if name in self._copies:
            copy = WholeTensor(self._copies[name])
            return Share((((self._holders[name][0], 0), copy),), 0, self._specs[name].numel)
        places = [(slot, place) for place, slot in self._places(name) if place.numel]
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

        Blocks the engine. Afterwards it holds the copies, even if another process had written.
        """
        with settled():
            layers = self._attached.layers
            state = ModelState(self.model, SavedBits(self.model.tensors()), layers)
            self._copies.load(self._attached, self._copies.names)
            self._record = self._recorded(self._record)
            try:
                state.expect_same()
                self._copies.read_back(self._attached, self._copies.names)
            except TensorMismatchError:
                return False
        return True

    def _recorded(self, first: LiveRecord | None) -> LiveRecord:
        """Return a record of the live tensors as they are, and of maps as they were at first."""
        placed = (place for places in self._attached.places.values() for place in places)
        storages = {one.live.untyped_storage().data_ptr() for one in placed}
        return LiveRecord(self.model, storages, first)

    def check_addresses(self) -> None:
        """Check whether the engine moved or replaced tensors; if so, find their places again.

        Call it in the engine's own thread only: the engine must neither run nor load meanwhile.

        Raises:
            BaseMismatchError: Tensors were replaced or moved, and their content is unknown.
            EngineDamagedError: The engine arranged its experts anew.
        """
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
        raise BaseMismatchError(why)
