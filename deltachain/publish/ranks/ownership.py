"""Assignment of shards to publishing ranks: pure functions of the shards on every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from deltachain.errors import ConfigError
from deltachain.publish.model.layout import Box

HeldBoxes: TypeAlias = Mapping[str, Box]
"""Boxes on one rank, by name of the live tensor."""


def assign_shards(
    holdings: Sequence[HeldBoxes], *, of_the_first: Collection[str] = ()
) -> list[frozenset[str]]:
    """Assign every box to one rank that has it, with about equal numbers of elements a rank.

    Every rank computes the same assignment from the same input. Coordinate 0 of all replicating
    mesh dimensions would not work: a tensor outside a parallelism plan has a mesh of its own.

    Args:
        holdings: Boxes on each rank.
        of_the_first: Names published by the first rank that has them: buffers, whose values may
            differ between ranks, then all come from one rank.

    Returns:
        Names published by each rank.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, holding in enumerate(holdings):
        for name, box in holding.items():
            if box.numel or not math.prod(box.full):
                holders.setdefault((name, box), []).append(rank)
    owned: list[set[str]] = [set() for _ in holdings]
    load = [0] * len(holdings)
    largest_first = sorted(holders, key=lambda held: (-held[1].numel, held[0], held[1].offset))
    for name, box in largest_first:
        ranks = holders[name, box]
        rank = min(ranks if name not in of_the_first else ranks[:1], key=lambda n: (load[n], n))
        owned[rank].add(name)
        load[rank] += box.numel
    return [frozenset(names) for names in owned]


def check_cover(name: str, boxes: Sequence[Box]) -> None:
    """Check that the distinct boxes of all ranks cover the tensor.

    Raises:
        ConfigError: Elements are missing, or are in several different boxes.
    """
    full = boxes[0].full
    if any(box.full != full for box in boxes):
        other = next(box.full for box in boxes if box.full != full)
        raise ConfigError(
            f"{name!r} has shape {full} on one rank, {other} on another",
            hint="ranks that hold different tensors must name them differently, or shard them as "
            "DTensors",
        )
    held = {box for box in boxes if box.numel}
    dims = range(len(full))
    parts = [sorted({(box.offset[dim], box.shape[dim]) for box in held}) for dim in dims]
    tiles = all(_tile(part, size) for part, size in zip(parts, full, strict=True))
    if math.prod(full) and not (tiles and len(held) == math.prod(map(len, parts))):
        raise ConfigError(
            f"{name!r}: the ranks' pieces are not all of it, each once: "
            f"{sum(box.numel for box in held)} of {math.prod(full)} elements",
            hint="attach on every rank that holds weights",
        )


def _tile(part: Sequence[tuple[int, int]], size: int) -> bool:
    """Return whether intervals are contiguous from 0 to a size."""
    at = 0
    for start, length in part:
        if start != at:
            return False
        at += length
    return at == size
