"""Quantised tensors of a model: codes and scales of the live weights, made anew for every version.

No quantised copy is kept: codes are pending until they are compared with the snapshot, and made by
kernels then; where there are none, the library makes them, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from deltachain.chain.identity import RECIPE
from deltachain.errors import ConfigError
from deltachain.publish.model.layout import Box, ElementMap, ElementRun
from deltachain.publish.model.pending import Pending
from deltachain.publish.model.source import ModelTensors, Weight, specs_of
from deltachain.publish.quantise.amax import (
    CutBlocks,
    Shared,
    cut_blocks,
    exchange,
    window_amax,
    with_shared,
)
from deltachain.publish.quantise.block_checks import LEAVE, BlockChecks
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.quantise.pending_codes import PendingCodes, can_wait
from deltachain.publish.quantise.recipe import Margins, Recipe
from deltachain.publish.ranks.channel import Ranks
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec


@dataclass(frozen=True, slots=True)
class Matrix:
    """What a live weight holds of a matrix that is quantised.

    Attributes:
        spec: Spec of the matrix in the checkpoint, before it is quantised.
        window: Position of the elements in it.
        start: Flat index of the first element in the local part of the live weight.
        name: Name of its codes among the tensors of this rank.
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
    _checks: BlockChecks = field(init=False)

    def __post_init__(self) -> None:
        self._checks = BlockChecks(self.recipe)

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

    def tensors(self) -> Iterator[tuple[str, Tensor | Pending]]:
        """Yield all tensors that this rank publishes; codes are pending where kernels make them.

        Raises:
            ConfigError: A weight or a scale is not finite: at the end, of weights on a device.
        """
        self._checks.forget()
        for weight in self.live_weights():
            matrices = self.matrices.get(weight.spec.name)
            if matrices is None:
                yield weight.spec.name, weight.tensor
            for matrix in matrices or ():
                pending = self._pending(matrix, weight)
                if pending is None:
                    yield from self._quantised(matrix, matrix.of(weight))
                else:
                    yield from self._after(matrix, pending)
        self._checks.settle()

    def _cut_blocks(self) -> Iterator[CutBlocks]:
        cut = {
            name: [m for m in found if self.recipe.grid(m.spec).cut(m.window).any()]
            for name, found in self.matrices.items()
        }
        if not any(cut.values()) and self.ranks.count == 1:
            return
        for weight in self.live_weights():
            for matrix in cut.get(weight.spec.name, ()):
                grid, pending = self.recipe.grid(matrix.spec), self._pending(matrix, weight)
                if pending is None:
                    amax = window_amax(matrix.of(weight), grid, matrix.window)
                else:
                    amax = pending.window_amax()
                yield cut_blocks(matrix.spec.name, grid, matrix.window, amax)

    def _pending(self, matrix: Matrix, weight: Weight) -> PendingCodes | None:
        """Return the codes of a matrix as pending ones, if kernels make them where it is."""
        if not may_wait(matrix, weight):
            return None
        is_master = weight.tensor.dtype == torch.float32
        values = matrix.live(weight) if is_master else matrix.of(weight)
        name, grid = matrix.spec.name, self.recipe.grid(matrix.spec)
        accept = partial(self._checks.check, name)
        return PendingCodes(
            values, grid, matrix.window, self.recipe, self._shared.get(name), accept
        )

    def _after(
        self, matrix: Matrix, pending: PendingCodes
    ) -> Iterator[tuple[str, Tensor | Pending]]:
        """Yield pending codes, and the scales that their use has found."""
        yield matrix.name, pending
        scales = pending.scales()
        if not pending.is_accepted:
            self._checks.check_later(matrix.spec.name, pending.amax(), scales)
        yield from self._scales(matrix, scales)

    def _quantised(self, matrix: Matrix, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield codes and scales by the library."""
        recipe, window = self.recipe, matrix.window
        grid = recipe.grid(matrix.spec)
        amax = window_amax(values, grid, window)
        if matrix.spec.name in self._shared:
            amax = with_shared(self._shared[matrix.spec.name], grid, window, amax)
        scales = recipe.arithmetic.scales(amax)
        self._checks.check(matrix.spec.name, amax, scales)
        yield matrix.name, make_codes(recipe, values, grid, window, amax)
        yield from self._scales(matrix, scales)

    def _scales(self, matrix: Matrix, scales: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the scales that this rank owns of those of a window's blocks, if there are any."""
        grid = self.recipe.grid(matrix.spec)
        owned = grid.owned(matrix.window)
        if owned.numel:
            first = grid.first(matrix.window)
            row, column = (o - f for o, f in zip(owned.offset, first, strict=True))
            mine = scales[row : row + owned.shape[0], column : column + owned.shape[1]]
            shape = _scales_box(self.recipe, matrix.spec, owned).shape
            yield _scales_key(self.recipe, matrix), mine.contiguous().view(shape)


def may_wait(matrix: Matrix, weight: Weight) -> bool:
    """Return whether codes of a live weight are made by kernels as they are compared."""
    return matrix.spec.dtype == "BF16" and can_wait(weight.tensor.device)


def make_codes(recipe: Recipe, values: Tensor, grid: Grid, window: Box, amax: Tensor) -> Tensor:
    """Make the codes of a window by the library.

    Args:
        recipe: How to quantise.
        values: The window, ``(rows, columns)``.
        grid: Blocks of the matrix.
        window: Position of the window.
        amax: Largest magnitude of each block of the window, of the whole block.
    """
    codes = torch.empty(values.shape, dtype=TORCH_DTYPES[recipe.codes], device=values.device)
    _, (left, right) = grid.margins(window)
    for band in grid.bands(window):
        margins = Margins(band.before, band.after, left, right)
        codes[band.rows] = recipe.arithmetic.codes(values[band.rows], amax[band.blocks], margins)
    return codes


def _scales_key(recipe: Recipe, matrix: Matrix) -> str:
    return (
        f"{matrix.name}: {recipe.suffix}"
        if ": " in matrix.name
        else recipe.scales_name(matrix.name)
    )


def _scales_box(recipe: Recipe, spec: TensorSpec, owned: Box) -> Box:
    """Return a box of the grid as a box of the tensor of scales."""
    whole = recipe.scales_of(spec).shape
    return owned if len(whole) == 2 else Box(whole, (0,), whole)


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
            aliases[recipe.scales_name(alias)] = recipe.scales_name(name)
    return replace(
        source,
        weights=tuple(sorted(weights, key=lambda weight: weight.spec.name)),
        specs=specs_of(specs),
        aliases=aliases,
        one_by_one=source.one_by_one or not _all_wait(source.weights, matrices),
        live=made.tensors,
        agree=made.agree,
        ext={RECIPE: dict(recipe.record())},
    )


def _all_wait(weights: Sequence[Weight], matrices: Mapping[str, Sequence[Matrix]]) -> bool:
    """Return whether no codes are made and no weights are cast: memory may not hold many."""
    return all(
        may_wait(matrix, weight) and weight.tensor.dtype in (torch.bfloat16, torch.float32)
        for weight in weights
        for matrix in matrices.get(weight.spec.name, ())
    )


def _specs(spec: TensorSpec, names: Collection[str], recipe: Recipe) -> tuple[TensorSpec, ...]:
    if spec.name not in names:
        return (spec,)
    return recipe.codes_of(spec), recipe.scales_of(spec)


def _weights(matrix: Matrix, recipe: Recipe) -> Iterator[Weight]:
    """Return codes and scales of a matrix as weights of this rank, without data."""
    owned = recipe.grid(matrix.spec).owned(matrix.window)
    scales = recipe.scales_of(matrix.spec)
    yield _weight(matrix.name, recipe.codes_of(matrix.spec), matrix.window)
    if owned.numel:
        yield _weight(_scales_key(recipe, matrix), scales, _scales_box(recipe, matrix.spec, owned))


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
