"""Find where an engine stores every checkpoint tensor, by a dry run of its own loader.

The engine's ``load_weights`` is given meta tensors under a dispatch mode that records each write
and executes none. The storage of a recorded copy identifies its source: a view of a meta tensor
keeps offset and strides, so every record gives the place of a window of a checkpoint tensor.
Nothing is guessed about tensors that a loader computes, copies, edits or loads in any other way:
they get no places, but a reason. The operations are tracked that compute from several tensors, so
tensors that a loader holds back until others arrive are known to belong together.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from deltachain.replica.layout.classes import join_sets
from deltachain.replica.placements import Placement
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec

from .module_members import (
    Members,
    MemoryIndex,
    Provenance,
    storage_id,
    tensors_among,
    tensors_in,
)

Load: TypeAlias = Callable[[Iterable[tuple[str, Tensor]]], object]
"""An engine's own loader of ``(checkpoint name, full tensor)`` pairs."""

PADDING: Final = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Writes of a constant, for vocabulary padding, which comes from no checkpoint tensor."""


@dataclass(frozen=True, slots=True)
class Recording:
    places: Mapping[str, tuple[Placement, ...]]  # places of each tensor that is stored bit by bit
    reasons: Mapping[str, str]  # reasons, in words, of the tensors that are not stored bit by bit
    raised: frozenset[str]  # tensors among these for which the loader raised
    together: tuple[frozenset[str], ...]  # sets of tensors from which a written value is computed

    def placements(self, owner: Mapping[str, str]) -> dict[str, tuple[Placement, ...]]:
        """Return the places of each tensor of the chain, which owns some names; each place once."""
        found: dict[str, dict[object, Placement]] = {name: {} for name in owner.values()}
        for here, places in self.places.items():
            for place in places:
                key = place.live.data_ptr(), place.offset, place.dims
                found[owner[here]].setdefault(key, place)
        return {name: tuple(places.values()) for name, places in found.items()}


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in model.named_modules()
        for name, tensor in tensors_in(module)
        if not tensor.is_meta and not is_lazy(tensor) and tensor.numel()
    }


def record(load: Load, specs: Iterable[TensorSpec], modules: Mapping[str, nn.Module]) -> Recording:
    """Do a dry run of a loader, and record where it stores each tensor; write no live byte."""
    wanted = {spec.name: spec for spec in specs}
    storages = {
        storage_id(tensor)
        for module in modules.values()
        for _, tensor in tensors_in(module)
        if not is_lazy(tensor)
    }
    members = Members(modules.values())
    runs = [_Run(wanted.values(), storages).execute(load, members)]
    together = tuple(join_sets(runs[0].together))
    if runs[0].unattributed:
        held = frozenset().union(*together)
        alone = [spec for spec in wanted.values() if spec.name not in held]
        runs[0].keep(held)
        runs += _run_apart(alone, lambda specs: _Run(specs, storages).execute(load, members))
    places: dict[str, list[Placement]] = {name: [] for name in wanted}
    reasons: dict[str, str] = {}
    raised: set[str] = set()
    for run in runs:
        reasons.update(run.reasons)
        raised |= run.raised
        for name, place in run.found:
            places[name].append(place)
    kept = {name: tuple(mine) for name, mine in places.items() if name not in reasons}
    return Recording(kept, reasons, frozenset(raised), together)


def _run_apart(specs: Iterable[TensorSpec], run: Callable[..., "_Run"]) -> list["_Run"]:
    """Run the loader for two tensors of each kind alone, and for the others together.

    Tensors are of one kind if only numbers in their names differ. If the loader raises for both,
    the others are taken to be alike: a reload of their layers has to be proven anyway. If others
    cannot be told apart, each of them is loaded alone.
    """
    kinds: dict[object, list[TensorSpec]] = {}
    for spec in specs:
        key = re.sub(r"\d+", "0", spec.name), spec.dtype, spec.shape
        kinds.setdefault(key, []).append(spec)
    runs, left = [], list[TensorSpec]()
    for first, *others in kinds.values():
        two = [run([one]) for one in (first, *others[-1:])]
        runs += two
        if all(one.raised for one in two):
            names = [one.name for one in others[:-1]]
            two[0].reasons.update(dict.fromkeys(names, two[0].reasons[first.name]))
            two[0].raised.update(names)
        else:
            left += others[:-1]
    rest = [run(left)] if left else []
    return [*runs, *([run([one]) for one in left] if rest and rest[0].unattributed else rest)]


class _Run(TorchDispatchMode):
    """One call of the loader: its copies with their places, and its other attempted writes."""

    def __init__(self, specs: Iterable[TensorSpec], live: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meta = {
            s.name: torch.empty(s.shape, dtype=TORCH_DTYPES[s.dtype], device="meta") for s in specs
        }
        self.provenance = Provenance(self.meta)
        self.together: set[frozenset[str]] = set()
        self.live = live
        self.found: list[tuple[str, Placement]] = []
        self.reasons: dict[str, str] = {}
        self.raised: set[str] = set()
        self.fills: list[Tensor] = []
        self.unattributed = ""

    def execute(self, load: Load, members: Members) -> "_Run":
        """Call the loader; afterwards the modules have the recorded members."""
        try:
            with torch.no_grad(), self:
                load(list(self.meta.items()))
        except Exception as exc:  # noqa: BLE001 - any error of a loader is a result
            self._fail(None, f"the loader raised {type(exc).__name__}: {exc}"[:200])
            self.raised.update(self.reasons if len(self.meta) == 1 else ())
        finally:
            members.put_back()
        filled = MemoryIndex(("", fill) for fill in self.fills)
        for name, place in self.found:
            if filled.overlapping(place.live):
                self._fail(name, "its place is also filled with a constant")
        return self

    def keep(self, names: frozenset[str]) -> None:
        self.found = [(name, place) for name, place in self.found if name in names]
        self.reasons = {name: why for name, why in self.reasons.items() if name in names}

    def _fail(self, name: str | None, why: str) -> None:
        if name is None and len(self.meta) == 1:
            name = next(iter(self.meta))
        if name is None:
            self.unattributed = self.unattributed or why
        else:
            self.reasons.setdefault(name, why)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's signature
        """Record a copy into a live tensor, refuse every other write, execute everything else."""
        del types
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self._copied(args[0], args[1])
            return args[0]
        sources = self.provenance.sources((args, kwargs))
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            if self._blocks(func, written, sources):
                return written[0] if func._schema.returns else None
            self.provenance.made(written, sources)
        returned = func(*args, **kwargs)
        self.provenance.made(returned, sources)
        return returned

    def _copied(self, live: Tensor, source: Tensor) -> None:
        name, sources = self.provenance.owner(source), self.provenance.sources(source)
        if storage_id(live) not in self.live:
            self.provenance.made(live, sources)
            for one in sources:
                self._fail(one, "the loader stages it in a temporary")
        elif name is None:
            self._computed(sources, "the loader copies or computes before it writes")
        elif live.shape != source.shape:
            self._fail(name, "the loader broadcasts it")
        else:
            try:
                self.found.append(
                    (name, Placement(live, int(source.storage_offset()), source.stride()))
                )
            except ValueError as exc:
                self._fail(name, str(exc))

    def _computed(self, sources: frozenset[str], why: str) -> None:
        if not sources:
            self._fail(None, why)
        for name in sources:
            self._fail(name, why)
        if len(sources) > 1:
            self.together.add(sources)

    def _blocks(self, func: Any, written: list[Tensor], sources: frozenset[str]) -> bool:  # noqa: ANN401
        """Return whether a write goes to a live tensor, and so must not be executed."""
        for tensor in written:
            name = self.provenance.owner(tensor) if tensor.is_meta else None
            if name is not None:
                self._fail(name, f"the loader edits its input: {func}")
        hit = [t for t in written if not t.is_meta and storage_id(t) in self.live]
        if func in PADDING:
            self.fills += [t for t in hit if t.numel()]
        elif any(t.numel() for t in hit):
            self._computed(sources, f"the loader writes by {func}")
        return bool(hit)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:  # noqa: ANN401
    """Return the tensors that an operation writes to, by its schema."""
    schema = func._schema.arguments
    bound = [*zip(schema, args, strict=False)]
    bound += [(arg, kwargs[arg.name]) for arg in schema if arg.name in kwargs]
    return [
        tensor
        for arg, value in bound
        if arg.alias_info is not None and arg.alias_info.is_write
        for tensor in tensors_among(value)
    ]
