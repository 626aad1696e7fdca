"""Targets in memory: a dict of tensors, or a torch module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
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

    Addresses never change. Tied weights may be one tensor or several; each place is written once.

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

    @override
    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        places = {name: [name] for name in specs}
        for alias, name in aliases.items():
            if name in places:
                places[name].append(alias)
        self._live = {name: self._places(specs[name], names) for name, names in places.items()}
        self._specs, self._aliases = specs, aliases
        self._refuse_shared()
        unknown = sorted(set(self._tensors) - set(specs) - set(aliases))
        if unknown:
            raise TensorMismatchError(
                f"{unknown[0]!r} and {len(unknown) - 1} more tensors of the target are not in the "
                "chain",
                tensor=unknown[0],
            )

    @override
    def close(self) -> None:
        pass

    def _current(self) -> dict[str, Tensor]:
        """Return the present tensors: casting or loading a module may have replaced them."""
        source = self._source
        return dict(named_tensors(source) if isinstance(source, nn.Module) else source)

    def _has_moved(self) -> bool:
        """Return whether the bound tensors were replaced; if so, bind the present ones."""
        current = self._current()
        bound = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        if {name: tensor.data_ptr() for name, tensor in current.items()} == bound:
            return False
        self._tensors = current
        self.bind(self._specs, self._aliases)
        return True

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
        owner: dict[int, str] = {}
        for name, live in self._live.items():
            for bits in (place.bits for place in live):
                at = kernels_for(bits).address(bits)
                if len(bits) and owner.setdefault(at, name) != name:
                    raise TensorMismatchError(
                        f"{owner[at]!r} and {name!r} are tied in the target, not in the chain",
                        tensor=name,
                    )

    def _places(self, spec: TensorSpec, names: list[str]) -> list[WholeTensor]:
        """Return every distinct piece of memory with a tensor."""
        found = {self._tensors[n].data_ptr(): n for n in reversed(names) if n in self._tensors}
        if not found:
            raise TensorMismatchError(f"the target has no tensor {spec.name!r}", tensor=spec.name)
        return [_flat(self._tensors[name], name, spec) for name in reversed(found.values())]


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
    return WholeTensor(live_bits(bits_of(tensor)))
