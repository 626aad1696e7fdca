"""Pending tensors: made of live weights while they are compared, so that none is copied."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deltachain.kernels.lane import Compared
from deltachain.kernels.reference import Changes
from deltachain.publish.snapshot_memory import Kept
from deltachain.types import Bits


class Pending(Protocol):
    """A tensor of the checkpoint that is yet to be made, of weights that are at hand.

    Must be used before the next tensor of the same source, which may use its memory again.
    """

    @property
    def device(self) -> torch.device:
        """Device of these weights."""

    def to(self, device: torch.device) -> Pending:
        """Return it with a copy of these weights on a device."""

    def make(self) -> Tensor:
        """Make the tensor, in new memory on its device.

        Raises:
            ConfigError: It cannot be made: a weight is not finite, for example.
        """

    def diff_(self, snapshot: Bits) -> Changes:
        """Find its elements that differ from a snapshot, and copy them there; host only.

        Args:
            snapshot: Flat bits.

        Raises:
            ConfigError: It cannot be made; the snapshot is as it was.
        """

    def compared(self, name: str, kept: Kept) -> Compared:
        """Return it as a tensor for the diff on a device.

        Whether it can be made may be known only after that diff, which is then taken back.
        """
