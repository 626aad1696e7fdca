"""What a trial does not load: it holds other bits meanwhile, and must keep them.

A loader that writes the first bits, or a constant, over what it was not given changes nothing where
that is what lies there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deltachain.kernels.protocol import LiveBits, same_bits
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.other_bits import mixed
from deltachain.replica.layout.source import LoadedCheckpoint
from deltachain.replica.layout.ways import Group, Way, bring
from deltachain.replica.windows import Placement

TURN: Final = 1
"""Of its other bits: tensors that were alike have others in a trial."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Tensors whose way is known, beside those that a trial loads.

    Attributes:
        model: Not in use meanwhile.
        source: The checkpoint that it loaded.
        places: Where those live that are written in place.
        groups: Those that the engine loads, with their way.
    """

    model: EngineModel
    source: LoadedCheckpoint
    places: Mapping[str, Sequence[Placement]]
    groups: Sequence[tuple[Way, Group]] = ()

    def write(self, *, other: bool) -> None:
        """Bring other bits of all of it, or the first ones."""
        for name, places in self.places.items():
            write(places, self.source.other(name, TURN) if other else self.source.bits(name))
        for way, group in self.groups:
            changed = group.names if other else ()
            weights = mixed(self.source.clones, group.names, changed, TURN)
            bring(self.model, way, group.layers, weights)

    def lost(self) -> frozenset[str]:
        """Tensors that are written in place and do not hold their other bits any more."""
        return frozenset(
            name
            for name, places in self.places.items()
            if not lies(places, self.source.other(name, TURN))
        )


def write(places: Sequence[Placement], bits: LiveBits) -> None:
    """Write a whole tensor in place."""
    for place in places:
        new: Any = place.take(bits)
        place.view[...] = new


def lies(places: Sequence[Placement], bits: LiveBits) -> bool:
    """Whether a whole tensor lies in its places, bit for bit."""
    return all(same_bits(place.view, place.take(bits)) for place in places)
