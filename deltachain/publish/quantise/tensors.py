"""Quantised tensors of a model: codes and scales of the live weights, made anew for every version.

No quantised copy is kept: the codes of one matrix at a time are compared with the snapshot.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from deltachain.chain.identity import RECIPE
from deltachain.errors import ConfigError
from deltachain.kernels.torch_kernels import host_array
from deltachain.publish.model.layout import Box, ElementMap, ElementRun
from deltachain.publish.model.source import ModelTensors, Weight, cast_to, specs_of
from deltachain.publish.quantise import layers
from deltachain.publish.quantise.recipe import (
    Band,
    Grid,
    Margins,
    Recipe,
    Rounding,
    Stored,
    rounded,
)
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.publish.ranks.collectives import Collective, Ranks
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Indices, TensorSpec

logger = logging.getLogger(__name__)

MESSAGE_NBYTES: Final = 2 << 20
"""Largest size of what a rank sends at a time, in bytes, before text encoding."""

WHOLE: Final = "all of "
"""Prefix of the name of what is shared by matrices that engines load into one."""

_LEAVE: Final = (
    "leave its layer out of the quantisation: quantization=Quantization(..., ignore=...)"
)


class CutBlocks(msgspec.Struct, frozen=True):
    """Largest magnitudes of the blocks of one matrix that extend beyond a rank's window."""

    name: str
    blocks: bytes
    amax: bytes


class CutMessage(msgspec.Struct, frozen=True):
    found: tuple[CutBlocks, ...]
    more: bool


Blocks: TypeAlias = tuple[Indices, npt.NDArray[np.float32]]
"""Ascending flat indices into a grid, and the largest magnitude of each block."""


def window_amax(values: Tensor, grid: Grid, window: Box) -> Tensor:
    """Compute the largest magnitude of each block of a window, of its elements in the window.

    The result has the shape of ``Grid.counts`` and the dtype of the values, ``(rows, columns)``; it
    is not finite where a value is not.
    """
    counts, (_, sides) = grid.counts(window), grid.margins(window)
    found = values.new_zeros(counts)
    for band in grid.bands(window):
        part = found[band.blocks]
        blocks = _in_blocks(values[band.rows], band, sides, part)
        torch.maximum(part, blocks.abs().amax((1, 3)), out=part)
    return found


def _in_blocks(piece: Tensor, band: Band, sides: tuple[int, int], like: Tensor) -> Tensor:
    """Return the rows of a band by block, ``(R, rows, C, columns)``; zeros are what it lacks.

    ``like`` has an element for each of these blocks, ``(R, C)``.
    """
    if band.before or band.after or any(sides):
        piece = pad(piece, (*sides, band.before, band.after))
    rows, columns = piece.shape[0] // like.shape[0], piece.shape[1] // like.shape[1]
    return piece.view(like.shape[0], rows, like.shape[1], columns)


def _cut_blocks(name: str, grid: Grid, window: Box, amax: Tensor) -> CutBlocks:
    at, blocks = _cut(grid, window)
    found = amax.float().cpu().numpy()[at]
    return CutBlocks(name, blocks.astype("<i8").tobytes(), found.astype("<f4").tobytes())


def _with_shared(shared: Blocks, grid: Grid, window: Box, amax: Tensor) -> Tensor:
    """Return the largest magnitudes of a window's blocks, of all their elements."""
    at, blocks = _cut(grid, window)
    if not blocks.size:
        return amax
    found = amax.cpu().clone()
    whole = shared[1][np.searchsorted(shared[0], blocks)]
    found[torch.from_numpy(at[0]), torch.from_numpy(at[1])] = torch.from_numpy(whole).to(amax.dtype)
    return found.to(amax.device)


def _cut(grid: Grid, window: Box) -> tuple[tuple[Indices, Indices], Indices]:
    """Return where a window's cut blocks are among its blocks, and their indices in the grid."""
    rows, columns = np.nonzero(grid.cut(window))
    first = grid.first(window)
    return (rows, columns), (rows + first[0]) * grid.shape[1] + (columns + first[1])


def exchange(ranks: Ranks, topic: str, mine: Iterable[CutBlocks]) -> dict[str, Blocks]:
    """Exchange the largest magnitudes of shared blocks with all ranks; no weights are sent."""
    found: dict[str, list[CutBlocks]] = {}
    rest: Iterator[CutMessage] = iter(())
    more, number = True, 0
    while more:
        with Collective(ranks, f"{topic}/{number}") as collective:
            if not number:
                blocks = tuple(mine)
                found, rest = {one.name: [] for one in blocks}, _messages(blocks)
            message = next(rest, CutMessage((), more=False))
            messages = collective.all_gather(message, CutMessage)
        for one in (one for message in messages for one in message.found if one.name in found):
            found[one.name].append(one)
        more, number = any(message.more for message in messages), number + 1
    return {name: _joined(pieces) for name, pieces in found.items()}


def _messages(mine: Sequence[CutBlocks]) -> Iterator[CutMessage]:
    part: list[CutBlocks] = []
    nbytes = 0
    for one in mine:
        size = len(one.blocks) + len(one.amax)
        if part and nbytes + size > MESSAGE_NBYTES:
            yield CutMessage(tuple(part), more=True)
            part, nbytes = [], 0
        part.append(one)
        nbytes += size
    yield CutMessage(tuple(part), more=False)


def _joined(pieces: Sequence[CutBlocks]) -> Blocks:
    blocks = np.concatenate([np.frombuffer(piece.blocks, "<i8") for piece in pieces])
    amax = np.concatenate([np.frombuffer(piece.amax, "<f4") for piece in pieces])
    order = np.argsort(blocks, kind="stable")
    distinct, starts = np.unique(blocks[order], return_index=True)
    if not distinct.size:
        return distinct, amax
    return distinct, np.maximum.reduceat(amax[order], starts)  # NaN, where there is one


@dataclass(frozen=True, slots=True)
class Matrix:
    spec: TensorSpec
    window: Box
    start: int
    name: str

    def of(self, weight: Weight) -> Tensor:
        local = weight.tensor.detach().view(-1)[self.start : self.start + self.window.numel]
        return cast_to(self.spec.dtype, local).view(self.window.shape)

    def key(self, stored: Stored) -> str:
        return f"{self.name}: {stored.suffix}" if ": " in self.name else stored.name(self.name)

    @property
    def group(self) -> str:
        return layers.computed_with(self.spec.name.removesuffix(layers.WEIGHT))


def _matrices(weight: Weight, names: Collection[str], recipe: Recipe) -> tuple[Matrix, ...]:
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
    if weight.element_map.axes is not None:
        raise ConfigError(
            f"{chosen[0]!r} cannot be quantised: the model has it in another order, as part of "
            f"{weight.spec.name!r}",
            hint=_LEAVE,
        )
    if len(weight.element_map.box.full) < len(weight.spec.shape):
        raise ConfigError(
            f"{chosen[0]!r} cannot be quantised: this rank has a run of its elements, not of rows",
            hint="shard by rows, as FSDP2 does (`fully_shard`)",
        )
    found = [_matrix(weight, run) for run in runs]
    for matrix in found:
        _refuse_divided_codes(matrix, recipe)
    return tuple(matrix for matrix in found if matrix.window.numel)


def _refuse_divided_codes(matrix: Matrix, recipe: Recipe) -> None:
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
            hint=_LEAVE,
        )
    height = math.prod(box.full[-2:-1]) or 1
    above = run.start // columns % height  # rows of the live weight before the run
    if above + run.numel // columns > height:
        raise ConfigError(f"{spec.name!r} is spread over {weight.spec.name!r}", hint=_LEAVE)
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


@dataclass(slots=True)
class QuantisedTensors:
    """Codes and scales of a rank's weights, beside those that are published as they are."""

    live_weights: Callable[[], Iterator[Weight]]
    matrices: Mapping[str, tuple[Matrix, ...]]
    recipe: Recipe
    ranks: Ranks
    _shared: Mapping[str, Blocks] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def agree(self, topic: str) -> None:
        """Agree with all ranks on the scales of blocks that several hold parts of.

        Precedes each iteration over ``tensors``, with weights that do not change until its end.
        """
        self._shared = exchange(self.ranks, f"{topic}/amax", self._cut_blocks())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for weight in self.live_weights():
            matrices = self.matrices.get(weight.spec.name)
            if matrices is None:
                yield weight.spec.name, weight.tensor
            for matrix in matrices or ():
                yield from self._quantised(matrix, matrix.of(weight))

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
                amax = window_amax(matrix.of(weight), grid, matrix.window)
                if has_global:
                    _refuse_infinite(name, amax)  # here, where the name is known
                    most = amax.float().max().cpu().numpy().astype("<f4")
                    yield CutBlocks(WHOLE + matrix.group, bytes(8), most.tobytes())
                if grid.cut(matrix.window).any():
                    yield _cut_blocks(name, grid, matrix.window, amax)

    def _quantised(self, matrix: Matrix, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        recipe, window, name = self.recipe, matrix.window, matrix.spec.name
        arithmetic, grid, over = recipe.arithmetic, recipe.grid(matrix.spec), recipe.global_scale
        amax, global_scale = window_amax(values, grid, window), None
        if name in self._shared:
            amax = _with_shared(self._shared[name], grid, window, amax)
        _refuse_infinite(name, amax)
        if arithmetic.global_scale is not None:
            most = torch.from_numpy(self._shared[WHOLE + matrix.group][1].copy())
            global_scale = arithmetic.global_scale(most.to(amax.dtype).to(amax.device))
        scales = arithmetic.scales(amax, global_scale)
        self._check_scales(name, amax, arithmetic.multipliers(amax, scales, global_scale))
        yield matrix.key(recipe.codes), make_codes(recipe, values, grid, window, amax, global_scale)
        owned = grid.owned(window)
        if owned.numel:
            first = grid.first(window)
            row, column = (o - f for o, f in zip(owned.offset, first, strict=True))
            mine = scales[row : row + owned.shape[0], column : column + owned.shape[1]]
            shape = recipe.scales.box(matrix.spec, window).shape
            yield matrix.key(recipe.scales), mine.contiguous().view(shape)
        if over is not None and global_scale is not None and over.box(matrix.spec, window).numel:
            yield matrix.key(over), global_scale

    def _check_scales(self, name: str, amax: Tensor, multipliers: Tensor) -> None:
        """Refuse scales of 0 and infinite ones; name, once, weights that become 0 by theirs."""
        values = multipliers.float()
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise ConfigError(
                f"{name!r}: a scale is not a positive finite number: its weights are too small or "
                "too large",
                hint=_LEAVE,
            )
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


def _refuse_infinite(name: str, amax: Tensor) -> None:
    if not bool(torch.isfinite(amax).all()):
        raise ConfigError(
            f"{name!r} has values that are not finite, and cannot be quantised",
            hint="the training diverged, or the weight overflows its dtype; nothing was published",
        )


def make_codes(
    recipe: Recipe,
    values: Tensor,
    grid: Grid,
    window: Box,
    amax: Tensor,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Make the codes of a window, those of bf16 weights on the host by a kernel where there is one.

    ``amax`` has the largest magnitude of each block of the window, of the whole block.
    """
    arithmetic, (_, (left, right)) = recipe.arithmetic, grid.margins(window)
    shape = values.shape[0], values.shape[1] // recipe.codes.block[1]
    codes = torch.empty(shape, dtype=TORCH_DTYPES[recipe.codes.dtype], device=values.device)
    factors = None
    if arithmetic.rounding is not None and values.dtype == torch.bfloat16:
        factors = arithmetic.factors(amax, arithmetic.scales(amax))
        if has_kernel(values.device):
            _by_kernel(arithmetic.rounding, values, factors, grid, window, codes)
            return codes
    for band in grid.bands(window):
        piece, part = values[band.rows], codes[band.rows]
        if arithmetic.rounding is not None and factors is not None:
            by = factors[band.blocks]
            blocks = _in_blocks(piece, band, (left, right), by)
            made = rounded(arithmetic.rounding, blocks, by[:, None, :, None])
            made = made.view(-1, left + piece.shape[1] + right)
            part.copy_(made[band.before : band.before + part.shape[0], left : left + part.shape[1]])
            continue
        margins = Margins(band.before, band.after, left, right)
        made = arithmetic.codes(piece, amax[band.blocks], margins, global_scale)
        if (made.dtype, made.shape) != (part.dtype, part.shape):
            raise ConfigError(
                f"recipe {recipe.name} made codes of {made.dtype} {tuple(made.shape)}, and "
                f"describes {part.dtype} {tuple(part.shape)}",
                hint="report it to the authors of the recipe",
            )
        part.copy_(made)
    return codes


def has_kernel(where: torch.device) -> bool:
    return where.type == "cpu"


def _by_kernel(
    rounding: Rounding, values: Tensor, factors: Tensor, grid: Grid, window: Box, codes: Tensor
) -> None:
    from deltachain.kernels.quantised_codes import KINDS, quantise_codes  # noqa: PLC0415 - numba is slow

    (above, _), (left, _) = grid.margins(window)
    by = np.ascontiguousarray(factors.numpy())
    bits, out = host_array(values, np.uint16), codes.view(torch.uint8).numpy()
    quantise_codes(bits, by, (above, left), grid.block, out, KINDS[rounding])


def quantise(
    source: ModelTensors, names: Collection[str], recipe: Recipe, ranks: Ranks
) -> ModelTensors:
    for spec in source.specs:
        width = recipe.block[1]
        if spec.name in names and recipe.whole_blocks and spec.shape[1] % width:
            raise ConfigError(
                f"{spec.name!r} has {spec.shape[1]} columns, and {recipe.name} quantises {width} "
                "at a time, without a rest",
                hint=_LEAVE,
            )
    held = {
        weight.spec.name: found
        for weight in source.weights
        if (found := _matrices(weight, names, recipe))
    }
    specs = [
        made
        for spec in source.specs
        for made in (recipe.specs(spec) if spec.name in names else (spec,))
    ]
    made = QuantisedTensors(source.live_weights, held, recipe, ranks)
    weights = [weight for weight in source.weights if weight.spec.name not in held]
    weights += [
        one for found in held.values() for matrix in found for one in _weights(matrix, recipe)
    ]
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
        one_by_one=True,
        live=made.tensors,
        agree=made.agree,
        ext={RECIPE: dict(recipe.record())},
    )


def _weights(matrix: Matrix, recipe: Recipe) -> Iterator[Weight]:
    for stored in recipe.tensors:
        box, spec = stored.box(matrix.spec, matrix.window), stored.spec(matrix.spec)
        if box.numel:
            gone = torch.empty(box.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            straight = ElementMap.straight(spec, box)
            named = replace(spec, name=matrix.key(stored))
            yield Weight(named, gone, frozen=False, element_map=straight)


def quantised(
    source: ModelTensors,
    find: Callable[[], layers.Layers],
    quantization: Quantization,
    ranks: Ranks,
    files: layers.Files,
) -> tuple[ModelTensors, layers.Files]:
    """Quantise the tensors of a model, and what its files say of them; every rank calls this."""
    recipe = RECIPES.chosen(quantization.recipe)
    recipe.version()  # an absent library is named before any work
    with Collective(ranks, "layers") as collective:
        found = layers.Layers.joined(collective.all_gather(find(), layers.Layers))
    choice = layers.choose(source, found, quantization)
    with Collective(ranks, "matrices") as collective:
        made = quantise(source, choice.names, recipe, ranks)
        collective.all_gather(True, bool)
    return made, lambda: layers.with_quantization(files(), recipe, choice)
