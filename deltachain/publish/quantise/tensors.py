"""Quantised tensors of a model: codes and scales of the live weights, made anew for every version.

No quantised copy is kept: each tensor is made, compared with the snapshot, and dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from deltachain.chain.identity import RECIPE
from deltachain.errors import ConfigError
from deltachain.publish.model.layout import Box, ElementMap, ElementRun
from deltachain.publish.model.source import ModelTensors, Weight, specs_of
from deltachain.publish.quantise import host_codes
from deltachain.publish.quantise.amax import (
    CutBlocks,
    Shared,
    cut_blocks,
    exchange,
    window_amax,
    with_shared,
)
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.quantise.recipe import Margins, Recipe
from deltachain.publish.quantise.stored import Stored
from deltachain.publish.ranks.channel import Ranks
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)

LEAVE: Final = "leave its layer out of the quantisation: quantization=Quantization(..., ignore=...)"
"""Hint for a weight that cannot be quantised."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """What a live weight holds of a matrix that is quantised.

    Attributes:
        spec: Spec of the matrix in the checkpoint, before it is quantised.
        window: Position of the elements in it.
        start: Flat index of the first element in the local part of the live weight.
        name: Name of the window among the tensors of this rank.
    """

    spec: TensorSpec
    window: Box
    start: int
    name: str

    def of(self, weight: Weight) -> Tensor:
        """Return the ``(rows, columns)`` of a live weight, in the dtype of the checkpoint."""
        local = weight.tensor.detach().view(-1)[self.start : self.start + self.window.numel]
        return local.view(self.window.shape).to(TORCH_DTYPES[self.spec.dtype])


@dataclass(slots=True)
class QuantisedTensors:
    """Codes and scales of a rank's weights, beside those that are published as they are.

    Attributes:
        live_weights: Function that yields the weights in the dtypes of the model.
        matrices: Quantised matrices, by name of the live weight.
        recipe: How they are quantised.
        ranks: All publishing ranks.
    """

    live_weights: Callable[[], Iterator[Weight]]
    matrices: Mapping[str, tuple[Matrix, ...]]
    recipe: Recipe
    ranks: Ranks
    _shared: Shared = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def agree(self, topic: str) -> None:
        """Agree with all ranks on the scales of blocks that several of them hold parts of.

        Must be called before each iteration over ``tensors``, with weights that do not change until
        its end.

        Args:
            topic: Unique name of the version among the ranks.

        Raises:
            RankError: Another rank failed, or did not answer in time.
        """
        self._shared = exchange(self.ranks, f"{topic}/amax", self._cut_blocks())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that this rank publishes.

        Raises:
            ConfigError: A weight or a scale is not finite.
        """
        for weight in self.live_weights():
            matrices = self.matrices.get(weight.spec.name)
            if matrices is None:
                yield weight.spec.name, weight.tensor
            for matrix in matrices or ():
                yield from self._quantised(matrix, matrix.of(weight))

    def _cut_blocks(self) -> Iterator[CutBlocks]:
        cut = {
            name: [m for m in found if self.recipe.grid(m.spec).cut(m.window).any()]
            for name, found in self.matrices.items()
        }
        if not any(cut.values()) and self.ranks.count == 1:
            return
        for weight in self.live_weights():
            for matrix in cut.get(weight.spec.name, ()):
                grid = self.recipe.grid(matrix.spec)
                amax = window_amax(matrix.of(weight), grid, matrix.window)
                yield cut_blocks(matrix.spec.name, grid, matrix.window, amax)

    def _quantised(self, matrix: Matrix, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        recipe, window = self.recipe, matrix.window
        grid = recipe.grid(matrix.spec)
        amax = window_amax(values, grid, window)
        if matrix.spec.name in self._shared:
            amax = with_shared(self._shared[matrix.spec.name], grid, window, amax)
        arithmetic = recipe.arithmetic
        scales = arithmetic.scales(amax)
        multipliers = arithmetic.multipliers(scales)
        _check_finite(matrix.spec.name, amax, multipliers)
        self._warn_of_zeros(matrix.spec.name, amax, multipliers)
        if arithmetic.rounding is not None and host_codes.can_make(values):
            codes = host_codes.make(values, grid, window, arithmetic.factors(amax, scales), recipe)
        else:
            codes = make_codes(recipe, values, grid, window, amax)
        yield _key(recipe.codes, matrix), codes
        owned = grid.owned(window)
        if owned.numel:
            row, column = (o - f for o, f in zip(owned.offset, grid.first(window), strict=True))
            mine = scales[row : row + owned.shape[0], column : column + owned.shape[1]]
            shape = recipe.scales.box(matrix.spec, window).shape
            yield _key(recipe.scales, matrix), mine.contiguous().view(shape)

    def _warn_of_zeros(self, name: str, amax: Tensor, multipliers: Tensor) -> None:
        """Warn, once a matrix, of weights that the library turns into zeros with their block."""
        zeros = (amax > 0) & (amax.double() <= multipliers.double() * (self.recipe.smallest / 2))
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


def make_codes(recipe: Recipe, values: Tensor, grid: Grid, window: Box, amax: Tensor) -> Tensor:
    """Make the codes of a window by the library.

    Args:
        recipe: How to quantise.
        values: The window, ``(rows, columns)``.
        grid: Blocks of the matrix.
        window: Position of the window.
        amax: Largest magnitude of each block of the window, of the whole block.
    """
    codes = torch.empty(values.shape, dtype=TORCH_DTYPES[recipe.codes.dtype], device=values.device)
    _, (left, right) = grid.margins(window)
    for band in grid.bands(window):
        margins = Margins(band.before, band.after, left, right)
        codes[band.rows] = recipe.arithmetic.codes(values[band.rows], amax[band.blocks], margins)
    return codes


def _check_finite(name: str, amax: Tensor, multipliers: Tensor) -> None:
    """Refuse weights with NaN or infinity, and scales that are not positive finite numbers."""
    if not bool(torch.isfinite(amax).all()):
        raise ConfigError(
            f"{name!r} has values that are not finite, and cannot be quantised",
            hint="the training diverged, or the weight overflows its dtype; nothing was published",
        )
    if not bool((torch.isfinite(multipliers) & (multipliers > 0)).all()):
        raise ConfigError(
            f"{name!r}: a scale is not a positive finite number: its weights are too small",
            hint=LEAVE,
        )


def _key(stored: Stored, matrix: Matrix) -> str:
    """Return the name of a tensor of a matrix among the tensors of this rank."""
    if ": " in matrix.name:
        return f"{matrix.name}: {stored.suffix}"
    return stored.name(matrix.name)


def quantise(
    source: ModelTensors, names: Collection[str], recipe: Recipe, ranks: Ranks
) -> ModelTensors:
    """Replace matrices of a model by their codes and scales.

    Args:
        source: The weights that this rank publishes.
        names: Matrices to quantise, by name in the checkpoint; of all ranks.
        recipe: How to quantise them.
        ranks: All publishing ranks, as seen by the thread that takes diffs.

    Returns:
        The tensors to publish. Their ``agree`` must be called before each iteration over them.

    Raises:
        ConfigError: A matrix cannot be quantised.
    """
    matrices = {
        weight.spec.name: found for weight in source.weights if (found := _matrices(weight, names))
    }
    specs = [quantised for spec in source.specs for quantised in _specs(spec, names, recipe)]
    made = QuantisedTensors(source.live_weights, matrices, recipe, ranks)
    weights = [weight for weight in source.weights if weight.spec.name not in matrices]
    for found in matrices.values():
        weights += [one for matrix in found for one in _weights(matrix, recipe)]
    aliases = dict(source.aliases)
    for alias, name in source.aliases.items():
        if name in names:
            del aliases[alias]
            aliases |= {one.name(alias): one.name(name) for one in recipe.tensors}
    return replace(
        source,
        weights=tuple(sorted(weights, key=lambda weight: weight.spec.name)),
        specs=specs_of(specs),
        aliases=aliases,
        live=made.tensors,
        agree=made.agree,
        ext={RECIPE: dict(recipe.record())},
    )


def _specs(spec: TensorSpec, names: Collection[str], recipe: Recipe) -> tuple[TensorSpec, ...]:
    if spec.name not in names:
        return (spec,)
    return recipe.specs(spec)


def _weights(matrix: Matrix, recipe: Recipe) -> Iterator[Weight]:
    """Return the tensors that a matrix becomes as weights of this rank, without data."""
    for stored in recipe.tensors:
        box = stored.box(matrix.spec, matrix.window)
        if box.numel:
            yield _weight(_key(stored, matrix), stored.spec(matrix.spec), box)


def _weight(name: str, spec: TensorSpec, box: Box) -> Weight:
    gone = torch.empty(box.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
    straight = ElementMap.straight(spec, box)
    return Weight(replace(spec, name=name), gone, frozen=False, element_map=straight)


def _matrices(weight: Weight, names: Collection[str]) -> tuple[Matrix, ...]:
    """Return the matrices of a live weight that are quantised: all or none."""
    runs = weight.element_map.slots
    chosen = [run.spec.name for run in runs if run.spec.name in names]
    if not chosen:
        return ()
    if len(chosen) < len(runs):
        other = next(run.spec.name for run in runs if run.spec.name not in names)
        raise ConfigError(
            f"{chosen[0]!r} is quantised, {other!r} is not, and the model has both as "
            f"{weight.spec.name!r}",
            hint="ignore both layers, or none of them",
        )
    if weight.element_map.table is not None:
        raise ConfigError(
            f"{chosen[0]!r} cannot be quantised: the model has it in another order, as part of "
            f"{weight.spec.name!r}",
            hint=LEAVE,
        )
    found = (_matrix(weight, run) for run in runs)
    return tuple(matrix for matrix in found if matrix.window.numel)


def _matrix(weight: Weight, run: ElementRun) -> Matrix:
    box, spec = weight.element_map.box, run.spec
    columns = spec.shape[-1]
    if (
        len(spec.shape) != 2
        or box.full[-1:] != (columns,)
        or any(at % columns for at in (run.start, run.at, run.numel))
    ):
        raise ConfigError(
            f"{spec.name!r} has shape {spec.shape} and cannot be quantised: it is no matrix of "
            f"whole rows of {weight.spec.name!r}, which has shape {box.full}",
            hint=LEAVE,
        )
    height = math.prod(box.full[-2:-1]) or 1
    above = run.start // columns % height  # rows of the live weight before the run
    if above + run.numel // columns > height:
        raise ConfigError(f"{spec.name!r} is spread over {weight.spec.name!r}", hint=LEAVE)
    low, high = box.before(run.start), box.before(run.start + run.numel)
    held = box.shape[-1]
    rows = (high - low) // held if held else 0
    first = max(above, box.offset[-2]) - above + run.at // columns
    window = Box(spec.shape, (first, box.offset[-1]), (rows, held))
    if not rows:
        window = Box(spec.shape, (0, 0), (0, 0))
    is_whole = len(weight.element_map.slots) == 1 and weight.spec.name == spec.name
    name = spec.name if is_whole else f"{weight.spec.name}: {spec.name}"
    return Matrix(spec, window, low, name)
