"""Provenance of tensors in a running loader: the checkpoint tensors that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Provenance:
    """Sources of tensors, by storage.

    Args:
        inputs: Checkpoint tensors given to the loader, by name.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._owner = {storage_id(tensor): name for name, tensor in inputs.items()}
        self._made: dict[int, frozenset[str]] = {}
        self._kept: list[Tensor] = []

    def owner(self, tensor: Tensor) -> str | None:
        """Return the checkpoint tensor that a tensor is, or is a view of."""
        return self._owner.get(storage_id(tensor))

    def sources(self, values: Any) -> frozenset[str]:  # noqa: ANN401
        """Return the checkpoint tensors that some values are, view, or were computed from."""
        found: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                storage = storage_id(leaf)
                found |= self._made.get(storage, frozenset())
                if storage in self._owner:
                    found |= {self._owner[storage]}
        return found

    def made(self, values: Any, sources: frozenset[str]) -> None:  # noqa: ANN401
        """Record the sources of the tensors among some values."""
        for tensor in tree_leaves(values) if sources else ():
            if isinstance(tensor, Tensor) and storage_id(tensor) not in self._owner:
                storage = storage_id(tensor)
                self._made[storage] = self._made.get(storage, frozenset()) | sources
                self._kept.append(tensor)  # otherwise another tensor might reuse its storage


def storage_id(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which may be on the meta device."""
    return int(tensor.untyped_storage()._cdata)
