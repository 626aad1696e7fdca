"""Pending codes of a window of a matrix: quantised while they are compared with the snapshot.

No copy of the weights is cast, and no copy of their codes is made. Largest magnitudes of what a
device compares are checked afterwards, and the diff is taken back if they are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from deltachain.kernels.factors import Factors, Quantising, codes_by_factors
from deltachain.kernels.lane import Compared
from deltachain.kernels.proven import fused_is_proven
from deltachain.kernels.reference import Changes
from deltachain.publish.model.layout import Box
from deltachain.publish.quantise import host_codes
from deltachain.publish.quantise.amax import Blocks, window_amax, with_shared
from deltachain.publish.quantise.block_scales import block_scales
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.quantise.recipe import Recipe
from deltachain.publish.snapshot_memory import Kept
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Bits

PIECE: Final = 1 << 22
"""Codes made at a time in torch operations: bounds what these allocate."""


def can_wait(where: torch.device) -> bool:
    """Return whether kernels quantise weights there while they compare them."""
    return fused_is_proven(where) if where.type == "cuda" else host_codes.can_make(where)


@dataclass(slots=True)
class PendingCodes:
    """Codes of a window that nobody has made yet: a ``Pending``.

    Attributes:
        values: The window, ``(rows, columns)``, in bf16, or in fp32 if it is published as bf16.
        grid: Blocks of the matrix.
        window: Position of the window.
        recipe: How to quantise.
        shared: Blocks that the window has a part of, on any rank; none if no block is cut.
        accept: Function that checks the largest magnitudes and scales of the window's blocks.
        is_accepted: Whether they were checked.
    """

    values: Tensor
    grid: Grid
    window: Box
    recipe: Recipe
    shared: Blocks | None
    accept: Callable[[Tensor, Tensor], None]
    is_accepted: bool = False
    _amax: Tensor | None = field(default=None, repr=False)
    _scales: Tensor | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.values.device

    def to(self, device: torch.device) -> PendingCodes:
        """Return the codes of a copy of the weights on a device."""
        return replace(self, values=self.values.to(device), _amax=None, _scales=None)

    def window_amax(self) -> Tensor:
        """Return the largest magnitude of each block, of its weights in the window, in bf16."""
        if host_codes.can_make(self.device):
            return host_codes.amax(self.values, self.grid, self.window)
        return window_amax(self.values, self.grid, self.window).to(torch.bfloat16)

    def amax(self) -> Tensor:
        """Return the largest magnitude of each block, of all its weights, in bf16."""
        if self._amax is None:
            self._amax = self._with_shared(self.window_amax())
        return self._amax

    def scales(self) -> Tensor:
        """Return the scale of each block; 0 or NaN where there is none."""
        if self._scales is None:
            self._scales = block_scales(self.recipe, self.device).scales_of(self.amax())
        return self._scales

    def make(self) -> Tensor:
        """Make the codes, ``(rows, columns)``.

        Raises:
            ConfigError: A weight is not finite, or a scale is no positive finite number.
        """
        self._accept()
        if host_codes.can_make(self.device):
            table = block_scales(self.recipe, self.device).factors_of(self.amax())
            return host_codes.make(self.values, self.grid, self.window, table, self.recipe)
        flat, factors = self.values.view(-1), self._factors()
        codes = torch.empty(flat.numel(), dtype=torch.uint8, device=self.device)
        for start in range(0, flat.numel(), PIECE):
            piece = slice(start, start + PIECE)
            codes[piece] = codes_by_factors(flat[piece], factors, start)
        return codes.view(TORCH_DTYPES[self.recipe.codes.dtype]).view(self.values.shape)

    def diff_(self, snapshot: Bits) -> Changes:
        """Find the codes that differ from a snapshot on the host, and copy them there.

        Args:
            snapshot: Flat bits of the window's codes.

        Raises:
            ConfigError: As ``make``; the snapshot is as it was.
        """
        nothing = torch.zeros(self.grid.counts(self.window), dtype=torch.bfloat16)
        changes, self._amax = host_codes.diff_(
            snapshot,
            self.values,
            self.grid,
            self.window,
            self._with_shared(nothing),
            self.recipe,
        )
        self._accept()
        return changes

    def compared(self, name: str, kept: Kept) -> Compared:
        """Return the weights for the diff on a device, with their factors; nothing is checked."""
        dtype = TORCH_DTYPES[self.recipe.codes.dtype]
        flat = self.values.view(-1)
        return Compared(name, kept.slab, kept.at, flat, dtype, kept.resident, self._factors())

    def _factors(self) -> Factors:
        (above, _), (left, _) = self.grid.margins(self.window)
        how = Quantising(self.recipe.rounding, self.grid.given)
        factors = block_scales(self.recipe, self.device).factors_of(self.amax())
        return Factors(factors, self.window.shape[1], (above, left), how)

    def _accept(self) -> None:
        if not self.is_accepted:
            self.accept(self.amax(), self.scales())
            self.is_accepted = True

    def _with_shared(self, amax: Tensor) -> Tensor:
        if self.shared is None:
            return amax
        return with_shared(self.shared, self.grid, self.window, amax)
