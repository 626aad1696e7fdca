"""Which checkpoint tensors a tensor is, is a view of, or was computed from, while a loader runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Provenance:
    """Sources of tensors, by storage.

    Args:
        inputs: The checkpoint tensors that a loader is given, by name.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._owner = {storage_id(tensor): name for name, tensor in inputs.items()}
        self._made: dict[int, frozenset[str]] = {}
        self._kept: list[Tensor] = []

    def owner(self, tensor: Tensor) -> str | None:
        """The checkpoint tensor that a tensor is, or is a view of."""
        return self._owner.get(storage_id(tensor))

    def sources(self, values: Any) -> frozenset[str]:  # noqa: ANN401
        """The checkpoint tensors that any of some values are, or were made from."""
        found: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                storage = storage_id(leaf)
                found |= self._made.get(storage, frozenset())
                if storage in self._owner:
                    found |= {self._owner[storage]}
        return found

    def made(self, values: Any, sources: frozenset[str]) -> None:  # noqa: ANN401
        """Remember what the tensors among some values were made from."""
        for tensor in tree_leaves(values) if sources else ():
            if isinstance(tensor, Tensor) and storage_id(tensor) not in self._owner:
                storage = storage_id(tensor)
                self._made[storage] = self._made.get(storage, frozenset()) | sources
                self._kept.append(tensor)  # or its storage might be given to another


def storage_id(tensor: Tensor) -> int:
    """What tells storages apart, those on the meta device included."""
    return int(tensor.untyped_storage()._cdata)
