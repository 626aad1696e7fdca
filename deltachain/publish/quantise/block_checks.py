"""Checks of the blocks of a matrix: its weights and scales are finite; what becomes 0 is named."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from deltachain.errors import ConfigError
from deltachain.publish.quantise.recipe import Recipe

logger = logging.getLogger(__name__)

LEAVE: Final = "leave its layer out of the quantisation: quantization=Quantization(..., ignore=...)"
"""Hint for a weight that cannot be quantised."""


class _Given(NamedTuple):
    name: str
    amax: Tensor
    scales: Tensor


@dataclass(slots=True)
class BlockChecks:
    """Checks of the blocks of matrices.

    Attributes:
        recipe: How they are quantised.
    """

    recipe: Recipe
    _warned: set[str] = field(default_factory=set)
    _later: list[_Given] = field(default_factory=list)

    def check_values(self, name: str, amax: Tensor) -> None:
        """Check the values of a matrix.

        Raises:
            ConfigError: A weight is not finite.
        """
        if not bool(torch.isfinite(amax).all()):
            raise ConfigError(
                f"{name!r} has values that are not finite, and cannot be quantised",
                hint="the training diverged, or the weight overflows its dtype; nothing was "
                "published",
            )

    def check(self, name: str, amax: Tensor, scales: Tensor) -> None:
        """Check a matrix, and warn, once, of weights that the library makes 0 with their block.

        Args:
            name: Name of the matrix.
            amax: Largest magnitude of each block.
            scales: Their scales, as what codes are multiplied by.

        Raises:
            ConfigError: A weight is not finite, or a scale is no positive finite number.
        """
        self.check_values(name, amax)
        values = scales.float()
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise ConfigError(
                f"{name!r}: a scale is not a positive finite number: its weights are too small or "
                "too large",
                hint=LEAVE,
            )
        zeros = self._zeros(amax, scales)
        if name not in self._warned and (count := int(zeros.sum())):
            self._warned.add(name)
            logger.warning(
                "%r: weights of at most %.1e are published as 0 in %d of %d blocks: %s has no "
                "scale as small, and gives them codes of 0",
                name,
                float(amax[zeros].max()),
                count,
                zeros.numel(),
                self.recipe.library,
            )

    def check_later(self, name: str, amax: Tensor, scales: Tensor) -> None:
        """Check a matrix by the next ``settle``: a device is not waited for."""
        self._later.append(_Given(name, amax, scales))

    def settle(self) -> None:
        """Check what was to be checked later, with one wait for a device.

        Raises:
            ConfigError: As ``check``, of the first matrix that is refused.
        """
        given, self._later = self._later, []
        odd = [self._is_odd(one.amax, one.scales) for one in given]
        by_device: dict[torch.device, list[Tensor]] = {}
        for one in odd:
            by_device.setdefault(one.device, []).append(one)
        if any(bool(torch.stack(some).any()) for some in by_device.values()):
            for matrix in given:
                self.check(*matrix)

    def forget(self) -> None:
        """Forget what was to be checked later, of an iteration that did not end."""
        self._later.clear()

    def _is_odd(self, amax: Tensor, scales: Tensor) -> Tensor:
        """Return whether there is anything to refuse or to warn of, where the blocks are."""
        values = scales.float()
        fine = torch.isfinite(amax) & torch.isfinite(values) & (values > 0)
        return ~(fine & ~self._zeros(amax, scales)).all()

    def _zeros(self, amax: Tensor, scales: Tensor) -> Tensor:
        return (amax > 0) & (amax.double() <= scales.double() * (self.recipe.smallest / 2))
