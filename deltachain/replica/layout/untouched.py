"""Check that a trial changes no tensors that it does not load: they have other bits meanwhile.

A loader might overwrite tensors that it was not given with their first bits or a constant, which
would change nothing if these were stored already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deltachain.kernels.protocol import LiveBits, same_bits
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.load_methods import LoadGroup, LoadMethod, load_with
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.other_bits import mixed
from deltachain.replica.windows import Placement

TURN: Final = 1
"""Turn of the other bits: not the one that a trial loads, so that equal tensors differ."""


@dataclass(frozen=True, slots=True)
class Untouched:
    """Decided tensors that a trial does not load.

    Attributes:
        model: The rank's model; not in use meanwhile.
        source: The checkpoint that the engine loaded.
        placements: Placements of the tensors that are written in place.
        groups: Groups of the tensors that the engine loads, with the method.
    """

    model: EngineModel
    source: LoadedCheckpoint
    placements: Mapping[str, Sequence[Placement]]
    groups: Sequence[tuple[LoadMethod, LoadGroup]] = ()

    def write(self, *, other: bool) -> None:
        """Write or load other bits of all of them, or the first ones."""
        for name, places in self.placements.items():
            write_bits(places, self.source.other(name, TURN) if other else self.source.bits(name))
        for method, group in self.groups:
            changed = group.names if other else ()
            weights = mixed(self.source.clones, group.names, changed, TURN)
            load_with(self.model, method, group.layers, weights)

    def lost(self) -> frozenset[str]:
        """Return tensors written in place that no longer hold their other bits."""
        return frozenset(
            name
            for name, places in self.placements.items()
            if not holds_bits(places, self.source.other(name, TURN))
        )


def write_bits(places: Sequence[Placement], bits: LiveBits) -> None:
    """Write a whole tensor in place."""
    for place in places:
        new: Any = place.take(bits)
        place.view[...] = new


def holds_bits(places: Sequence[Placement], bits: LiveBits) -> bool:
    """Return whether a whole tensor is stored in its places, bit for bit."""
    return all(same_bits(place.view, place.take(bits)) for place in places)
