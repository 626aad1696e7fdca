"""Matrices that are quantised: what live weights hold of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from deltachain.errors import ConfigError
from deltachain.publish.model.layout import Box, ElementRun
from deltachain.publish.model.source import Weight
from deltachain.publish.quantise.block_checks import LEAVE
from deltachain.publish.quantise.recipe import Recipe
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec


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

    def live(self, weight: Weight) -> Tensor:
        """Return the ``(rows, columns)`` of a live weight; shares its memory."""
        local = weight.tensor.detach().view(-1)[self.start : self.start + self.window.numel]
        return local.view(self.window.shape)

    def of(self, weight: Weight) -> Tensor:
        """Return them in the dtype of the checkpoint."""
        return self.live(weight).to(TORCH_DTYPES[self.spec.dtype])


def check_whole(weight: TensorSpec, recipe: Recipe) -> None:
    """Refuse a matrix that ends within a block, if the library does.

    Raises:
        ConfigError: It does.
    """
    columns, width = weight.shape[1], recipe.block[1]
    if recipe.whole_blocks and columns % width:
        raise ConfigError(
            f"{weight.name!r} has {columns} columns, and {recipe.name} quantises {width} at a "
            "time, without a rest",
            hint=LEAVE,
        )


def matrices(weight: Weight, names: Collection[str], recipe: Recipe) -> tuple[Matrix, ...]:
    """Return the matrices of a live weight that are quantised: all or none.

    Raises:
        ConfigError: Not all are, or one cannot be quantised as this rank holds it.
    """
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
    found = [_matrix(weight, run) for run in runs]
    for matrix in found:
        _check_codes(matrix, recipe)
    return tuple(matrix for matrix in found if matrix.window.numel)


def _check_codes(matrix: Matrix, recipe: Recipe) -> None:
    """Refuse a window whose edge divides codes that are stored as one element."""
    packed, window = recipe.codes, matrix.window
    if window.numel and any(map(any, packed.grid(matrix.spec).margins(window))):
        first, last = window.offset[1], window.offset[1] + window.shape[1]
        raise ConfigError(
            f"{matrix.spec.name!r}: this rank holds columns {first} to {last - 1}, and "
            f"{recipe.name} stores the codes of {packed.block[1]} columns in one "
            f"{packed.dtype} number",
            hint=f"shard it by rows, or by a multiple of {packed.block[1]} columns",
        )


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
