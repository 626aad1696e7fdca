"""Weights of a live model, with the names and dtypes of its checkpoint."""

import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.format.documents import Table
from deltachain.kernels import host, torch_kernels
from deltachain.publish.config import AS_IN_MODEL
from deltachain.publish.model import refusals, wire_dtypes
from deltachain.publish.model.assets import with_config_watched
from deltachain.publish.model.conversion import Conversion, Destination, Moved, conversions
from deltachain.publish.model.flat_shards import gathers_state, named_shards
from deltachain.publish.model.layout import Box, ElementMap, ElementRun, local_of, local_shard
from deltachain.torch_names import TORCH_DTYPES, WIRE_NAMES, unwrapped
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)

_YIELD: Final = "yield names and torch tensors, as model.named_parameters() or tensors.items() do"


@dataclass(frozen=True, slots=True)
class Weight:
    spec: TensorSpec
    tensor: Tensor  # the live shard; of collected weights shape and dtype only, on the meta device
    frozen: bool  # a matrix that is not trained, which is part of anchors and digests only
    element_map: ElementMap
    is_buffer: bool = False  # its values may differ between ranks
    writes: int = 0  # in place, so far
    file: Callable[[int, int], Tensor] | None = None
    """Reads the flat elements ``[low, high)`` of a frozen weight in a file."""

    @classmethod
    def straight(cls, spec: TensorSpec, tensor: Tensor, *, frozen: bool) -> "Weight":
        return cls(spec, tensor, frozen, ElementMap.straight(spec))

    def now(self, tensor: Tensor, writes: int) -> "Weight":
        """Return this weight with its current tensor; `replace` takes twice as long."""
        return Weight(self.spec, tensor, self.frozen, self.element_map, self.is_buffer, writes)


class HeldShard(msgspec.Struct, frozen=True):
    """One rank's shard of a live tensor, and a digest that its copies must have."""

    box: Box
    frozen: bool
    is_buffer: bool
    bits: str


TensorSource: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]
"""Function that yields all tensors with unique names, called again for every version."""


@dataclass(frozen=True, slots=True)
class MovedExport:
    """An export of tensors that a checkpoint has renamed, cut apart, joined or transposed."""

    live: TensorSource
    moved: Moved

    def __call__(self) -> Iterable[tuple[str, Tensor]]:
        return self.live()


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """All tensors of a model's checkpoint, tied ones once."""

    weights: tuple[Weight, ...]  # published by this rank, sorted by name
    specs: tuple[TensorSpec, ...]  # of all checkpoint tensors, of other ranks too, sorted by name
    aliases: Mapping[str, str]  # published name by further name of a tied weight
    live: TensorSource
    agree: Callable[[str], None] = lambda _: None
    """Called by every rank before each iteration over the live tensors, with a unique name of the
    version: tensors may depend on weights of other ranks."""
    copies: Callable[[str], dict[str, HeldShard]] = lambda _: {}
    """Digests shards that other ranks have too; of the same parts on each for the same name."""
    ext: Mapping[str, Any] = field(default_factory=dict)  # of the chain's table
    attached: refusals.ModelForm | None = None  # the module as it was attached
    one_by_one: bool = False
    """Whether each live tensor must be used before the next one is taken: an export may use its
    memory again at once."""
    has_own_checks: bool = False  # `live` refuses scales that are not finite

    def live_weights(self) -> Iterator[Weight]:
        """Yield the weights with their current tensors, in the order of ``live``.

        A module is compared with the attached one first. No references to tensors are kept, since
        loading a state may replace them, and an export creates new ones each time.
        """
        missing = {weight.spec.name: weight for weight in self.weights}
        live = self.live()
        if self.attached is not None:
            live = list(live)
            frozen = {name for name, weight in missing.items() if weight.frozen}
            refusals.refuse_changes(self.attached, live, frozen=frozen)
        for name, tensor in live:
            weight = missing.pop(name, None)
            if weight is None:
                continue
            local = local_of(tensor)
            if self.attached is None:
                refusals.refuse_other_kind(name, local, weight.tensor)
            if not self.has_own_checks:
                refusals.refuse_scale(weight.spec, local)
                refusals.refuse_overflow(weight.spec, local)
            # As far as torch counts them: not those by `.data`.
            writes = 0 if tensor.is_inference() else tensor._version
            if local is not tensor and not local.is_inference():
                writes += local._version
            yield weight.now(local, writes)
        for name in missing:
            raise UnsupportedModelError(f"{name!r} {refusals.GONE}", hint=refusals.SAME_TENSORS)

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs)

    @property
    def held_numel(self) -> int:
        return sum(weight.element_map.box.numel for weight in self.weights)

    @property
    def held_nbytes(self) -> int:
        return sum(w.element_map.box.numel * w.spec.itemsize for w in self.weights)

    def table(self) -> Table:
        rows = tuple((spec.name, spec.dtype, spec.shape) for spec in self.specs)
        aliases = dict(sorted(self.aliases.items()))
        return Table(ext=dict(self.ext), tensors=rows, aliases=aliases)


def cast_to(dtype: str, tensor: Tensor) -> Tensor:
    """Cast a tensor to a wire dtype; NaNs of fp32 masters become those of every device."""
    wanted = TORCH_DTYPES[dtype]
    if tensor.dtype != torch.float32 or wanted != torch.bfloat16:
        return tensor.to(wanted)
    if torch_kernels.on_host(tensor):
        bits = torch.from_numpy(
            host.cast_bf16(torch_kernels.host_array(tensor.reshape(-1), np.float32))
        )
    else:
        bits = torch_kernels.cast_bf16(torch_kernels.bits_of(tensor))
    return bits.view(wanted).view(tensor.shape)


def collect_weights(
    model: nn.Module | TensorSource,
    *,
    dtype: str | None = None,
    checkpoint: Path | None = None,
    alone: bool = False,
) -> ModelTensors:
    as_in_model = dtype == AS_IN_MODEL
    dtype = None if as_in_model else dtype
    if not isinstance(model, nn.Module):
        return _collect_export(model, dtype)
    wrapper, model = model, unwrapped(model)
    refusals.refuse_model(wrapper, model)
    refusals.say_wrapped(model)
    for name, tensor in _live_tensors(wrapper):
        refusals.refuse_lazy(name, tensor)
    live, aliases = _distinct(wrapper)
    shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
    shapes |= {alias: shapes[name] for alias, name in aliases.items()}
    converted = conversions(model, shapes)
    warnings: list[str] = []
    known = None
    if not as_in_model:
        known = _known_dtypes(model, live, converted, checkpoint, warnings.append)
    wire = {} if dtype else known or {}
    # A base says the bits of version 0, and their dtypes.
    kept = frozenset() if checkpoint else wire_dtypes.kept_in_fp32(model, live)
    weights = [
        _weight(name, live[name], converted.get(name), dtype, {} if name in kept else wire)
        for name in sorted(live)
    ]
    specs = specs_of(slot.spec for weight in weights for slot in weight.element_map.slots)
    for warning in filter(None, () if dtype else warnings):
        logger.warning(warning)
    wire_dtypes.say_dtypes(((one.spec, one.tensor.dtype) for one in weights), dtype, known)
    renamed = {name: one.targets[0].name for name, one in converted.items()}
    named = {renamed.get(a, a): renamed.get(name, name) for a, name in aliases.items()}
    held = list(named_shards(wrapper))
    attached = refusals.ModelForm.of(held)
    shared = refusals.sharing(held, {weight.spec.name for weight in weights if weight.frozen})
    weights = [replace(w, frozen=w.frozen and w.spec.name not in shared) for w in weights]
    if alone and not any(parameter.requires_grad for parameter in model.parameters()):
        # Nobody publishes a model that never changes: something else writes to it, as to an
        # average of weights, or in an evolution strategy.
        weights = [replace(weight, frozen=False) for weight in weights]
    live_now = with_config_watched(model, partial(_live_tensors, wrapper))
    return ModelTensors(tuple(weights), specs, named, live_now, attached=attached)


def _known_dtypes(
    model: nn.Module,
    live: Mapping[str, Tensor],
    converted: Mapping[str, Conversion],
    checkpoint: Path | None,
    warn: wire_dtypes.Warn,
) -> Mapping[str, str]:
    own: dict[str, TensorSpec] = {}
    for name, tensor in live.items():
        dtype = WIRE_NAMES.get(tensor.dtype)
        if dtype is not None and name in converted:
            own |= {t.name: TensorSpec(t.name, dtype, t.shape) for t in converted[name].targets}
        elif dtype is not None:
            own[name] = TensorSpec(name, dtype, tuple(tensor.shape))
    if checkpoint is not None:
        return wire_dtypes.given_dtypes(checkpoint, own, warn)
    straight = {name: tensor for name, tensor in live.items() if name not in converted}
    return wire_dtypes.origin_dtypes(wire_dtypes.origin(model), own, straight, warn)


def _live_tensors(wrapper: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if gathers_state(wrapper):
        return named_shards(wrapper)
    model = unwrapped(wrapper)
    saved = model.state_dict(keep_vars=True)
    refusals.refuse_other_names(model, saved)
    return named_shards(model, saved)


def _collect_export(live: TensorSource, dtype: str | None) -> ModelTensors:
    if not callable(live):
        raise ConfigError(
            f"a {type(live).__name__} is neither a module nor a function that yields tensors",
            hint="give the module, or the function without calling it; of a dict of tensors, "
            "attach(lambda: tensors.items())",
        )
    converted: Mapping[str, Conversion] = {}
    if isinstance(live, MovedExport):
        shapes = {name: tuple(tensor.shape) for name, tensor in _yielded(live)}
        converted = conversions(live.moved, shapes)
    made = (_weight(name, one, converted.get(name), dtype, {}) for name, one in _yielded(live))
    found = [replace(one, frozen=False, is_buffer=False) for one in made]
    wire_dtypes.say_dtypes(((one.spec, one.tensor.dtype) for one in found), dtype, None)
    weights = tuple(sorted(found, key=lambda one: one.spec.name))
    specs = specs_of(slot.spec for weight in weights for slot in weight.element_map.slots)
    live_now = partial(_yielded, live, frozenset(one.spec.name for one in found))
    return ModelTensors(weights, specs, {}, live_now, one_by_one=True)


def _yielded(
    live: TensorSource, known: frozenset[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield what an export yields, once it is seen to be names (``known`` ones) and tensors."""
    found: object = live()
    if not isinstance(found, Iterable):
        raise ConfigError(f"the export returned a {type(found).__name__}", hint=_YIELD)
    seen: set[str] = set()
    for item in found:
        match item:
            case (str(name), Tensor() as tensor):
                # Also of one tensor twice: one made anew may lie where the first one was.
                if name in seen:
                    raise UnsupportedModelError(
                        f"the export gives {name!r} twice",
                        hint="tensors that the checkpoint has joined must be yielded joined, once",
                    )
                if known is not None and name not in known:
                    message = f"{name!r} {refusals.NEW}"
                    raise UnsupportedModelError(message, hint=refusals.SAME_TENSORS)
                seen.add(name)
                refusals.refuse_lazy(name, tensor)
                yield name, tensor
            case _:
                raise ConfigError(
                    f"the export yielded {reprlib.repr(item)}, not a name and a tensor", hint=_YIELD
                )
    if known and not seen:
        raise UnsupportedModelError(
            "the export yielded no tensors",
            hint="it is called for each version, and must return a new iterator each time",
        )


def _weight(
    name: str,
    tensor: Tensor,
    conversion: Conversion | None,
    dtype: str | None,
    wire: Mapping[str, str],
) -> Weight:
    local, box = local_shard(name, tensor)
    refusals.refuse_tensor(name, local)
    shape = tuple(tensor.shape)
    goes = conversion or Conversion((Destination(name, shape, 0, 0, tensor.numel()),))
    wanted = wire_dtypes.wire_dtype([t.name for t in goes.targets], local, dtype, wire)
    slots = tuple(
        ElementRun(TensorSpec(t.name, wanted, t.shape), t.start, t.at, t.numel)
        for t in goes.targets
    )
    # Vectors are always compared, at no cost: trainers of experts move biases without a gradient.
    is_buffer = not isinstance(tensor, nn.Parameter)
    frozen = not is_buffer and not tensor.requires_grad and len(shape) > 1
    spec = TensorSpec(name, wanted, shape)
    gone = torch.empty(local.shape, dtype=local.dtype, device="meta")
    return Weight(spec, gone, frozen, ElementMap(box, slots, goes.axes), is_buffer)


def specs_of(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        have = found.setdefault(spec.name, spec)
        if have != spec:
            raise UnsupportedModelError(f"{spec.name!r} is both {have} and {spec}")
    return tuple(sorted(found.values(), key=lambda spec: spec.name))


def _distinct(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors by the name that checkpoints have, and the other names of tied ones.

    Checkpoints of transformers leave out the names that the model calls tied to others.
    """
    left_out = getattr(unwrapped(model), "all_tied_weights_keys", None) or {}
    names: dict[int, list[str]] = {}
    live: dict[str, Tensor] = {}
    for name, tensor in named_shards(model):
        if live.setdefault(name, tensor) is not tensor:
            raise UnsupportedModelError(
                f"two weights of the model are called {name!r} once unwrapped"
            )
        names.setdefault(id(tensor), []).append(name)
    aliases: dict[str, str] = {}
    for tied in names.values():
        chosen = next((name for name in tied if name not in left_out), tied[0])
        aliases |= {name: chosen for name in tied if name != chosen}
    return {name: live[name] for name in live if name not in aliases}, aliases
