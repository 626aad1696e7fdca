"""Weights of a live model, with the names and dtypes of its checkpoint."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.format.documents import Table
from deltachain.kernels.device_diff import Compared
from deltachain.kernels.reference import Changes
from deltachain.publish.config import AS_IN_MODEL
from deltachain.publish.model.conversion import Conversion, Destination, conversions
from deltachain.publish.model.described import with_config_watched
from deltachain.publish.model.layout import ElementMap, ElementRun
from deltachain.publish.model.look import SAME_TENSORS, ModelForm, refuse_changes
from deltachain.publish.model.origin import Known, given_dtypes, origin, origin_dtypes
from deltachain.publish.model.refusals import (
    refuse_adapters,
    refuse_lazy,
    refuse_other_names,
    refuse_outside,
    refuse_overflow,
    refuse_scale,
    refuse_tensor,
    say_wrapped,
)
from deltachain.publish.model.shard import local_of, local_shard, refuse_foreign
from deltachain.publish.model.wire_dtypes import kept_in_fp32, say_dtypes, wire_dtype
from deltachain.publish.snapshot_memory import Kept
from deltachain.torch_names import WIRE_NAMES, named_tensors, unwrapped
from deltachain.types import Bits, TensorSpec


class Pending(Protocol):
    """A tensor of the checkpoint that is yet to be made, of weights that are at hand.

    Must be used before the next tensor of the same source, which may use its memory again.
    """

    @property
    def device(self) -> torch.device:
        """Device of these weights."""

    def to(self, device: torch.device) -> Pending:
        """Return it with a copy of these weights on a device."""

    def make(self) -> Tensor:
        """Make the tensor, in new memory on its device.

        Raises:
            ConfigError: It cannot be made: a weight is not finite, for example.
        """

    def diff_(self, snapshot: Bits) -> Changes:
        """Find its elements that differ from a snapshot, and copy them there; host only.

        Args:
            snapshot: Flat bits.

        Raises:
            ConfigError: It cannot be made; the snapshot is as it was.
        """

    def compared(self, name: str, kept: Kept) -> Compared:
        """Return it as a tensor for the diff on a device.

        Whether it can be made may be known only after that diff, which is then taken back.
        """


logger = logging.getLogger(__name__)

_YIELD: Final = "yield names and torch tensors, as model.named_parameters() or tensors.items() do"


@dataclass(frozen=True, slots=True)
class Weight:
    """Shard of one model tensor on this rank.

    Attributes:
        spec: Name in the model, wire dtype, and shape of the whole tensor.
        tensor: Local part of the live parameter or buffer; collected weights keep its shape and
            dtype only, on the meta device.
        frozen: Whether it is a matrix that is not trained; it is then part of anchors and digests
            only.
        element_map: Map from its elements to those of the checkpoint.
        is_buffer: Whether it is a buffer, whose values may differ between ranks.
        writes: Writes in place to the parameter or buffer so far.
        pending: What the tensor is made of, if that is left to the diff; ``tensor`` has no data
            then.
    """

    spec: TensorSpec
    tensor: Tensor
    frozen: bool
    element_map: ElementMap
    is_buffer: bool = False
    writes: int = 0
    pending: Pending | None = None

    @property
    def device(self) -> torch.device:
        """Device of what is published."""
        return self.tensor.device if self.pending is None else self.pending.device

    @classmethod
    def straight(cls, spec: TensorSpec, tensor: Tensor, *, frozen: bool) -> Weight:
        """Return the weight of a whole tensor with equal name and shape in the checkpoint."""
        return cls(spec, tensor, frozen, ElementMap.straight(spec))


PendingSource: TypeAlias = Callable[[], Iterable[tuple[str, Tensor | Pending]]]
"""Function that yields tensors, some of which are still to be made."""

TensorSource: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]
"""Function that yields all tensors with unique names, called again for every version."""


def _without_others(topic: str) -> None:
    """Agree with nobody: the tensors of a rank depend on no other rank."""
    del topic


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """All tensors of a model's checkpoint, tied ones once.

    Attributes:
        weights: Weights published by this rank, sorted by name.
        specs: Specs of all checkpoint tensors, also of other ranks, sorted by name.
        aliases: Published name by further name of a tied weight.
        live: Function that yields the live tensors.
        agree: Function that every rank calls before each iteration over the live tensors, with a
            unique name of the version: tensors may depend on weights of other ranks.
        ext: Extension data of the chain's table, part of its identity.
        attached: The module on this rank when it was attached; ``None`` for other sources.
        one_by_one: Whether each live tensor must be used before the next one is taken: an export
            makes its tensors anew each time, and may use their memory again at once.
        has_own_checks: Whether ``live`` refuses scales that are not finite.
    """

    weights: tuple[Weight, ...]
    specs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    live: PendingSource
    agree: Callable[[str], None] = _without_others
    ext: Mapping[str, Any] = field(default_factory=dict)
    attached: ModelForm | None = None
    one_by_one: bool = False
    has_own_checks: bool = False

    def live_weights(self) -> Iterator[Weight]:
        """Yield the weights with their current tensors, in the order of ``live``.

        A module is compared with the attached one before its first weight is yielded. No references
        to tensors are kept, since loading a state may replace them, and an export creates new ones
        each time.

        Raises:
            ConfigError: The module or a yielded tensor is not as it was when it was attached, has
                no bits of its own, or is a scale that is not finite.
        """
        missing = {weight.spec.name: weight for weight in self.weights}
        live: Iterable[tuple[str, Tensor | Pending]] = self.live()
        if self.attached is not None:
            live = list(live)
            frozen = {name for name, weight in missing.items() if weight.frozen}
            now = ModelForm.of((name, one) for name, one in live if isinstance(one, Tensor))
            refuse_changes(self.attached, now, frozen=frozen)
        for name, tensor in live:
            weight = missing.pop(name, None)
            if weight is not None and not isinstance(tensor, Tensor):
                yield replace(weight, pending=tensor)
            elif weight is not None and isinstance(tensor, Tensor):
                local = local_of(tensor)
                if self.attached is None:
                    _check_yielded(weight, local)
                if not self.has_own_checks:
                    refuse_scale(weight.spec, local)
                    refuse_overflow(weight.spec, local)
                writes = _writes_to(tensor, local)
                yield replace(weight, tensor=local, pending=None, writes=writes)
        if missing:
            raise UnsupportedModelError(
                f"{min(missing)!r} is gone since the publisher was attached", hint=SAME_TENSORS
            )

    @property
    def numel(self) -> int:
        """Number of elements of the checkpoint."""
        return sum(spec.numel for spec in self.specs)

    @property
    def held_numel(self) -> int:
        """Number of elements published by this rank."""
        return sum(weight.element_map.box.numel for weight in self.weights)

    @property
    def held_nbytes(self) -> int:
        """Size of the elements published by this rank, in bytes."""
        return sum(w.element_map.box.numel * w.spec.itemsize for w in self.weights)

    def table(self) -> Table:
        """Return the chain's tensor table."""
        rows = tuple((spec.name, spec.dtype, spec.shape) for spec in self.specs)
        aliases = dict(sorted(self.aliases.items()))
        return Table(ext=dict(self.ext), tensors=rows, aliases=aliases)


def _check_yielded(weight: Weight, local: Tensor) -> None:
    """Check that a tensor of an export is like the first one of its name."""
    name, then = weight.spec.name, weight.tensor
    if (local.shape, local.dtype) != (then.shape, then.dtype):
        raise UnsupportedModelError(
            f"{name!r} is {local.dtype}{tuple(local.shape)}, and was {then.dtype}"
            f"{tuple(then.shape)} when the publisher was attached",
            hint=SAME_TENSORS,
        )
    refuse_tensor(name, local)


def collect_weights(
    model: nn.Module | TensorSource,
    *,
    dtype: str | None = None,
    checkpoint: Path | None = None,
    alone: bool = False,
) -> ModelTensors:
    """Collect the parameters and buffers of a model in this process, tied ones once.

    Args:
        model: Model on any device, wrapped or not, whole or sharded as DTensors; or an export,
            which yields the tensors of a checkpoint in the dtypes to publish.
        dtype: Wire dtype of every floating point weight; ``model`` for that in the model.
        checkpoint: Folder of the model's checkpoint, for the wire dtypes; by default the folder
            that the model was loaded from, if any.
        alone: Whether no other rank publishes. A model without any parameter that requires a
            gradient is then compared whole; ranks would have to agree on that.

    Raises:
        ConfigError: The model cannot be published as it is; the hint names an alternative.
    """
    as_in_model = dtype == AS_IN_MODEL
    dtype = None if as_in_model else dtype
    if not isinstance(model, nn.Module):
        return _collect_export(model, dtype)
    wrapper, model = model, unwrapped(model)
    say_wrapped(model)
    refuse_outside(wrapper, model)
    refuse_foreign(model)
    refuse_adapters(model)
    refuse_lazy(named_tensors(model))
    refuse_other_names(model, model.state_dict(keep_vars=True))
    live, aliases = _distinct(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
    shapes |= {alias: shapes[name] for alias, name in aliases.items()}
    converted = conversions(model, shapes)
    found = Known() if as_in_model else _known_dtypes(model, live, converted, checkpoint)
    wire = {} if dtype else found.dtypes
    # A base says the bits of version 0, and their dtypes.
    kept = frozenset() if checkpoint else kept_in_fp32(model, live)
    weights = [
        replace(
            _weight(name, live[name], converted.get(name), dtype, {} if name in kept else wire),
            is_buffer=not isinstance(live[name], nn.Parameter),
        )
        for name in sorted(live)
    ]
    specs = specs_of(slot.spec for weight in weights for slot in weight.element_map.slots)
    if found.warning and not dtype:
        logger.warning(found.warning)
    known = None if as_in_model else found.dtypes
    say_dtypes(((one.spec, one.tensor.dtype) for one in weights), dtype, known)
    renamed = {name: one.targets[0].name for name, one in converted.items()}
    named = {renamed.get(a, a): renamed.get(name, name) for a, name in aliases.items()}
    attached = ModelForm.of(named_tensors(model))
    shared = attached.shared({weight.spec.name for weight in weights if weight.frozen})
    weights = [replace(w, frozen=w.frozen and w.spec.name not in shared) for w in weights]
    if alone and not any(parameter.requires_grad for parameter in model.parameters()):
        # Nobody publishes a model that never changes: something else writes to it, as to an
        # average of weights, or in an evolution strategy.
        weights = [replace(weight, frozen=False) for weight in weights]
    live_now = with_config_watched(model, partial(_live_tensors, model))
    return ModelTensors(tuple(weights), specs, named, live_now, attached=attached)


def _known_dtypes(
    model: nn.Module,
    live: Mapping[str, Tensor],
    converted: Mapping[str, Conversion],
    checkpoint: Path | None,
) -> Known:
    """Return the wire dtypes of the model's checkpoint, by the names there."""
    own: dict[str, TensorSpec] = {}
    for name, tensor in live.items():
        dtype = WIRE_NAMES.get(tensor.dtype)
        if dtype is not None and name in converted:
            own |= {t.name: TensorSpec(t.name, dtype, t.shape) for t in converted[name].targets}
        elif dtype is not None:
            own[name] = TensorSpec(name, dtype, tuple(tensor.shape))
    if checkpoint is not None:
        return given_dtypes(checkpoint, own)
    straight = {name: tensor for name, tensor in live.items() if name not in converted}
    return origin_dtypes(origin(model), own, straight)


def _live_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model, once its ``state_dict`` is seen to have them by their names."""
    saved = model.state_dict(keep_vars=True)
    refuse_other_names(model, saved)
    return named_tensors(model, saved)


def _writes_to(*tensors: Tensor) -> int:
    """Return how often they were written in place, as far as torch counts: not by ``.data``."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _collect_export(live: TensorSource, dtype: str | None) -> ModelTensors:
    """Collect the tensors of an export, without keeping references."""
    if not callable(live):
        raise ConfigError(
            f"a {type(live).__name__} is neither a module nor a function that yields tensors",
            hint="give the module itself; of a dict of tensors, attach(lambda: tensors.items())",
        )
    weights: dict[str, Weight] = {}
    for name, tensor in _yielded(live):
        weight = _weight(name, tensor.detach(), None, dtype, {})
        weights[name] = replace(weight, frozen=False)
    say_dtypes(((one.spec, one.tensor.dtype) for one in weights.values()), dtype, None)
    found = tuple(weights[name] for name in sorted(weights))
    specs = specs_of(weight.element_map.slots[0].spec for weight in found)
    live_now = partial(_yielded, live, frozenset(weights))
    return ModelTensors(found, specs, {}, live_now, one_by_one=True)


def _yielded(
    live: TensorSource, known: frozenset[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield what an export yields, once it is seen to be names and tensors.

    Args:
        live: The export.
        known: Names that it yielded on this rank when it was attached; ``None`` at that time.

    Raises:
        ConfigError: It yields something else, a name twice, or a name that is not known.
    """
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
                    raise UnsupportedModelError(
                        f"{name!r} was not there when the publisher was attached",
                        hint=SAME_TENSORS,
                    )
                seen.add(name)
                refuse_lazy([(name, tensor)])
                yield name, tensor
            case _:
                raise ConfigError(
                    f"the export yielded {reprlib.repr(item)}, not a name and a tensor", hint=_YIELD
                )


def _weight(
    name: str,
    tensor: Tensor,
    conversion: Conversion | None,
    dtype: str | None,
    wire: Mapping[str, str],
) -> Weight:
    local, box = local_shard(name, tensor)
    refuse_tensor(name, local)
    goes = conversion or Conversion((Destination(name, box.full, 0, 0, tensor.numel()),))
    wanted = wire_dtype([t.name for t in goes.targets], local, dtype, wire)
    slots = tuple(
        ElementRun(TensorSpec(t.name, wanted, t.shape), t.start, t.at, t.numel)
        for t in goes.targets
    )
    # Vectors are always compared, at no cost: trainers of experts move biases without a gradient.
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad and len(box.full) > 1
    spec = TensorSpec(name, wanted, box.full)
    gone = torch.empty(local.shape, dtype=local.dtype, device="meta")
    return Weight(spec, gone, frozen, ElementMap(box, slots, goes.table))


def specs_of(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the distinct specs, sorted by name.

    Raises:
        ConfigError: Two different specs have the same name.
    """
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        have = found.setdefault(spec.name, spec)
        if have != spec:
            raise UnsupportedModelError(f"{spec.name!r} is both {have} and {spec}")
    return tuple(sorted(found.values(), key=lambda spec: spec.name))


def _distinct(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors by the name that checkpoints have, and the other names of tied ones.

    Checkpoints of transformers leave out the names that the model calls tied to others; of other
    models, the first name counts.
    """
    left_out = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[int, list[str]] = {}
    live: dict[str, Tensor] = {}
    for name, tensor in named_tensors(model):
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
