"""The checkpoint that an engine loaded, by the names of the chain."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from deltachain.checkpoint import Checkpoint
from deltachain.errors import TensorMismatchError
from deltachain.kernels import host
from deltachain.kernels.protocol import LiveBits, kernels_for
from deltachain.kernels.torch_kernels import bits_of, live_bits
from deltachain.replica.placements import Placement
from deltachain.subscribe.targets.tensor_patch import varied
from deltachain.threads import Pool
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec, check_spec

from .load_recorder import Load
from .module_members import Provenance, tensors_in

_T = TypeVar("_T")

WeightsFactory: TypeAlias = Callable[[Iterable[str]], Iterable[tuple[str, Tensor]]]
"""Factory of checkpoint tensors, by chain name; new ones at each call, since loaders edit them."""

LARGE: Final = 16.0
"""Magnitude above which numbers are decreased, not increased: eight-bit formats end at 240."""

FIRST: Final = 1 << 12
"""Number of elements that show of nearly every tensor that they are not all equal."""

PIECE: Final = 8 << 20  # bytes that are read at a time, into memory that is used again

ALONE: Final = 1 << 16
"""Bytes of a tensor from which on another thread makes it."""

PERIOD: Final = 524_287
"""Number of random steps: a prime above the rows of a vocabulary, so no two rows share them."""


def mixed(
    source: "LoadedCheckpoint", names: Iterable[str], others: Iterable[str], turn: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors for a loader, ``others`` with other bits; the next are made meanwhile."""
    changed = frozenset(others)

    def make(name: str) -> list[tuple[str, Tensor]]:
        made = source.clones([name])
        return [(n, other_bits(one, turn)) for n, one in made] if name in changed else list(made)

    for pairs in made_ahead(make, names, source.specs):
        yield from pairs


def made_ahead(
    make: Callable[[str], _T], names: Iterable[str], specs: Mapping[str, TensorSpec]
) -> Iterator[_T]:
    """Yield what is made of names, in order; the next is made in another thread meanwhile.

    What is made of a small tensor is made by the caller: a thread would take longer to ask.
    """
    with Pool(1, "deltachain-ahead") as pool:
        yield from pool.ordered(make, names, ahead=2, small=lambda n: specs[n].nbytes < ALONE)


def other_bits(tensor: Tensor, turn: int = 0) -> Tensor:
    """Change every element of a tensor on the host by more than rounding, in place.

    Numbers are multiplied by a power of two, large ones divided; integers get other bits. Equal
    elements become different, to show where each of them goes. The results of turns 0 and 1 differ
    too, except booleans, to show which of two equal tensors is stored somewhere.
    """
    if tensor.dtype is torch.bool:
        return tensor.logical_not_()
    words = bits_of(tensor).numpy().view(f"i{tensor.itemsize}")
    grid, (unit, change) = words.reshape(tensor.shape), _change_of(tensor.dtype)
    lines = [dim for dim in (-2, -1) if grid.ndim >= -dim and grid.shape[dim] > 1]
    before = {dim: grid.take(-1, dim).ravel() for dim in lines}
    for start in range(0, words.size, PERIOD):
        part = words[start : start + PERIOD]
        change(part, _steps(words.size, words.dtype, unit, turn)[: part.size])
    # No row or column is its own mirror image, so each of them reveals a loader that reverses
    # them, even where a rank has few. A corner may have to change twice.
    for dim, last in (*before.items(), *before.items()):
        moved = np.moveaxis(grid, dim, 0)
        first, end = moved[:1], moved[-1:]
        ways = [last.copy() for _ in range(3)]
        for power, way in enumerate(ways, 1):
            change(way, np.full_like(way, power * unit))
        one, two, three = (way.reshape(end.shape) for way in ways)
        following = np.where(end == one, two, np.where(end == two, three, one))
        np.copyto(end, following, where=first == end)
    return tensor


@lru_cache(maxsize=16)
def _steps(numel: int, word: npt.DTypeLike, unit: int, turn: int) -> npt.NDArray[Any]:
    """Return random multiples, one to three, of a unit; at most as many as a period has."""
    seeded = torch.Generator().manual_seed(numel)
    drawn = torch.randint(0, 3, (min(numel, PERIOD),), generator=seeded)
    return ((1 + (drawn + turn) % 3) * unit).numpy().astype(word)


@cache
def _change_of(dtype: torch.dtype) -> tuple[int, Callable[..., object]]:
    """Return a unit, and a function that changes words in place by multiples of it."""
    if not dtype.is_floating_point or dtype is torch.float8_e8m0fnu:
        return 1, lambda words, steps: np.bitwise_xor(words, steps, out=words)
    one, large = (int(bits_of(torch.tensor(number).to(dtype))) for number in (1.0, LARGE))
    exponent = round(1 / torch.finfo(dtype).eps)
    return exponent, lambda words, steps: host.rescale_(words, steps, one, large)


def flipped_bit(dtype: torch.dtype) -> int:
    """Return the last bit of a number's exponent, as an integer; that of an integer itself."""
    return 1 if dtype is torch.bool else _change_of(dtype)[0]


logger = logging.getLogger(__name__)

Owners: TypeAlias = Callable[[Tensor], frozenset[str]]
"""Function that returns the layers with an element of a tensor; none outside the model."""


def layers_of(
    load: Load,
    names: Mapping[str, Tensor],
    owners: Owners,
    modules: Mapping[str, nn.Module] | None = None,
) -> dict[str, frozenset[str]]:
    """Find the layers that each checkpoint tensor is loaded into; no owned tensor is written."""
    found: dict[str, set[str]] = defaultdict(set)
    if not _try_load(load, names, owners, modules or {}, found):
        for name in [name for name in names if name not in found]:
            _try_load(load, {name: names[name]}, owners, modules or {}, found)
    return {name: frozenset(layers) for name, layers in found.items()}


class _Watch(TorchDispatchMode):
    """Dispatch mode that records the layer of each meta tensor, and writes no live tensor."""

    def __init__(
        self, inputs: Mapping[str, Tensor], owners: Owners, found: dict[str, set[str]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.provenance = Provenance(inputs)
        self.owners, self.found = owners, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        del types
        sources = self.provenance.sources((args, kwargs))
        writes = func._schema.is_mutable and args and isinstance(args[0], Tensor)
        layers = self.owners(args[0]) if writes else frozenset()
        if layers:
            for name in sources:
                self.found[name] |= layers
        elif writes:
            self.provenance.made(args[0], sources)
        from_meta = func is torch.ops.aten.copy_.default and args[1].is_meta
        if writes and not args[0].is_meta and (from_meta or layers):
            return args[0]
        returned = func(*args, **(kwargs or {}))
        if not layers:
            self.provenance.made(returned, sources)
        return returned

    def look(self, modules: Mapping[str, nn.Module]) -> None:
        for layer, module in modules.items():
            made = [tensor for _, tensor in tensors_in(module) if not is_lazy(tensor)]
            for name in self.provenance.sources(made):
                self.found[name].add(layer)


def _try_load(
    load: Load,
    inputs: Mapping[str, Tensor],
    owners: Owners,
    modules: Mapping[str, nn.Module],
    found: dict[str, set[str]],
) -> bool:
    """Return whether a load of all tensors succeeded; a tensor that fails is in no layer."""
    try:
        with torch.no_grad(), _Watch(inputs, owners, found) as watch:
            load(list(inputs.items()))
        watch.look(modules)
    except Exception as exc:  # noqa: BLE001 - any error of a loader is a result
        logger.debug("no layer for %d tensors: %s", len(inputs), exc)
        return False
    return True


class LoadedCheckpoint:
    def __init__(
        self, checkpoint: Checkpoint, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]
    ) -> None:
        self.checkpoint = checkpoint
        self.specs = specs
        self.owner = {**{name: name for name in specs}, **aliases}
        self.names: dict[str, list[str]] = {name: [] for name in specs}
        for here, name in self.owner.items():
            if here in checkpoint.specs and name in specs:
                self.names[name].append(here)
        self.loaded: dict[str, TensorSpec] = {}
        for name, spec in specs.items():
            for here in self.names[name]:
                check_spec(here, checkpoint.specs[here], checkpoint.path, spec)
                self.loaded[here] = checkpoint.specs[here]
        self.present = [name for name in specs if self.names[name]]
        if not self.loaded:
            name = next(iter(specs), "")
            raise TensorMismatchError(
                f"{checkpoint.path} has no {name!r}: the engine loaded another model", tensor=name
            )

    @cached_property
    def uniform(self) -> frozenset[str]:
        """Tensors whose elements are all equal."""
        return frozenset(
            name
            for name in self.present
            if not varied(self.bits(name, FIRST)) and not varied(self.bits(name))
        )

    def bits(self, name: str, high: int | None = None, low: int = 0) -> npt.NDArray[Any]:
        """Return the bits of a tensor, or of its elements ``[low, high)``."""
        return self.checkpoint.bits(self.names[name][0], low, high)

    def parts(self, name: str, place: Placement) -> Iterator[tuple[Any, LiveBits]]:
        """Yield the bits of a place, where it is, by blocks of its view; a large one in several."""
        most = PIECE // self.specs[name].itemsize
        if not place.is_run or place.numel <= most:
            yield ..., place.take(self.bits(name))
            return
        for start in range(0, place.numel, most):
            stop = min(start + most, place.numel)
            bits = self.bits(name, place.offset + stop, low=place.offset + start)
            yield slice(start, stop), kernels_for(place.storage).receive(bits, place.storage)

    def other(self, name: str, turn: int = 0) -> LiveBits:
        return live_bits(bits_of(other_bits(tensor_of(self.specs[name], self.bits(name)), turn)))

    def clones(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors for a loader, under every name in the checkpoint, one at a time.

        Tensors that are not in the checkpoint are zeros.
        """
        for name in names:
            for here in self.names[name]:
                yield here, tensor_of(self.specs[name], self.bits(name))
            if not self.names[name]:
                spec = self.specs[name]
                yield name, torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])

    def meta(self) -> dict[str, Tensor]:
        return {
            here: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            for here, spec in self.loaded.items()
        }


def tensor_of(spec: TensorSpec, bits: LiveBits) -> Tensor:
    """Return a tensor over these bits, which a loader that gets it may edit."""
    flat = bits if isinstance(bits, Tensor) else torch.from_numpy(bits)
    return flat.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
