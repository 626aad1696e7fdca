"""One rank of a replica: stages what it owns of each tensor, and writes it.

A rank never decides. It is told which plan to stage, answers what that would do to its bits, and
writes when the leader says so. What it stages is known by a *ticket*, a number the leader gives.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeAlias

import numpy.typing as npt
from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.delta import TensorDelta
from deltachain.errors import (
    BaseMismatchError,
    PartialApplyError,
    PoisonedError,
    TensorMismatchError,
)
from deltachain.format.digest import digest_key
from deltachain.kernels import host
from deltachain.kernels.protocol import same_bits
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.discover import discover, rediscover
from deltachain.replica.layout.load_methods import load_with
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, tensor_of
from deltachain.replica.layout.members import SavedBits, undisturbed
from deltachain.replica.layout.model_state import ModelState
from deltachain.replica.layout.runtime_tables import RuntimeTables
from deltachain.replica.layout.unused import find_unused
from deltachain.replica.layout.update_path import ON_HOST, Classified, TensorClass
from deltachain.replica.spool import SpoolReader
from deltachain.replica.streams import own_stream, settle, settled
from deltachain.replica.windows import Placement, Window
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.base import Write, take_back, write_all
from deltachain.subscribe.targets.live import WholeTensor, state_of
from deltachain.subscribe.targets.patch import prepare, warm_up
from deltachain.types import StateDigest, TensorSpec, Version

HolderKey: TypeAlias = tuple[str, int]
"""The ranks that hold some elements, and which of several places of them on this rank it is."""

Effects: TypeAlias = dict[HolderKey, Effect]
"""What a stage does to the state digest."""

REPLACED: Final = (
    "the engine replaced live tensors; where they are now is known, what they hold is not"
)


@dataclass(frozen=True, slots=True)
class RankStaged:
    """What a rank will write.

    Attributes:
        placed: Patches of live places and of host copies.
        deferred: Tensors that did not fit the budget: read again while they are written.
        spool: Where those are read from.
        effects: What it does.
    """

    placed: tuple[Write, ...]
    deferred: tuple[str, ...]
    spool: SpoolReader
    effects: Effects

    @property
    def names(self) -> set[str]:
        """Tensors that are written."""
        return {placed.patch.spec.name for placed in self.placed} | set(self.deferred)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(placed.patch.own_nbytes for placed in self.placed)


class Rank:
    """A rank's share of the model.

    Making one finds the ways into it, which blocks the engine; see :func:`discover.discover`.

    Args:
        model: The engine's.
        specs: The chain's tensors.
        aliases: Other names of tied ones.
    """

    def __init__(
        self, model: EngineModel, specs: Iterable[TensorSpec], aliases: Mapping[str, str]
    ) -> None:
        self.model = model
        self.staged: dict[int, RankStaged] = {}
        self._written: set[int] = set()
        self._changing = Lock()
        self._aliases = aliases
        self._specs = {spec.name: spec for spec in specs}
        self._source = LoadedCheckpoint(Checkpoint(model.checkpoint), self._specs, aliases)
        with settled():
            self._attached = discover(model, self._source)
        self._tables = RuntimeTables(model.modules())
        self._classes: Mapping[str, TensorClass] = {}
        self._holders: Mapping[str, tuple[str, ...]] = {}
        self._copies: dict[str, npt.NDArray[Any]] = {}
        self._identity: dict[str, int] = self._addresses({})
        warm_up(self._specs.values())

    def is_for(self, specs: Iterable[TensorSpec], aliases: Mapping[str, str]) -> bool:
        """Whether these are the tensors that it was attached for."""
        return {spec.name: spec for spec in specs} == self._specs and aliases == self._aliases

    def report(self) -> dict[str, Classified]:
        """What was found, for the leader."""
        return self._attached.report()

    def agree(
        self, classes: Mapping[str, TensorClass], holders: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Take the classes that all ranks agreed on, and copy to the host what needs it.

        A copy that is there already stays: it has the bits that the engine loaded last.

        Raises:
            TensorMismatchError: A tensor has a worse class on another rank, and that is not proven
                to work on this one.
        """
        self._require(classes)
        self._classes, self._holders = classes, holders
        self.keep(())
        self._copies = {
            name: self._copies[name] if name in self._copies else self._source.copy(name)
            for name, kind in classes.items()
            if kind in ON_HOST and holders[name]
        }

    def _require(self, classes: Mapping[str, TensorClass]) -> None:
        """Prove the classes that other ranks gave tensors of this one."""
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
        """Find out whether the engine uses tensors that no rank holds.

        Blocks the engine, which holds afterwards what it held.
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
        """State digests of tensors as the engine's checkpoint has them; of those that it has."""
        return {
            name: host.digest(digest_key(self._specs[name]), self._source.copy(name))
            for name in names
            if self._source.names[name]
        }

    def state(self) -> dict[HolderKey, StateDigest]:
        """State digest of what this rank holds, by who holds it with it."""
        total: dict[HolderKey, StateDigest] = defaultdict(StateDigest)
        for name, spec in self._specs.items():
            if name in self._copies:
                copy = WholeTensor(self._copies[name])
                total[self._holders[name][0], 0] += state_of(spec, copy)
                continue
            for place, slot in self._places(name):
                total[slot] += state_of(spec, place)
        return dict(total)

    def stage(self, ticket: int, folder: Path, budget: int) -> RankStaged:
        """Compute what a spooled plan writes into this rank; nothing is written.

        May be called from another thread than everything else.

        Args:
            ticket: Under which it is kept.
            folder: Of the spool.
            budget: Bytes of old and new bits to keep.

        Raises:
            BaseMismatchError: Meanwhile it was found that the engine had replaced live tensors.
            TensorMismatchError: The plan changes a tensor that no way leads to.
        """
        attached = self._attached
        with own_stream(self.model):
            staged = self._stage(SpoolReader(folder), budget)
        with self._changing:
            if self._attached is not attached:
                raise BaseMismatchError(REPLACED)
            self._written.discard(ticket)
            self.staged[ticket] = staged
        return staged

    def _stage(self, reader: SpoolReader, budget: int) -> RankStaged:
        kept: list[Write] = []
        deferred: list[str] = []
        effects: Effects = defaultdict(Effect)
        nbytes = 0
        for delta in reader:
            placed = list(self._prepare(delta))
            nbytes += sum(one.patch.own_nbytes for _, one in placed)
            if nbytes <= budget:
                kept += [one for _, one in placed]
            elif placed:
                deferred.append(delta.spec.name)
            for slot, one in placed:
                effects[slot] += one.patch.effect
        return RankStaged(tuple(kept), tuple(deferred), reader, dict(effects))

    def keep(self, tickets: Iterable[int]) -> None:
        """Forget everything staged under other tickets."""
        for ticket in self.staged.keys() - set(tickets):
            del self.staged[ticket]
        self._written.intersection_update(self.staged)

    def swap(self, ticket: int, version: Version, *, back: bool) -> float:
        """Write what was staged, or take it back: all or nothing. The seconds of writing.

        What is written already, or was taken back already, is left alone: after a failure all ranks
        are told to take it back, and those that failed have.

        Args:
            ticket: Of what was staged.
            version: What is being written, for errors.
            back: Whether to take it back.

        Raises:
            PartialApplyError: It failed, and the old bits are back.
            PoisonedError: It failed, and so did putting the old bits back.
        """
        staged = self.staged.get(ticket)
        if staged is None:
            raise PartialApplyError(f"nothing is staged under ticket {ticket}", version=version)
        self.check_addresses()
        if (ticket in self._written) != back:
            return 0.0
        with settled():
            return self._swap(staged, ticket, version, back=back)

    def _swap(self, staged: RankStaged, ticket: int, version: Version, *, back: bool) -> float:
        start = time.perf_counter()
        written = write_all(self._undoes(staged) if back else self._writes(staged), version)
        on_host = staged.names & self._copies.keys()
        try:
            self._load(on_host)
            self._read_back(on_host)
        except Exception as exc:
            take_back(written, version, exc)
            self._load_old(on_host, version)
            raise PartialApplyError(
                f"the engine could not load version {version}; the old bits are back: {exc}",
                version=version,
            ) from exc
        self._tables.forget()
        (self._written.remove if back else self._written.add)(ticket)
        settle()  # it has been written when the time is taken
        return time.perf_counter() - start

    def _prepare(self, delta: TensorDelta) -> Iterator[tuple[HolderKey, Write]]:
        """What a delta writes at every place of this rank, and who else holds it."""
        name = delta.spec.name
        if self._classes[name] == "refused":
            raise TensorMismatchError(f"{name!r} cannot be written in this engine", tensor=name)
        if name in self._copies:
            copy = WholeTensor(self._copies[name])
            yield (self._holders[name][0], 0), Write(prepare(copy, delta), [copy])
            return
        for place, slot in self._places(name):
            yield slot, Write(prepare(place, delta), [place])

    def _places(self, name: str) -> Iterator[tuple[Placement, HolderKey]]:
        if self._classes[name] != "in_place":
            return
        seen: Counter[Window] = Counter()
        places = self._attached.places.get(name, ())
        for place, label in zip(places, self._holders[name], strict=True):
            yield place, (label, seen[place.window])
            seen[place.window] += 1

    def _writes(self, staged: RankStaged) -> Iterator[Write]:
        """Every patch, the deferred ones made as they are asked for."""
        yield from staged.placed
        for name in staged.deferred:
            for _, placed in self._prepare(staged.spool.read(name)):
                yield replace(placed, patch=replace(placed.patch, old=None))

    def _undoes(self, staged: RankStaged) -> Iterator[Write]:
        for placed in reversed(staged.placed):
            yield replace(placed, patch=placed.patch.undo())

    def _load(self, names: set[str]) -> None:
        """Let the engine load host copies that changed, with the groups that they belong to."""
        changed = [(way, g) for way, g in self._attached.groups if not names.isdisjoint(g.names)]
        for way in dict.fromkeys(way for way, _ in changed):
            groups = [group for mine, group in changed if mine == way]
            layers = frozenset().union(*(group.layers for group in groups))
            if not all(group.layers for group in groups):
                layers = frozenset()
            wanted = [name for group in groups for name in group.names if name in self._copies]
            load_with(self.model, way, layers, self._clones(wanted))

    def _read_back(self, names: set[str]) -> None:
        """Prove that the engine has put what it loaded where it can be read.

        Raises:
            TensorMismatchError: A live tensor holds other bits than were loaded.
        """
        for name in names & self._attached.readable.keys():
            for place in self._attached.readable[name]:
                if not same_bits(place.view, place.take(self._copies[name])):
                    raise TensorMismatchError(f"{name!r} is not what was loaded", tensor=name)

    def loads_the_same(self) -> bool:
        """Load every host copy again; whether the engine held and computed just that before.

        Blocks the engine. Afterwards it does, whoever wrote to it.
        """
        with settled():
            layers = self._attached.layers
            state = ModelState(self.model, SavedBits(self.model.tensors()), layers)
            self._load(set(self._copies))
            try:
                state.expect_same()
            except TensorMismatchError:
                return False
        return True

    def _load_old(self, names: set[str], version: Version) -> None:
        try:
            self._load(names)
        except Exception as exc:
            raise PoisonedError(
                f"the engine could load neither version {version} nor the old bits: {exc}",
                version=version,
            ) from exc

    def _clones(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            for here in self._source.names[name]:
                yield here, tensor_of(self._specs[name], self._copies[name])

    def _addresses(self, known: Mapping[str, int]) -> dict[str, int]:
        """Where the engine has what is written in place, by its own names, or by those known."""
        ours = {
            place.live.untyped_storage().data_ptr()
            for places in self._attached.places.values()
            for place in places
        }
        found = {n: t.untyped_storage().data_ptr() for n, t in self.model.tensors().items()}
        watched = known or {n: at for n, at in found.items() if at in ours}
        return {name: found.get(name, 0) for name in watched}

    def check_addresses(self) -> None:
        """Find out that the engine replaced tensors; then find the ways in again.

        Neither goes while the engine runs or loads: in its own thread only.

        Raises:
            BaseMismatchError: It did, and what they hold is not known.
        """
        if self._addresses(self._identity) == self._identity:
            return
        with settled():
            found = rediscover(self.model, self._source, self._attached)
        with self._changing:
            self._attached = found
            self._identity = self._addresses(self._identity)
            self.staged.clear()
            self._written.clear()
        raise BaseMismatchError(REPLACED)
