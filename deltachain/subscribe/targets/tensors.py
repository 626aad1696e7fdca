"""Targets in memory: a dict of tensors, or a torch module."""

import json
import logging
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.chain.checks import asset_path
from deltachain.chain.fetch import Fetched
from deltachain.chain.identity import read_asset
from deltachain.checkpoint import ID_END, LIBRARY, RUNTIME, fields, settings_of
from deltachain.delta import Piece, TensorDelta, pieces
from deltachain.kernels.protocol import kernels_for, same_bits
from deltachain.kernels.torch_kernels import bits_of, live_bits, on_streams_of_caller
from deltachain.subscribe.targets import tensor_patch
from deltachain.subscribe.targets.base import HeldVersion, PatchedTarget, Write, write_all
from deltachain.threads import Pool, cores
from deltachain.torch_names import WIRE_NAMES, named_tensors, unwrapped
from deltachain.types import Bits, StateDigest, TensorSpec, check_spec

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CONFIG: Final = "config.json"

_NAMES: Final = frozenset(
    {*RUNTIME, LIBRARY, "id2label", "label2id", "finetuning_task", "task_specific_params"}
)
"""Fields on which the outputs do not depend: names, and what a caller chooses."""


def say_other_config(module: nn.Module, chain: Chain) -> None:
    """Warn if a module has another configuration than the chain, which no name or shape tells."""
    config = getattr(unwrapped(module), "config", None)
    ref = next((one for one in chain.identity.assets if asset_path(one) == _CONFIG), None)
    if ref is None or not (mine := settings_of(config)):
        return
    theirs = _completed(config, read_asset(chain.store, ref))
    if found := differences(mine, theirs):
        logger.warning(
            "the module and the chain at %s have different configurations: %s; with the same "
            "weights the module may compute something else",
            chain.store.url,
            ", ".join(found),
        )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    own, other = _deciding(mine), _deciding(theirs)
    return [
        f"{name} is {reprlib.repr(own.get(name))}, there {reprlib.repr(other.get(name))}"
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _deciding(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if value is not None
        and name not in _NAMES
        and not name.startswith("_")
        and not name.endswith(ID_END)
    }


def _completed(config: Any, data: bytes) -> dict[str, Any]:  # noqa: ANN401 - of transformers
    """Return the chain's configuration with the defaults of the module's class, if it reads it."""
    plain = fields(data)
    if not isinstance(plain, dict):
        return settings_of(config)
    try:
        whole = settings_of(type(config).from_dict(json.loads(data)))
    except Exception as exc:  # noqa: BLE001 - of any library
        logger.debug("%s is compared as it is: %s", _CONFIG, exc)
        whole = settings_of(config)
    return {**whole, **{k: v for k, v in plain.items() if k == "model_type" or k not in whole}}


class TensorTarget(PatchedTarget):
    """Tensors by checkpoint name, or a module, on the host or on devices, written in place.

    Tied weights may be one tensor or several; each place is written once. Tensors that were
    replaced, cast or moved are bound anew. Bound ones on the host cannot be resized.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | nn.Module) -> None:
        self.source = tensors
        self._tensors = self._current()
        self._live: dict[str, list[tensor_patch.WholeTensor]] = {}
        self._specs: Mapping[str, TensorSpec] = {}
        self._aliases: Mapping[str, str] = {}
        self._held: HeldVersion | None = None
        self._forms: Mapping[str, _Form] = {}

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
            others = f" and {len(unknown) - 1} more tensors" if unknown[1:] else ""
            raise errors.TensorMismatchError(
                f"not in the chain: {unknown[0]!r}{others} of the target",
                tensor=unknown[0],
                hint="give the tensors of the chain alone: `deltachain inspect URL --table`",
            )
        self._forms = self._forms_of(self._tensors)

    @staticmethod
    def _forms_of(tensors: Mapping[str, Tensor]) -> "dict[str, _Form]":
        return {name: _form(tensor) for name, tensor in tensors.items()}

    def close(self) -> None:
        pass

    def _current(self) -> dict[str, Tensor]:
        if isinstance(self.source, nn.Module):
            return dict(named_tensors(self.source))
        for name, tensor in self.source.items():
            if not isinstance(tensor, Tensor):
                raise errors.ConfigError(
                    f"{name!r} of the target is a {type(tensor).__name__}, not a torch tensor",
                    hint="give torch.empty(shape, dtype=dtype), or torch.from_numpy(array)",
                )
        return dict(self.source)

    def _has_moved(self) -> bool:
        if not self.is_altered():
            return False
        self._tensors = self._current()
        self.bind(self._specs, self._aliases)
        return True

    def is_altered(self) -> bool:
        # An address is not reused: the bits of a bound tensor keep its memory.
        return self._forms_of(self._current()) != self._forms

    @override
    def ordered(
        self, pool: Pool, function: Callable[[Piece], _T], some: Iterable[Piece]
    ) -> Iterator[_T]:
        devices = {tensor.device for tensor in self._tensors.values()}
        return super().ordered(pool, on_streams_of_caller(function, devices), some)

    def held(self) -> HeldVersion | None:
        return self._held

    def state(self) -> StateDigest | None:
        self._has_moved()
        with Pool(cores()) as pool:
            whole = pieces(self._specs.values(), self.piece_nbytes)
            return tensor_patch.sum_states(self.ordered(pool, self._state_of, whole))

    def _state_of(self, piece: Piece) -> StateDigest | None:
        name = piece.spec.name
        live = self._live[name]
        if any(not same_bits(live[0].bits, other.bits) for other in live[1:]):
            return None
        return tensor_patch.state_of(self._specs[name], live[0])

    def patches(
        self, fetched: Fetched, piece: Piece, *, base_too: bool | None
    ) -> Iterator[tensor_patch.Patch]:
        name = piece.spec.name
        delta = fetched.read(name, partial(self._bits, name))
        if fetched.from_nothing and not delta.is_dense:
            raise errors.BrokenChainError(
                f"{name}: the plan from nothing gives only {delta.nnz} elements"
            )
        yield self.prepare(delta, base_too=base_too)

    def prepare(self, delta: TensorDelta, *, base_too: bool | None = True) -> tensor_patch.Patch:
        places = self._live[delta.spec.name]
        return tensor_patch.prepare(places[0], delta, base_too=base_too, exchange=len(places) == 1)

    def _bits(self, name: str) -> Bits:
        live: Any = self._live[name][0].bits
        return live if isinstance(live, np.ndarray) else live.cpu().numpy().view(self._dtype(name))

    def _dtype(self, name: str) -> np.dtype[Any]:
        return self._specs[name].bits_dtype

    def write(self, patches: Iterable[tensor_patch.Patch], held: HeldVersion) -> None:
        if self._has_moved():
            raise errors.BaseMismatchError(
                f"version {held.version}: the target's tensors were replaced or written to since; "
                "nothing was written",
                version=held.version,
            )
        before, self._held = self._held, None
        try:
            writes = (Write(patch, self._live[patch.spec.name]) for patch in patches)
            write_all(writes, held.version)
        except errors.PartialApplyError:
            self._held = before
            raise
        self._held = held
        for tensor in self._tensors.values():
            if not tensor.is_inference():  # a backward pass of earlier weights is an error of torch
                torch.autograd.graph.increment_version(tensor)
        self._forms = self._forms_of(self._tensors)

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
                raise errors.TensorMismatchError(
                    f"{one!r} and {other!r} are tied in the target, not in the chain",
                    tensor=other,
                    hint="give each name memory of its own, or tie them in the trainer",
                )

    def _places(self, spec: TensorSpec, names: list[str]) -> list[tensor_patch.WholeTensor]:
        known = {n: _form(self._tensors[n]).address for n in reversed(names) if n in self._tensors}
        found = {address: name for name, address in known.items()}
        if not found:
            hint = (
                "the target is not the model of this chain, or one whose weights transformers "
                "saves in another form (experts, some layers): follow into a folder, or an engine"
            )
            if isinstance(self.source, Mapping):
                hint = "a dict must have all tensors of the chain: `deltachain inspect URL --table`"
            raise errors.TensorMismatchError(
                f"the target has no tensor {spec.name!r}", tensor=spec.name, hint=hint
            )
        return [_flat(self._tensors[name], name, spec) for name in reversed(found.values())]


class _Form(NamedTuple):
    """Where a tensor is, what, and how often it was written to; not through ``.data``."""

    device: torch.device
    address: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    writes: int


def _form(tensor: Tensor) -> _Form:
    if tensor.layout != torch.strided:
        return _Form(tensor.device, 0, 0, tensor.dtype, tensor.shape, (), 0)
    return _Form(
        tensor.device,
        tensor.data_ptr(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        0 if tensor.is_inference() else tensor._version,
    )


def _flat(tensor: Tensor, name: str, spec: TensorSpec) -> tensor_patch.WholeTensor:
    found = WIRE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)
    hint = "load the target in the chain's dtype"
    if found[1] != tuple(spec.shape):
        hint = "the target is not the model of this chain: `deltachain inspect URL --table`"
    check_spec(name, found, "the target", spec, hint=hint)
    if tensor.layout != torch.strided or tensor.is_neg():
        raise errors.TensorMismatchError(
            f"{name!r} has no bits of its own in the target: it is sparse, or a negated view",
            tensor=name,
            hint="give the target dense tensors",
        )
    if not tensor.is_contiguous():
        raise errors.TensorMismatchError(
            f"{name!r} is not contiguous in the target",
            tensor=name,
            hint="give the target contiguous tensors",
        )
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.is_meta or (tensor.numel() and needed > tensor.untyped_storage().nbytes()):
        raise errors.TensorMismatchError(
            f"{name!r} has no memory in the target: it is on the meta device, or was freed",
            tensor=name,
            hint="load the weights before the first update, and update while they are loaded",
        )
    bits = live_bits(bits_of(tensor))
    if isinstance(bits, np.ndarray) and len(bits) and not _is_writable(bits):
        raise errors.TensorMismatchError(
            f"{name!r} is in memory that cannot be written to, as of a file mapped for reading",
            tensor=name,
            hint="give the target a copy of the tensor (`.clone()`)",
        )
    return tensor_patch.WholeTensor(bits)


def _is_writable(bits: Bits) -> bool:
    """Return whether the system lets the first byte be written; a write would end the process."""
    byte = bits.view(np.uint8)[:1].data
    source, sink = os.pipe()
    try:
        os.write(sink, byte)
        os.readv(source, [byte])
    except OSError:  # EFAULT
        return False
    finally:
        os.close(source)
        os.close(sink)
    return True
