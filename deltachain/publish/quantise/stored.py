"""Tensors of a quantised checkpoint: where each follows from a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deltachain.publish.model.layout import Box
from deltachain.publish.quantise.grid import Grid
from deltachain.types import TensorSpec

_WEIGHT: Final = "weight"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint that a weight becomes, in part.

    Each of its elements is of one block of the weight: a code of one element, a byte of two codes
    side by side, a scale of all elements that share it.

    Attributes:
        suffix: Its name in the layer; ``weight`` if it has that of the weight.
        dtype: Its wire dtype; that of the weight if empty.
        block: Rows and columns of the weight that an element is of; 0 for all.
        is_single: Whether it has the shape ``(1,)``, and not that of its grid.
    """

    suffix: str
    dtype: str = ""
    block: tuple[int, int] = (1, 1)
    is_single: bool = False

    def name(self, weight: str) -> str:
        """Return its name in the checkpoint, beside a weight called ``LAYER.weight``."""
        if self.suffix == _WEIGHT:
            return weight
        return f"{weight.removesuffix(_WEIGHT)}{self.suffix}"

    def grid(self, weight: TensorSpec) -> Grid:
        """Return the blocks of a weight, one for each of its elements."""
        rows, columns = weight.shape
        return Grid((rows, columns), self.block)

    def spec(self, weight: TensorSpec) -> TensorSpec:
        """Return its name, wire dtype and shape."""
        shape = (1,) if self.is_single else self.grid(weight).shape
        return TensorSpec(self.name(weight.name), self.dtype or weight.dtype, shape)

    def box(self, weight: TensorSpec, window: Box) -> Box:
        """Return the elements that are published by a rank with a window of the weight.

        They are of the blocks whose first element is in the window: windows that tile the weight
        publish every element once.
        """
        owned = self.grid(weight).owned(window)
        if not self.is_single:
            return owned
        return Box((1,), (0,), (min(1, owned.numel),))
