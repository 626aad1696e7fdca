"""Which way leads each checkpoint tensor into one rank's live weights, found out and proven.

Nothing is believed of an engine. What its loader does is recorded; what it did is read back and
compared with the checkpoint, bit for bit; what it computes from is tried. A tensor is written in
place only if all of that agrees. Otherwise its way is the engine's own loading, if doing it again
changes no bit, and if not, it is refused by name.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.errors import TensorMismatchError
from deltachain.names import TORCH_DTYPES, WIRE_NAMES
from deltachain.subscribe.classes import Classified, TensorClass
from deltachain.subscribe.engine import EngineModel
from deltachain.subscribe.patch import LiveBits, same_bits, varied
from deltachain.subscribe.recorder import Recording, record
from deltachain.subscribe.trial import try_load, try_reload
from deltachain.subscribe.windows import Place, on_device_of
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attached:
    """The ways into one rank.

    Attributes:
        classes: Of every tensor of the chain.
        reasons: Of those that are not in place.
        places: Of those that are, aliases included.
        layers: Those that the others are loaded into.
    """

    classes: Mapping[str, TensorClass]
    reasons: Mapping[str, str]
    places: Mapping[str, tuple[Place, ...]]
    layers: frozenset[str]

    def report(self) -> dict[str, Classified]:
        """What the leader is told."""
        return {
            name: Classified(
                kind=kind,
                reason=self.reasons.get(name, ""),
                windows=tuple(
                    (p.window.offset, p.window.size, p.window.stride)
                    for p in self.places.get(name, ())
                ),
            )
            for name, kind in self.classes.items()
        }


def attach(model: EngineModel, source: Source) -> Attached:
    """Find a way for every tensor of a chain into a rank that holds the checkpoint it loaded.

    Args:
        model: Not in use meanwhile. Its bits are the same afterwards.
        source: The checkpoint that it loaded.

    Raises:
        TensorMismatchError: The engine keeps weights that no tensor is the source of.
    """
    recording = record(model.load, source.loaded.values(), model.tensors)
    finding = _Finding(model, source, recording)
    finding.read_back()
    finding.look_behind()
    finding.refuse_alike()
    finding.try_loading()
    finding.try_reloading()
    attached = finding.result()
    _check_coverage(model, attached, finding.layers)
    return attached


def attach_again(model: EngineModel, source: Source, before: Attached) -> Attached:
    """Find places again in an engine that replaced its tensors, whatever they hold now.

    Raises:
        TensorMismatchError: It also changed how it lays them out.
    """
    recording = record(model.load, source.loaded.values(), model.tensors)
    places: dict[str, list[Place]] = {name: [] for name in before.places}
    for here, found in recording.places.items():
        if source.owner[here] in places:
            places[source.owner[here]] += found
    after = replace(before, places={n: tuple(_distinct(p)) for n, p in places.items()})
    if after.report() != before.report():
        raise TensorMismatchError(
            "the engine laid its weights out anew", hint="restart the engine to follow on"
        )
    return after


class Source:
    """The checkpoint that the engine loaded, by the names of the chain.

    Args:
        checkpoint: Its files.
        specs: The chain's tensors.
        aliases: Other names of tied ones; those in the checkpoint are loaded as well.

    Raises:
        TensorMismatchError: A tensor is not there, or has another dtype or shape.
    """

    def __init__(
        self, checkpoint: Checkpoint, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]
    ) -> None:
        self.checkpoint = checkpoint
        self.specs = specs
        self.owner = {**{name: name for name in specs}, **aliases}
        self.names = {
            name: [n for n, of in self.owner.items() if of == name and n in checkpoint.specs]
            for name in specs
        }
        self.loaded: dict[str, TensorSpec] = {}
        for name, spec in specs.items():
            if not self.names[name]:
                raise TensorMismatchError(
                    f"{checkpoint.path} has no {name!r}: the engine loaded another model",
                    tensor=name,
                )
            for here in self.names[name]:
                have = checkpoint.specs[here]
                if (have.dtype, have.shape) != (spec.dtype, spec.shape):
                    raise TensorMismatchError(
                        f"{here!r} is {have.dtype}{have.shape} in {checkpoint.path}, "
                        f"{spec.dtype}{spec.shape} in the chain",
                        tensor=name,
                    )
                self.loaded[here] = have

    def bits(self, name: str) -> LiveBits:
        """Flat bits of a tensor of the chain, as the checkpoint has it."""
        return self.checkpoint.bits(self.names[name][0])

    def copy(self, name: str) -> npt.NDArray[Any]:
        """Flat bits of a tensor, for keeping and changing."""
        return self.checkpoint.bits(self.names[name][0]).copy()

    def clones(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors for a loader, under every name the checkpoint has; made as asked for."""
        for name in names:
            for here in self.names[name]:
                yield here, tensor_of(self.specs[name], self.bits(name))


def tensor_of(spec: TensorSpec, bits: LiveBits) -> Tensor:
    """A tensor of its own with these bits: loaders edit what they are given."""
    copied = bits.clone() if isinstance(bits, Tensor) else torch.from_numpy(bits.copy())
    return copied.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


class _Finding:
    """What is known so far of every tensor, and what is tried to learn more."""

    def __init__(self, model: EngineModel, source: Source, recording: Recording) -> None:
        self.model = model
        self.source = source
        self.places: dict[str, list[Place]] = {name: [] for name in source.specs}
        self.reasons: dict[str, str] = {}
        self.broken: set[str] = set()
        self.shared: set[str] = set()
        self.classes: dict[str, TensorClass] = {}
        self.alike: set[str] = set()
        self.layers: Mapping[str, frozenset[str]] = {}
        for here, places in recording.places.items():
            self.places[source.owner[here]] += places
        for here, reason in recording.reasons.items():
            self.reasons.setdefault(source.owner[here], reason)
        self.broken.update(source.owner[here] for here in recording.raised)

    def read_back(self) -> None:
        """Compare live bits with the checkpoint's: a post-processed parameter can not be written.

        A place that a tied name has as well is written once.
        """
        sharing: dict[int, list[tuple[str, Place]]] = defaultdict(list)
        for name, spec in self.source.specs.items():
            self.places[name] = _distinct(self.places[name])
            for place in self.places[name]:
                dtype = WIRE_NAMES.get(place.live.dtype)
                if dtype != spec.dtype:
                    self.reasons.setdefault(name, f"the engine serves it as {dtype}")
                elif not same_bits(
                    place.view, on_device_of(place.live, place.cut(self.source.bits(name)))
                ):
                    self._break(name, "the engine changed its bits after loading")
                sharing[place.live.untyped_storage().data_ptr()].append((name, place))
        for shared in sharing.values():
            self._refuse_shared(shared)

    def _refuse_shared(self, shared: list[tuple[str, Place]]) -> None:
        """Two tensors at one place would overwrite one another."""
        if len(shared) == 1:
            return
        live = shared[0][1].live
        taken = torch.zeros(
            live.untyped_storage().nbytes() // live.element_size(), dtype=torch.bool
        )
        for name, place in shared:
            mine = taken.as_strided(place.live.shape, place.live.stride(), place.at)
            if bool(mine.any()):
                self.shared.add(name)
                self._break(name, "it shares live elements with another tensor")
            mine.fill_(True)

    def look_behind(self) -> None:
        """Find layers that compute from a hidden copy, and what is loaded into which layer."""
        packed = self.model.packed()
        if not packed and not self.reasons:
            return
        self.layers = self._layers()
        for name, layers in self.layers.items():
            behind = sorted(layers & packed.keys())
            if behind:
                self._break(name, packed[behind[0]])

    def refuse_alike(self) -> None:
        """Refuse bits that are all alike where the engine may have rearranged them.

        They read back well however they lie, and loading them again leads back to them. Other bits
        in the same live storage show what became of it; so does a layer that multiplies by a
        pattern as it should.
        """
        sharing: dict[int, list[tuple[str, Place]]] = defaultdict(list)
        for name, places in self.places.items():
            for place in places if name not in self.reasons else ():
                sharing[place.live.untyped_storage().data_ptr()].append((name, place))
        processed = self.model.processed()
        broken = frozenset().union(*(self.layers.get(name, frozenset()) for name in self.broken))
        layers = {
            tensor.untyped_storage().data_ptr(): name.rpartition(".")[0]
            for name, tensor in self.model.tensors().items()
        }
        for at, shared in sharing.items():
            layer = layers.get(at, "")
            if layer not in processed or self._shows(shared):
                continue
            if layer in broken or self.model.is_plain(layer):
                continue  # what else is in it shows whether loading again is exact; or it computes
            for name, _ in shared:
                self.alike.add(name)
                self._break(name, "its bits are all alike, and show not where the engine puts each")
        if self.alike and not self.layers:
            self.layers = self._layers()

    def _shows(self, shared: list[tuple[str, Place]]) -> bool:
        return any(varied(place.cut(self.source.bits(name))) for name, place in shared)

    def _layers(self) -> dict[str, frozenset[str]]:
        meta = {
            here: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            for here, spec in self.source.loaded.items()
        }
        found: dict[str, frozenset[str]] = defaultdict(frozenset)
        for here, layers in self.model.layers(meta).items():
            found[self.source.owner[here]] |= layers
        return dict(found)

    def try_loading(self) -> None:
        """Let the engine's loader load what was computed or cast, as often as it changes."""
        doubtful = [name for name in self.reasons if name not in self.broken]
        for group in ([doubtful], [[name] for name in doubtful]):
            for names in group:
                left = [name for name in names if name not in self.classes]
                into = {
                    here: self.layers.get(name, frozenset())
                    for name in left
                    for here in self.source.names[name]
                }
                if left and not try_load(self.model, partial(self.source.clones, left), into):
                    self.classes.update(dict.fromkeys(left, "loaded"))
        self.broken.update(name for name in doubtful if name not in self.classes)

    def try_reloading(self) -> None:
        """Reload the layers of what is left, whole: all at once, and one by one if that fails."""
        groups = self._whole_layers()
        together = [name for name in self.source.specs if any(name in names for names in groups)]
        for names in [together] if together and not self._can_not_reload(together) else groups:
            why = "" if names is together else self._can_not_reload(names)
            for name in names:
                self.classes[name] = "refused" if why else "reloaded"
                reason = self.reasons.get(name, "its layer is packed")
                self.reasons[name] = f"{reason}; {why}" if why else reason

    def _can_not_reload(self, names: list[str]) -> str:
        """Why some whole layers can not be reloaded; empty if they can."""
        if not self.shared.isdisjoint(names):
            return "the one that is loaded last would win"
        if not self.alike.isdisjoint(names):
            return "nor would loading them again"
        layers = frozenset().union(*(self.layers.get(name, frozenset()) for name in names))
        weights = partial(self.source.clones, names)
        return try_reload(self.model, weights, _with_tied(self.model, layers))

    def _whole_layers(self) -> list[list[str]]:
        """Groups of tensors that must be reloaded together: everything that shares a layer."""
        left = [name for name in self.source.specs if name in self.broken]
        groups: list[tuple[set[str], set[str]]] = []
        for name in left:
            names, layers = {name}, set(self.layers.get(name, ()))
            grown = True
            while grown:
                more = {n for n, of in self.layers.items() if of & layers} - names
                names |= more
                layers.update(*(self.layers[n] for n in more))
                grown = bool(more)
            if not any(name in done for done, _ in groups):
                groups.append((names, layers))
        return [[n for n in self.source.specs if n in names] for names, _ in groups]

    def _break(self, name: str, reason: str) -> None:
        self.reasons.setdefault(name, reason)
        self.broken.add(name)

    def result(self) -> Attached:
        """Everything that was found."""
        for name in self.source.specs:
            if name not in self.classes:
                self.classes[name] = "in_place" if self.places[name] else "absent"
        kept = {n: tuple(p) for n, p in self.places.items() if self.classes[n] == "in_place"}
        reasons = {n: r for n, r in self.reasons.items() if self.classes[n] != "in_place"}
        on_host = {n for n, kind in self.classes.items() if kind in ("loaded", "reloaded")}
        layers = frozenset().union(*(self.layers.get(name, frozenset()) for name in on_host))
        return Attached(self.classes, reasons, kept, _with_tied(self.model, layers))


def _distinct(places: Iterable[Place]) -> list[Place]:
    """Places without those that tied names have in common."""
    found: dict[object, Place] = {}
    for place in places:
        at = (place.live.data_ptr(), place.offset, place.dims)
        found.setdefault(at, place)
    return list(found.values())


def _with_tied(model: EngineModel, layers: frozenset[str]) -> frozenset[str]:
    """Layers, and those that have a live tensor in common with one of them."""
    live = [
        (n.rpartition(".")[0], t.untyped_storage().data_ptr()) for n, t in model.tensors().items()
    ]
    shared = {at for layer, at in live if layer in layers}
    return layers | {layer for layer, at in live if at in shared}


def _check_coverage(
    model: EngineModel, attached: Attached, layers: Mapping[str, frozenset[str]]
) -> None:
    """Every live weight must come from some tensor, or be known to be the engine's own.

    Raises:
        TensorMismatchError: One does not: it would stay as it is for ever.
    """
    covered = {
        place.live.untyped_storage().data_ptr()
        for places in attached.places.values()
        for place in places
    }
    on_host = {n for n, kind in attached.classes.items() if kind not in ("in_place", "absent")}
    filled = frozenset().union(*(layers.get(name, frozenset()) for name in on_host))
    filled = _with_tied(model, filled)
    for name, tensor in model.tensors().items():
        layer, _, _ = name.rpartition(".")
        known = tensor.untyped_storage().data_ptr() in covered or layer in filled
        if known or not tensor.is_floating_point() or tensor.numel() <= 1:
            continue
        if not model.is_derived(name):
            raise TensorMismatchError(
                f"the engine's {name} comes from no tensor of the chain", tensor=name
            )
