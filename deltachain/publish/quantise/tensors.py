"""Quantised tensors of a model: codes and scales of the live weights, made anew for every version.

No quantised copy is kept: codes are pending until they are compared with the snapshot, and made by
kernels then; where there are none, the library makes them, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from deltachain.chain.identity import RECIPE
from deltachain.errors import ConfigError
from deltachain.kernels.device_diff import Compared, compares_on
from deltachain.kernels.factors import Factors, Quantising, codes_by_factors
from deltachain.kernels.reference import Changes
from deltachain.publish.model.layout import Box, ElementMap, ElementRun
from deltachain.publish.model.source import ModelTensors, Pending, Weight, specs_of
from deltachain.publish.quantise import host_codes
from deltachain.publish.quantise.amax import (
    Blocks,
    CutBlocks,
    Shared,
    cut_blocks,
    exchange,
    whole_amax,
    whole_block,
    window_amax,
    with_shared,
)
from deltachain.publish.quantise.block_checks import LEAVE, BlockChecks
from deltachain.publish.quantise.fused import computed_with
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.quantise.host_codes import block_scales
from deltachain.publish.quantise.layers import WEIGHT
from deltachain.publish.quantise.recipe import Margins, Recipe
from deltachain.publish.quantise.stored import Stored
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.snapshot_memory import Kept
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Bits, TensorSpec


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


# No copy of the weights is cast, and no copy of their codes is made. Largest magnitudes of what a
# device compares are checked afterwards, and the diff is taken back if they are refused.


PIECE: Final = 1 << 22
"""Codes made at a time in torch operations: bounds what these allocate."""


def can_wait(where: torch.device) -> bool:
    """Return whether kernels quantise weights there while they compare them."""
    return compares_on(where) if where.type == "cuda" else host_codes.can_make(where)


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
            ConfigError: The recipe has global scales, and a weight is not finite.
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
        has_global, recipe = self.recipe.global_scale is not None, self.recipe
        wanted = {
            name: [m for m in found if has_global or recipe.grid(m.spec).cut(m.window).any()]
            for name, found in self.matrices.items()
        }
        if not any(wanted.values()) and self.ranks.count == 1:
            return
        for weight in self.live_weights():
            for matrix in wanted.get(weight.spec.name, ()):
                grid, name = recipe.grid(matrix.spec), matrix.spec.name
                pending = self._pending(matrix, weight)
                if pending is None:
                    amax = window_amax(matrix.of(weight), grid, matrix.window)
                else:
                    amax = pending.window_amax()
                if has_global:
                    self._checks.check_values(name, amax)  # here, where the name is known
                    yield whole_block(_group(name), amax)
                if grid.cut(matrix.window).any():
                    yield cut_blocks(name, grid, matrix.window, amax)

    def _pending(self, matrix: Matrix, weight: Weight) -> PendingCodes | None:
        """Return the codes of a matrix as pending ones, if kernels make them where it is."""
        if not may_wait(matrix, weight, self.recipe):
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
        yield _key(self.recipe.codes, matrix), pending
        scales = pending.scales()
        if not pending.is_accepted:
            self._checks.check_later(matrix.spec.name, pending.amax(), scales)
        yield from self._scales(matrix, scales)

    def _quantised(self, matrix: Matrix, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a matrix by the library."""
        recipe, window, name = self.recipe, matrix.window, matrix.spec.name
        arithmetic, grid = recipe.arithmetic, recipe.grid(matrix.spec)
        amax, global_scale = window_amax(values, grid, window), None
        if name in self._shared:
            amax = with_shared(self._shared[name], grid, window, amax)
        self._checks.check_values(name, amax)
        if arithmetic.global_scale is not None:
            whole = whole_amax(self._shared, _group(name), amax)
            global_scale = arithmetic.global_scale(whole)
        scales = arithmetic.scales(amax, global_scale)
        self._checks.check(name, amax, arithmetic.multipliers(amax, scales, global_scale))
        codes = make_codes(recipe, values, grid, window, amax, global_scale)
        yield _key(recipe.codes, matrix), codes
        yield from self._scales(matrix, scales)
        over = recipe.global_scale
        if over is not None and global_scale is not None and over.box(matrix.spec, window).numel:
            yield _key(over, matrix), global_scale

    def _scales(self, matrix: Matrix, scales: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the scales that this rank owns of those of a window's blocks, if there are any."""
        stored, grid = self.recipe.scales, self.recipe.grid(matrix.spec)
        owned = grid.owned(matrix.window)
        if owned.numel:
            first = grid.first(matrix.window)
            row, column = (o - f for o, f in zip(owned.offset, first, strict=True))
            mine = scales[row : row + owned.shape[0], column : column + owned.shape[1]]
            shape = stored.box(matrix.spec, matrix.window).shape
            yield _key(stored, matrix), mine.contiguous().view(shape)


def may_wait(matrix: Matrix, weight: Weight, recipe: Recipe) -> bool:
    """Return whether codes of a live weight are made by kernels as they are compared."""
    return recipe.has_kernel and matrix.spec.dtype == "BF16" and can_wait(weight.tensor.device)


def make_codes(
    recipe: Recipe,
    values: Tensor,
    grid: Grid,
    window: Box,
    amax: Tensor,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Make the codes of a window by the library.

    Args:
        recipe: How to quantise.
        values: The window, ``(rows, columns)``.
        grid: Blocks of the matrix.
        window: Position of the window.
        amax: Largest magnitude of each block of the window, of the whole block.
        global_scale: That of the checkpoint, if the recipe has one.

    Raises:
        ConfigError: The recipe's codes are not those that it describes.
    """
    shape = values.shape[0], values.shape[1] // recipe.codes.block[1]
    codes = torch.empty(shape, dtype=TORCH_DTYPES[recipe.codes.dtype], device=values.device)
    _, (left, right) = grid.margins(window)
    for band in grid.bands(window):
        margins = Margins(band.before, band.after, left, right)
        made = recipe.arithmetic.codes(values[band.rows], amax[band.blocks], margins, global_scale)
        part = codes[band.rows]
        if (made.dtype, made.shape) != (part.dtype, part.shape):
            raise ConfigError(
                f"recipe {recipe.name} made codes of {made.dtype} {tuple(made.shape)}, and "
                f"describes {part.dtype} {tuple(part.shape)}",
                hint="report it to the authors of the recipe",
            )
        part.copy_(made)
    return codes


def _group(weight: str) -> str:
    """Return the name of what engines load a matrix into."""
    return computed_with(weight.removesuffix(WEIGHT))


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
    for spec in source.specs:
        if spec.name in names:
            check_whole(spec, recipe)
    held = {
        weight.spec.name: found
        for weight in source.weights
        if (found := matrices(weight, names, recipe))
    }
    specs = [quantised for spec in source.specs for quantised in _specs(spec, names, recipe)]
    made = QuantisedTensors(source.live_weights, held, recipe, ranks)
    weights = [weight for weight in source.weights if weight.spec.name not in held]
    for found in held.values():
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
        has_own_checks=True,
        attached=None,
        one_by_one=source.one_by_one or not _all_wait(source.live_weights(), held, recipe),
        live=made.tensors,
        agree=made.agree,
        ext={RECIPE: dict(recipe.record())},
    )


def _all_wait(
    weights: Iterable[Weight], held: Mapping[str, Sequence[Matrix]], recipe: Recipe
) -> bool:
    """Return whether no codes are made and no weights are cast: memory may not hold many."""
    return all(
        may_wait(matrix, weight, recipe) and weight.tensor.dtype in (torch.bfloat16, torch.float32)
        for weight in weights
        for matrix in held.get(weight.spec.name, ())
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
