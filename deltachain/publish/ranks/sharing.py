"""Division of the weights between ranks, so that each element is published by one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from deltachain.errors import ConfigError
from deltachain.kernels import host
from deltachain.publish.model.layout import Box
from deltachain.publish.model.source import ModelTensors, Weight, specs_of
from deltachain.publish.ranks.collectives import Collective, Ranks
from deltachain.publish.snapshot import wire_bits
from deltachain.types import TensorSpec

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


class HeldShard(msgspec.Struct, frozen=True):
    """Serialised description of one rank's shard of a live tensor.

    Attributes:
        full: Shape of the whole tensor.
        offset: Start of the shard in each dimension of the tensor.
        shape: Shape of the shard.
        frozen: Whether it is not trained.
        is_buffer: Whether it is a buffer, published by the first rank that has it.
        bits: Digest of the shard: copies on several ranks must be equal.
    """

    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    frozen: bool
    is_buffer: bool
    bits: str

    @property
    def box(self) -> Box:
        """Position of the shard in the tensor."""
        return Box(self.full, self.offset, self.shape)


class HeldShards(msgspec.Struct, frozen=True):
    """All shards on one rank, and their checkpoint tensors."""

    held: dict[str, HeldShard]
    specs: tuple[tuple[str, str, tuple[int, ...]], ...]
    aliases: dict[str, str]


def divide(collect: Callable[[], ModelTensors], ranks: Ranks) -> ModelTensors:
    """Collect the weights on every rank, and divide them; return those published by this rank.

    Args:
        collect: Function that collects the weights on this rank.
        ranks: All publishing ranks.

    Raises:
        ConfigError: A rank's model cannot be published, the ranks' shards are not a whole model,
            or copies of a shard differ.
        RankError: Another rank failed, or did not answer in time.
    """
    with Collective(ranks, "held") as collective:
        model = collect()
        mine = _holding(model, alone=ranks.count == 1)
        holdings = collective.all_gather(mine, HeldShards)
    _check(holdings)
    buffers = {name for h in holdings for name, held in h.held.items() if held.is_buffer}
    boxes = [{name: held.box for name, held in h.held.items()} for h in holdings]
    owned = assign_shards(boxes, of_the_first=buffers)
    weights = tuple(w for w in model.weights if w.spec.name in owned[ranks.number])
    specs = specs_of(TensorSpec(*row) for holding in holdings for row in holding.specs)
    aliases = {a: name for holding in holdings for a, name in holding.aliases.items()}
    return replace(model, weights=weights, specs=specs, aliases=aliases)


def _holding(source: ModelTensors, *, alone: bool) -> HeldShards:
    weights = source.weights if alone else source.live_weights()
    held = {weight.spec.name: _held(weight, alone=alone) for weight in weights}
    specs = tuple((spec.name, spec.dtype, spec.shape) for spec in source.specs)
    return HeldShards(held, specs, dict(source.aliases))


def _held(weight: Weight, *, alone: bool) -> HeldShard:
    box = weight.element_map.box
    bits = "" if alone else str(host.digest((0, 0), wire_bits(weight)))
    return HeldShard(box.full, box.offset, box.shape, weight.frozen, weight.is_buffer, bits)


def _check(holdings: Sequence[HeldShards]) -> None:
    """Check that the ranks together have one whole model."""
    if not any(holding.held for holding in holdings):
        raise ConfigError("there are no weights", hint="no rank has any part of a model")
    for name in sorted({name for holding in holdings for name in holding.held}):
        ranks = [number for number, holding in enumerate(holdings) if name in holding.held]
        pieces = [holdings[number].held[name] for number in ranks]
        check_cover(name, [piece.box for piece in pieces])
        first: dict[Box, tuple[int, HeldShard]] = {}
        for number, piece in zip(ranks, pieces, strict=True):
            other, same = first.setdefault(piece.box, (number, piece))
            if piece.box.numel and piece.bits != same.bits and not piece.is_buffer:
                raise ConfigError(
                    f"{name!r} differs on ranks {other} and {number}, which both hold this part",
                    hint="replicas must be equal: load one checkpoint on all, or shard as DTensors",
                )
            if piece.frozen != same.frozen:
                frozen, trained = (other, number) if same.frozen else (number, other)
                raise ConfigError(
                    f"{name!r} is frozen on rank {frozen}, trained on rank {trained}",
                    hint="freeze the same weights on every rank",
                )
