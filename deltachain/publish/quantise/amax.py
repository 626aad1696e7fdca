"""Largest magnitudes of blocks: of a window, and of blocks that several windows share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from deltachain.publish.model.layout import Box
from deltachain.publish.quantise import host_codes
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import Collective
from deltachain.types import Indices

MESSAGE_NBYTES: Final = 2 << 20
"""Largest size of what a rank sends at a time, in bytes, before text encoding."""


WHOLE: Final = "all of "
"""Prefix of the name of what is shared by matrices that engines load into one."""


class CutBlocks(msgspec.Struct, frozen=True):
    """Largest magnitudes of the blocks of one matrix that extend beyond a rank's window.

    Attributes:
        name: Name of the matrix in the checkpoint, or of what several are loaded into.
        blocks: Flat indices into its grid, ascending; int64.
        amax: Largest magnitude in the window of each, as fp32.
    """

    name: str
    blocks: bytes
    amax: bytes


class CutMessage(msgspec.Struct, frozen=True):
    """Some of a rank's blocks, and whether there are more."""

    found: tuple[CutBlocks, ...]
    more: bool


Blocks: TypeAlias = tuple[Indices, npt.NDArray[np.float32]]
"""Ascending flat indices into a grid, and the largest magnitude of each block."""

Shared: TypeAlias = Mapping[str, Blocks]
"""Shared blocks, by name of the matrix."""


def window_amax(values: Tensor, grid: Grid, window: Box) -> Tensor:
    """Compute the largest magnitude of each block of a window, of its elements in the window.

    Args:
        values: The window, ``(rows, columns)``, in a floating point dtype.
        grid: Blocks of the matrix.
        window: Position of the window.

    Returns:
        In the shape of ``Grid.counts`` and the dtype of the values; not finite where a value is
        not.
    """
    if values.dtype == torch.bfloat16 and host_codes.can_make(values.device):
        return host_codes.amax(values, grid, window)
    counts, (_, sides) = grid.counts(window), grid.margins(window)
    found = values.new_zeros(counts)
    for band in grid.bands(window):
        part = found[band.blocks]
        high = _by_block(values[band.rows], band.before, band.after, sides, part.shape)
        torch.maximum(part, high, out=part)
    return found


def _by_block(
    values: Tensor, before: int, after: int, sides: tuple[int, int], shape: Sequence[int]
) -> Tensor:
    magnitude = values.abs()
    if before or after or any(sides):
        magnitude = pad(magnitude, (*sides, before, after))
    rows, columns = magnitude.shape[0] // shape[0], magnitude.shape[1] // shape[1]
    return magnitude.view(shape[0], rows, shape[1], columns).amax((1, 3))


def cut_blocks(name: str, grid: Grid, window: Box, amax: Tensor) -> CutBlocks:
    """Return the blocks of a window that extend beyond it."""
    at, blocks = _cut(grid, window)
    found = amax.float().cpu().numpy()[at]
    return CutBlocks(name, blocks.astype("<i8").tobytes(), found.astype("<f4").tobytes())


def whole_block(group: str, amax: Tensor) -> CutBlocks:
    """Return the largest magnitude of a window as that of the only block of a group of matrices."""
    most = amax.float().max().cpu().numpy()
    return CutBlocks(WHOLE + group, bytes(8), most.astype("<f4").tobytes())


def whole_amax(shared: Shared, group: str, like: Tensor) -> Tensor:
    """Return the largest magnitude of a group of matrices, ``(1,)``.

    Args:
        shared: What all ranks have of blocks; this rank has a part of the group.
        group: Name of the group.
        like: A tensor with the dtype and on the device of the values.
    """
    found = shared[WHOLE + group][1].copy()
    return torch.from_numpy(found).to(like.dtype).to(like.device)


def with_shared(shared: Blocks, grid: Grid, window: Box, amax: Tensor) -> Tensor:
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


def exchange(ranks: Ranks, topic: str, mine: Iterable[CutBlocks]) -> Shared:
    """Exchange the largest magnitudes of shared blocks with all ranks; no weights are sent.

    Args:
        ranks: All publishing ranks.
        topic: Unique name of the exchange.
        mine: Blocks of this rank's windows that extend beyond them. An error while they are found
            reaches all ranks.

    Returns:
        The blocks of ``mine``, each with the largest magnitude on any rank; NaN if one is NaN.

    Raises:
        RankError: Another rank failed, or did not answer in time.
    """
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
