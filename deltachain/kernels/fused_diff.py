"""Fused diff of a batch of tensors in Triton: compare, compact in order, update the snapshot.

A batch takes three launches, however many tensors it has: ``count_kernel`` counts the changes of
each block, ``place_kernel`` gives each block its room among the results, and ``write_kernel``
compares again and writes. The second comparison costs one more read of both sides at the memory
bandwidth of the device. In exchange, results come out in ascending order without a sort, no block
waits for another one, and a batch without room is left as it was, its snapshot included.

Blocks are named by address, so that one launch reaches the memory of any number of tensors.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltachain.kernels.device_diff import BLOCK, Arena, Placed

STEP: Final = 2048  # counts summed at a time by `place_kernel`
WARPS: Final = 8  # warps of a program that compares: 16 elements a thread
TYPES: Final[dict[int, Any]] = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Triton's dtype of the bits, by element size in bytes."""


@triton.jit
def _read(
    address: tl.tensor,
    inside: tl.tensor,
    whole: tl.tensor,
    bits: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
) -> tl.tensor:
    """Read a block of elements at an address; zero where it is short."""
    first = address.to(tl.pointer_type(bits))
    if aligned:
        first = tl.multiple_of(first, 16)
    at = first + tl.arange(0, size)
    if whole:
        read = tl.load(at)
    else:
        read = tl.load(at, mask=inside, other=0)
    return read


@triton.jit
def _cast(master: tl.tensor) -> tl.tensor:
    """Cast fp32 bits to bf16: round to nearest even; a NaN becomes quiet and keeps its sign."""
    word = master.to(tl.uint32, bitcast=True)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    quiet = (word >> 16) | 0x40
    is_nan = (word & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, quiet, rounded).to(tl.int16)


@triton.jit
def _compare(
    table: tl.tensor,
    blocks: tl.tensor,
    bits: tl.constexpr,
    master: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Compare this program's block of the weights with that of the snapshot."""
    block = tl.program_id(0)
    numel = tl.load(table + 2 * blocks + block)
    inside = tl.arange(0, size) < numel
    whole = numel == size
    address = tl.load(table + block)
    if master:
        now = _cast(_read(address, inside, whole, tl.int32, aligned, size))
    else:
        now = _read(address, inside, whole, bits, aligned, size)
    then = _read(tl.load(table + blocks + block), inside, whole, bits, aligned, size)
    return now, then, (now != then) & inside


@triton.jit(do_not_specialize=["blocks"])
def count_kernel(
    table: tl.tensor,
    blocks: tl.tensor,
    counts: tl.tensor,
    bits: tl.constexpr,
    master: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Count the changes of each block; one program a block.

    Args:
        table: int64 of shape ``(3, blocks)``: address of the weights, address of the snapshot, and
            number of elements of each block.
        blocks: Number of blocks.
        counts: Result, int16 of shape ``(blocks,)``.
        master: Whether the weights are fp32 masters of bf16 ones.
        aligned: Whether every address is a multiple of 16.
    """
    _, _, differ = _compare(table, blocks, bits, master, aligned, size)
    tl.store(counts + tl.program_id(0), tl.sum(differ.to(tl.int32), 0).to(tl.int16))


@triton.jit(do_not_specialize=["blocks", "capacity"])
def place_kernel(
    counts: tl.tensor,
    blocks: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    starts: tl.tensor,
    capacity: tl.tensor,
    step: tl.constexpr,
) -> None:
    """Give every block its room among the results, if there is room for all of them; one program.

    What is read and what is written lie apart, so that no thread sees the end of another's work.

    Args:
        counts: Number of changes of each block, int16 of shape ``(blocks,)``.
        blocks: Number of blocks.
        before: Header of the batch before, int64 of shape ``(3,)``.
        after: Header of this batch: its first change among the results, or -1 without room; its
            number of changes; the end of the results so far.
        starts: First change of each block, or -1, int64 of shape ``(blocks,)``.
        capacity: Number of changes for which there is room.
    """
    lane = tl.arange(0, step)
    total = tl.sum(tl.zeros((step,), tl.int64), 0)
    for at in range(0, blocks, step):
        some = tl.load(counts + at + lane, mask=at + lane < blocks, other=0)
        total += tl.sum(some.to(tl.int64), 0)
    begin = tl.load(before + 2)
    fits = begin + total <= capacity
    tl.store(after, tl.where(fits, begin, -1))
    tl.store(after + 1, total)
    tl.store(after + 2, tl.where(fits, begin + total, begin))
    running = begin
    for at in range(0, blocks, step):
        some = tl.load(counts + at + lane, mask=at + lane < blocks, other=0).to(tl.int64)
        start = running + tl.cumsum(some, 0) - some
        tl.store(starts + at + lane, tl.where(fits, start, -1), mask=at + lane < blocks)
        running += tl.sum(some, 0)


@triton.jit(do_not_specialize=["blocks"])
def write_kernel(
    table: tl.tensor,
    blocks: tl.tensor,
    counts: tl.tensor,
    starts: tl.tensor,
    offsets: tl.tensor,
    new: tl.tensor,
    old: tl.tensor,
    bits: tl.constexpr,
    master: tl.constexpr,
    aligned: tl.constexpr,
    resident: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Write the changes of each block into its room, in ascending order; one program a block.

    Args:
        blocks: Number of blocks.
        counts: Number of changes of each block.
        starts: First change of each block among the results; negative: nothing is written.
        resident: Whether the snapshot is on the device, and is updated.
    """
    block = tl.program_id(0)
    start = tl.load(starts + block)
    if (start >= 0) & (tl.load(counts + block) > 0):
        now, then, differ = _compare(table, blocks, bits, master, aligned, size)
        lane = tl.arange(0, size)
        at = start + tl.cumsum(differ.to(tl.int32), 0) - 1
        tl.store(offsets + at, lane.to(tl.int16), mask=differ)
        tl.store(new + at, now, mask=differ)
        if resident:
            tl.store(old + at, then, mask=differ)
            kept = tl.load(table + blocks + block).to(tl.pointer_type(bits))
            tl.store(kept + lane, now, mask=differ)


def _launch(kernel: Any, programs: int, *arguments: Any, warps: int, **constants: Any) -> None:  # noqa: ANN401
    kernel[(programs,)](*arguments, num_warps=warps, **constants)


def diff_batch_(
    table: Tensor,
    before: Tensor,
    arena: Arena,
    *,
    master: bool,
    resident: bool,
    aligned: bool,
) -> Placed:
    """Enqueue the diff of a batch on the current stream of its device; does not wait.

    Args:
        table: Blocks by address, int64 of shape ``(3, blocks)``, on the device: weights, snapshot,
            number of elements. All memory named there must be valid until the launches are done.
        before: Header of the batch before, int64 of shape ``(3,)``; zeros for the first.
        master: Whether the weights are fp32 masters of bf16 ones.
        resident: Whether the snapshot is on the device, and is updated, and old bits are wanted.
        aligned: Whether every address of weights or snapshot is a multiple of 16.

    Returns:
        Where the changes are. Without room nothing is written, nor is the snapshot updated.
    """
    blocks, where = table.shape[1], table.device
    counts = torch.empty(blocks, dtype=torch.int16, device=where)
    starts = torch.empty(blocks, dtype=torch.int64, device=where)
    after = torch.empty(3, dtype=torch.int64, device=where)
    same = {
        "bits": TYPES[arena.new.element_size()],
        "master": master,
        "aligned": aligned,
        "size": BLOCK,
    }
    _launch(count_kernel, blocks, table, blocks, counts, warps=WARPS, **same)
    capacity = arena.offsets.numel()
    _launch(place_kernel, 1, counts, blocks, before, after, starts, capacity, warps=4, step=STEP)
    result = (arena.offsets, arena.new, arena.old)
    _launch(
        write_kernel, blocks, table, blocks, counts, starts, *result,
        warps=WARPS, resident=resident, **same,
    )  # fmt: skip
    return Placed(counts, after, arena)
