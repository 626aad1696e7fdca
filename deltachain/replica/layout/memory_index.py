"""Find owners of tensors that share memory; views of one storage may have no common element."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from deltachain.replica.layout.provenance import storage_id


class MemoryIndex:
    """An index of tensors by the memory that they view, meta tensors included.

    Args:
        tensors: Pairs of owner and tensor; an owner may have several tensors.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in tensors:
            if tensor.numel():
                self._tensors[storage_id(tensor)].append((name, tensor))
        self._tied: dict[str, set[str]] = defaultdict(set)
        for sharing in self._tensors.values():
            self._note_tied(sharing)

    def overlapping(self, tensor: Tensor) -> frozenset[str]:
        """Return the owners of tensors that share an element with this one."""
        sharing = self._tensors.get(storage_id(tensor), ())
        return frozenset(name for name, other in sharing if overlap(tensor, other))

    def in_storage_of(self, tensor: Tensor) -> frozenset[str]:
        """Return the owners of tensors in the same storage."""
        return frozenset(name for name, _ in self._tensors.get(storage_id(tensor), ()))

    def tied(self, names: frozenset[str]) -> frozenset[str]:
        """Return the given owners, and those whose tensors share an element with theirs."""
        return names.union(*(self._tied.get(name, ()) for name in names))

    def _note_tied(self, sharing: list[tuple[str, Tensor]]) -> None:
        for at, (name, tensor) in enumerate(sharing):
            for other, theirs in sharing[:at]:
                if other != name and overlap(tensor, theirs):
                    self._tied[name].add(other)
                    self._tied[other].add(name)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common."""
    if one is other:
        return bool(one.numel())
    (first, last), (start, end) = _span(one), _span(other)
    if first >= end or start >= last:
        return False
    if _is_dense(one) and _is_dense(other):
        return True
    if one.element_size() != other.element_size():
        return True  # as far as is known: only flat buffers are viewed in two widths
    base = min(one.storage_offset(), other.storage_offset())
    width = one.element_size()
    taken = torch.zeros(max(last, end) // width - base, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - base).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - base).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets of a tensor's first byte in its storage and of the end after its last."""
    width, first = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return first * width, first * width
    return first * width, (first + _reach(tensor)) * width


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor have no gaps between them."""
    return tensor.numel() == _reach(tensor)


def _reach(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)
