"""What the ranks of a trainer agree on: their settings, and who publishes which weights."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Final, TypeAlias
from zlib import crc32

import msgspec

from deltachain.errors import ConfigError
from deltachain.kernels import host
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.layout import Box, local_of
from deltachain.publish.model.refusals import refuse_tensor
from deltachain.publish.model.source import HeldShard, ModelTensors, Weight, specs_of
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.publish.ranks.collectives import Collective, Ranks
from deltachain.publish.snapshot import wire_bits
from deltachain.types import TensorSpec
from deltachain.version import __version__

_SCOPES: Final = {
    "all ranks": "url encoding dtype quantization base anchor_format when_busy on_error deadline_s",
    "rank 0": "assets trust_remote_code anchor_factor anchor_every maintain continue_reverted "
    "take_over signing_key metrics metadata",
    "each rank": "storage_options snapshot anchor_memory part_nbytes",
}
SCOPES: Final = {scope: names.split() for scope, names in _SCOPES.items()}
"""Fields of :class:`PublishConfig` by whose they are.

Those of all ranks decide what is written (a chain of two recipes can never be read), or when ranks
wait for each other.
"""

MOST_NAMED: Final = 8  # most values of a setting that an error names

COPIES_NUMEL: Final = 1 << 22  # elements of copies that ranks compare in each version: milliseconds

COPIES_COUNT: Final = 64  # most of these tensors: a rank sends some 16 KB of digests


def agree(
    config: PublishConfig, ranks: Ranks, *, url: str, further: Mapping[str, object] | None = None
) -> None:
    """Compare the settings of all ranks; every rank calls this before anything is written."""
    if ranks.count == 1:
        return
    with Collective(ranks, "settings") as collective:
        mine = common_settings(config, url=url, further=further or {})
        settings = collective.all_gather(mine, dict[str, str])
    check_settings(settings)


def common_settings(
    config: PublishConfig, *, url: str, further: Mapping[str, object]
) -> dict[str, str]:
    described = "None"
    if (quantization := Quantization.chosen(config.quantization)) is not None:
        recipe = RECIPES.chosen(quantization.recipe)
        ignore = ", ".join(sorted(set(quantization.ignore))) or "nothing"
        described = f"{recipe.name!r} of {recipe.library} {recipe.version()} (ignore {ignore})"
    return {
        **{name: repr(getattr(config, name)) for name in SCOPES["all ranks"]},
        "url": url,
        "base": "None" if config.base is None else "given",
        "quantization": described,
        **{name: repr(value) for name, value in further.items()},
        "deltachain": __version__,
    }


def check_settings(settings: Sequence[Mapping[str, str]]) -> None:
    different = []
    for name in dict.fromkeys(name for one in settings for name in one):
        rank_of: dict[str, int] = {}
        for rank, one in enumerate(settings):
            rank_of.setdefault(one.get(name, "absent"), rank)
        if len(rank_of) > 1:
            values = [f"{value} on rank {rank}" for value, rank in rank_of.items()]
            different.append(f"{name} is {', '.join(values[:MOST_NAMED])}")
    if different:
        raise ConfigError(
            f"the ranks have different settings: {'; '.join(different)}",
            hint="give every rank the same settings, and install the same packages for all",
        )


HeldBoxes: TypeAlias = Mapping[str, Box]  # boxes on one rank, by name of the live tensor


def assign_shards(
    holdings: Sequence[HeldBoxes], *, of_the_first: Collection[str] = ()
) -> list[frozenset[str]]:
    """Assign every box to one rank that has it, the same on all ranks, with about equal loads.

    Coordinate 0 of all replicating mesh dimensions would not work: a tensor outside a parallelism
    plan has a mesh of its own.
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
    """Refuse distinct boxes of all ranks that are not the whole tensor, each element once."""
    full = boxes[0].full
    for other in (box.full for box in boxes if box.full != full):
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
    ends = [0, *(start + length for start, length in part)]
    return [start for start, _ in part] == ends[:-1] and ends[-1] == size


class HeldShards(msgspec.Struct, frozen=True):
    held: dict[str, HeldShard]
    specs: tuple[tuple[str, str, tuple[int, ...]], ...]
    aliases: dict[str, str]


def divide(collect: Callable[[], ModelTensors], ranks: Ranks) -> ModelTensors:
    """Collect the weights on every rank, and divide them; return those published by this rank."""
    alone = ranks.count == 1
    with Collective(ranks, "held") as collective:
        model = collect()
        weights = model.weights if alone else model.live_weights()
        held = {weight.spec.name: _held(weight, alone=alone) for weight in weights}
        rows = tuple((spec.name, spec.dtype, spec.shape) for spec in model.specs)
        mine = HeldShards(held, rows, dict(model.aliases))
        holdings = collective.all_gather(mine, HeldShards)
    _check(holdings)
    buffers = {name for h in holdings for name, held in h.held.items() if held.is_buffer}
    boxes = [{name: held.box for name, held in h.held.items()} for h in holdings]
    owned = assign_shards(boxes, of_the_first=buffers)
    owned_weights = tuple(w for w in model.weights if w.spec.name in owned[ranks.number])
    specs = specs_of(TensorSpec(*row) for holding in holdings for row in holding.specs)
    _check_targets(holdings, sum(spec.numel for spec in specs))
    aliases = {a: name for holding in holdings for a, name in holding.aliases.items()}
    copies = partial(_copies, model, _copied(holdings) if model.attached else {})
    return replace(model, weights=owned_weights, specs=specs, aliases=aliases, copies=copies)


def _copied(holdings: Sequence[HeldShards]) -> dict[str, int]:
    """Return the sizes of trained shards that several ranks have, by name."""
    held = (item for holding in holdings for item in holding.held.items())
    counts = Counter((name, one.box) for name, one in held if not (one.frozen or one.is_buffer))
    return {name: box.numel for (name, box), count in counts.items() if count > 1 and box.numel}


def _copies(model: ModelTensors, sizes: Mapping[str, int], topic: str) -> dict[str, HeldShard]:
    """Digest a part of this rank's copies, which ``topic`` draws, the same on all ranks."""
    drawn = sorted(sizes, key=lambda name: crc32(f"{topic} {name}".encode()))[:COPIES_COUNT]
    numel = accumulate(min(sizes[name], COPIES_NUMEL) for name in drawn)
    wanted = {name for name, total in zip(drawn, numel, strict=True) if total <= COPIES_NUMEL}
    weights = {one.spec.name: one for one in model.weights if one.spec.name in wanted}
    found: dict[str, HeldShard] = {}
    for name, tensor in model.live() if weights else ():
        if name in weights:
            refuse_tensor(name, local_of(tensor))
            start = crc32(topic.encode()) % (max(0, sizes[name] - COPIES_NUMEL) + 1)
            part = local_of(tensor).detach().view(-1)[start : start + COPIES_NUMEL]
            found[name] = _held(replace(weights[name], tensor=part), alone=False)
    return found


def _check_targets(holdings: Sequence[HeldShards], numel: int) -> None:
    """Refuse tensors of different ranks that go to one of the checkpoint, or to a part of one."""
    boxes = {name: held.box for holding in holdings for name, held in holding.held.items()}
    live = sum(math.prod(box.full) for box in boxes.values())
    if live != numel:
        raise ConfigError(
            f"the ranks hold {live} elements, and their checkpoint {numel}: two tensors go to one, "
            "or a part is on no rank",
            hint="attach on every rank that holds weights, and one copy of tied weights",
        )


def _held(weight: Weight, *, alone: bool) -> HeldShard:
    box = weight.element_map.box
    bits = "" if alone else str(host.digest((0, 0), wire_bits(weight)))
    return HeldShard(box, weight.frozen, weight.is_buffer, bits)


def _check(holdings: Sequence[HeldShards]) -> None:
    if not any(holding.held for holding in holdings):
        raise ConfigError("there are no weights", hint="no rank has any part of a model")
    for name in sorted({name for holding in holdings for name in holding.held}):
        ranks = [number for number, holding in enumerate(holdings) if name in holding.held]
        pieces = [holdings[number].held[name] for number in ranks]
        check_cover(name, [piece.box for piece in pieces])
        check_copies(name, dict(zip(ranks, pieces, strict=True)))


def check_copies(name: str, pieces: Mapping[int, HeldShard]) -> None:
    """Refuse shards of one box, by rank, that have other bits or are frozen on some ranks only."""
    first: dict[Box, tuple[int, HeldShard]] = {}
    for number, piece in pieces.items():
        other, same = first.setdefault(piece.box, (number, piece))
        if piece.box.numel and piece.bits != same.bits and not piece.is_buffer:
            raise ConfigError(
                f"{name!r} differs on ranks {other} and {number}, which both hold this part",
                hint="replicas must be equal: load one checkpoint on all, or shard as DTensors; "
                "and reduce the gradients of weights that DDP or FSDP ignores",
            )
        if piece.frozen != same.frozen:
            frozen, trained = (other, number) if same.frozen else (number, other)
            raise ConfigError(
                f"{name!r} is frozen on rank {frozen}, trained on rank {trained}",
                hint="freeze the same weights on every rank",
            )
