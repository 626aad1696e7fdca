"""One look at a live model: what its tensors are, without their elements, and what is different.

Nothing is kept of a look but numbers: no tensor, and no address that is read from again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.refusals import refuse_tensor
from deltachain.publish.model.shard import is_sharded, local_of

SAME_TENSORS: Final = (
    "all versions of a chain have the same tensors: attach another publisher, at a URL of its own"
)

_BETWEEN: Final = (
    f"publish between steps, when FSDP has sharded everything again; otherwise {SAME_TENSORS}"
)


class MemoryRange(NamedTuple):
    """Where the elements of a live tensor are on this rank; for comparison, never to read there."""

    device: str
    start: int
    stop: int


class TensorForm(NamedTuple):
    """What a live tensor is on this rank.

    Attributes:
        dtype: Its dtype.
        shape: Shape of the part on this rank.
        full: Shape of the whole tensor.
        placement: Placements and mesh of a ``DTensor``; ``None`` for a plain one.
        is_trained: Whether it requires a gradient.
        memory: Where its elements are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    full: tuple[int, ...]
    placement: object
    is_trained: bool
    memory: MemoryRange

    @property
    def kept(self) -> tuple[object, ...]:
        """What must stay as it is."""
        return self[:4]

    def __str__(self) -> str:
        """Return dtype and shape, and the placement of a ``DTensor``."""
        placed = "" if self.placement is None else f" of {self.full}, {self.placement}"
        return f"{self.dtype}{self.shape}{placed}"


@dataclass(frozen=True, slots=True)
class ModelForm:
    """What a live model is on this rank.

    Attributes:
        tensors: Its parameters and persistent buffers, by each of their names.
        ties: First name by further name of a tied tensor.
    """

    tensors: Mapping[str, TensorForm]
    ties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, live: Iterable[tuple[str, Tensor]]) -> ModelForm:
        """Look at all tensors of a model; no element is read.

        Raises:
            ConfigError: A tensor has no bits of its own, or its memory is gone.
        """
        first: dict[int, str] = {}
        tensors: dict[str, TensorForm] = {}
        ties: dict[str, str] = {}
        for name, tensor in live:
            seen = first.setdefault(id(tensor), name)
            if seen == name:
                tensors[name] = form_of(name, tensor)
            else:
                tensors[name], ties[name] = tensors[seen], seen
        return cls(tensors, ties)

    def shared(self, frozen: Collection[str]) -> frozenset[str]:
        """Return those of some tensors whose memory another tensor has a part of.

        Args:
            frozen: Names of tensors that are not compared; those of others do not count.
        """
        if not frozen:
            return frozenset()
        found: set[str] = set()
        still: list[tuple[MemoryRange, str]] = []  # frozen ones that may reach the next tensor
        written = MemoryRange("", 0, 0)  # the compared one that reaches furthest
        for memory, name in sorted((form.memory, name) for name, form in self.tensors.items()):
            if name in self.ties or memory.start == memory.stop:
                continue
            if name in frozen:
                if memory.device == written.device and memory.start < written.stop:
                    found.add(name)
                still.append((memory, name))
                continue
            reached = (one for at, one in still if at.device == memory.device)
            found |= {one for one in reached if self.tensors[one].memory.stop > memory.start}
            still = []
            if memory.device != written.device or memory.stop > written.stop:
                written = memory
        return frozenset(found)


def form_of(name: str, tensor: Tensor) -> TensorForm:
    """Return what a live tensor is.

    Raises:
        ConfigError: It has no bits of its own, or its memory is gone.
    """
    local = local_of(tensor)
    refuse_tensor(name, local)
    start, placement = local.data_ptr(), None
    if is_sharded(tensor):
        sharded: Any = tensor
        placement = sharded.placements, sharded.device_mesh
    memory = MemoryRange(str(local.device), start, start + local.numel() * local.element_size())
    return TensorForm(
        local.dtype,
        tuple(local.shape),
        tuple(tensor.shape),
        placement,
        tensor.requires_grad,
        memory,
    )


def refuse_changes(then: ModelForm, now: ModelForm, *, frozen: Collection[str]) -> None:
    """Compare a model with what was attached; refuse what no version of the chain can have.

    Other elements, other memory and another device are followed.

    Args:
        then: The model when it was attached.
        now: The model as it is.
        frozen: Names of tensors that are not compared with the snapshot.

    Raises:
        ConfigError: A tensor is gone, new, of another shape, dtype or sharding, or parted from one
            that it was tied to; or a frozen one is trained, or in memory of one that is compared.
    """
    for name in (*then.tensors, *now.tensors):
        if name not in now.tensors:
            raise UnsupportedModelError(
                f"{name!r} is gone since the publisher was attached", hint=SAME_TENSORS
            )
        if name not in then.tensors:
            raise UnsupportedModelError(
                f"{name!r} was not there when the publisher was attached", hint=SAME_TENSORS
            )
    for name, form in now.tensors.items():
        _refuse_change(name, then.tensors[name], form, is_frozen=name in frozen)
    for name, other in then.ties.items():
        if now.tensors[name].memory != now.tensors[other].memory:
            raise UnsupportedModelError(
                f"{name!r} and {other!r} were one tensor when the publisher was attached, and are "
                "two now",
                hint="tie them again (`model.tie_weights()`), or attach another publisher, at a "
                "URL of its own",
            )
    for name in sorted(now.shared(frozen)):
        raise UnsupportedModelError(
            f"{name!r} was frozen when the publisher was attached, and is now in the memory of a "
            "weight that is trained",
            hint="close this publisher, and attach another one: the chain goes on from its head",
        )


def _refuse_change(name: str, then: TensorForm, now: TensorForm, *, is_frozen: bool) -> None:
    if now.kept != then.kept:
        raise UnsupportedModelError(
            f"{name!r} is {now}, and was {then} when the publisher was attached", hint=_BETWEEN
        )
    if is_frozen and now.is_trained:
        raise UnsupportedModelError(
            f"{name!r} was frozen when the publisher was attached, and is trained now",
            hint="close the publisher before unfreezing, and attach another one after it: the "
            "chain goes on from its head",
        )
