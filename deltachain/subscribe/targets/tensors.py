"""Targets in memory: a dict of tensors, or a torch module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from deltachain.delta import TensorDelta
from deltachain.errors import BaseMismatchError, PartialApplyError, TensorMismatchError
from deltachain.kernels.device import bits_of, live_bits
from deltachain.kernels.protocol import kernels_for, same_bits
from deltachain.subscribe.targets.base import HeldVersion, Write, write_all
from deltachain.subscribe.targets.live import WholeTensor, state_of, sum_states
from deltachain.subscribe.targets.local import PatchedTarget
from deltachain.subscribe.targets.patch import Patch, prepare
from deltachain.threads import Pool, cores
from deltachain.torch_names import WIRE_NAMES, named_tensors
from deltachain.types import Bits, StateDigest, TensorSpec, check_spec


class TensorTarget(PatchedTarget):
    """Tensors by checkpoint name, on the host or on devices, written in place.

    Tied weights may be one tensor or several; each place is written once. Tensors that were
    replaced, cast or moved since are bound anew. While they are bound, torch cannot resize the
    storage of those on the host.

    Args:
        tensors: Contiguous tensors, or a module.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | nn.Module) -> None:
        self._source = tensors
        self._tensors = self._current()
        self._live: dict[str, list[WholeTensor]] = {}
        self._specs: Mapping[str, TensorSpec] = {}
        self._aliases: Mapping[str, str] = {}
        self._held: HeldVersion | None = None
        self._forms: Mapping[str, _Form] = {}

    @override
    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        self._specs, self._aliases, self._forms = specs, aliases, {}
        places = {name: [name] for name in specs}
        for alias, name in aliases.items():
            if name in places:
                places[name].append(alias)
        self._live = {name: self._places(specs[name], names) for name, names in places.items()}
        self._refuse_shared()
        unknown = sorted(set(self._tensors) - set(specs) - set(aliases))
        if unknown:
            raise TensorMismatchError(
                f"{unknown[0]!r} and {len(unknown) - 1} more tensors of the target are not in the "
                "chain",
                tensor=unknown[0],
            )
        self._forms = {name: _form(tensor) for name, tensor in self._tensors.items()}

    @override
    def close(self) -> None:
        pass

    def _current(self) -> dict[str, Tensor]:
        """Return the present tensors: casting or loading a module may have replaced them."""
        source = self._source
        return dict(named_tensors(source) if isinstance(source, nn.Module) else source)

    def _has_moved(self) -> bool:
        """Return whether the bound tensors were replaced; if so, bind the present ones."""
        if not self.is_altered():
            return False
        self._tensors = self._current()
        self.bind(self._specs, self._aliases)
        return True

    @override
    def is_altered(self) -> bool:
        # An address is not reused: the bits of a bound tensor keep its memory.
        return {name: _form(tensor) for name, tensor in self._current().items()} != self._forms

    @override
    def held(self) -> HeldVersion | None:
        return self._held

    @override
    def state(self) -> StateDigest | None:
        self._has_moved()
        with Pool(cores()) as pool:
            return sum_states(self.ordered(pool, self._state_of, self._specs))

    def _state_of(self, name: str) -> StateDigest | None:
        """Return the state digest of one tensor; ``None`` if tied weights are not equal."""
        live = self._live[name]
        if any(not same_bits(live[0].bits, other.bits) for other in live[1:]):
            return None
        return state_of(self._specs[name], live[0])

    @override
    def bits(self, name: str) -> Bits:
        live: Any = self._live[name][0].bits
        return live if isinstance(live, np.ndarray) else live.cpu().numpy().view(self._dtype(name))

    def _dtype(self, name: str) -> np.dtype[Any]:
        return self._specs[name].bits_dtype

    @override
    def prepare(self, delta: TensorDelta, *, base_too: bool = True) -> Patch:
        places = self._live[delta.spec.name]
        return prepare(places[0], delta, base_too=base_too, exchange=len(places) == 1)

    @override
    def write(self, patches: Iterable[Patch], held: HeldVersion) -> None:
        if self._has_moved():
            raise BaseMismatchError(
                f"version {held.version}: the target's tensors were replaced since; nothing was "
                "written",
                version=held.version,
            )
        before, self._held = self._held, None
        try:
            writes = (Write(patch, self._live[patch.spec.name]) for patch in patches)
            write_all(writes, held.version)
        except PartialApplyError:
            self._held = before
            raise
        self._held = held

    def _refuse_shared(self) -> None:
        """Refuse two tensors of the chain in the same memory: they would overwrite one another."""
        places = [(name, place.bits) for name, live in self._live.items() for place in live]
        ranges = sorted(
            (str(getattr(bits, "device", "cpu")), start, start + bits.nbytes, name)
            for name, bits in places
            if (start := kernels_for(bits).address(bits)) and bits.nbytes
        )
        for (device, _, stop, one), (near, start, _, other) in pairwise(ranges):
            if device == near and start < stop:
                raise TensorMismatchError(
                    f"{one!r} and {other!r} are tied in the target, not in the chain",
                    tensor=other,
                )

    def _places(self, spec: TensorSpec, names: list[str]) -> list[WholeTensor]:
        """Return every distinct piece of memory with a tensor."""
        found = {self._tensors[n].data_ptr(): n for n in reversed(names) if n in self._tensors}
        if not found:
            raise TensorMismatchError(f"the target has no tensor {spec.name!r}", tensor=spec.name)
        return [_flat(self._tensors[name], name, spec) for name in reversed(found.values())]


class _Form(NamedTuple):
    """Where a tensor is, and what."""

    device: torch.device
    address: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


def _form(tensor: Tensor) -> _Form:
    at, storage = tensor.data_ptr(), tensor.untyped_storage()
    return _Form(tensor.device, at, storage.nbytes(), tensor.dtype, tensor.shape, tensor.stride())


def _flat(tensor: Tensor, name: str, spec: TensorSpec) -> WholeTensor:
    """Return the flat live bits of a tensor, after a check against its spec."""
    found = WIRE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)
    hint = "load the target in the dtype of the chain (`deltachain log URL` shows it)"
    check_spec(name, found, "the target", spec, hint=hint)
    if not tensor.is_contiguous():
        raise TensorMismatchError(
            f"{name!r} is not contiguous in the target",
            tensor=name,
            hint="give the target contiguous tensors",
        )
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.is_meta or (tensor.numel() and needed > tensor.untyped_storage().nbytes()):
        raise TensorMismatchError(
            f"{name!r} has no memory in the target: it is on the meta device, or was freed",
            tensor=name,
            hint="load the weights before the first update, and update while they are loaded",
        )
    return WholeTensor(live_bits(bits_of(tensor)))
