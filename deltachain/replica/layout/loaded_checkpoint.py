"""The checkpoint that an engine loaded, by the names of the chain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.errors import TensorMismatchError
from deltachain.kernels.device import bits_of, live_bits
from deltachain.kernels.protocol import LiveBits
from deltachain.replica.layout.other_bits import other_bits
from deltachain.subscribe.targets.patch import varied
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec, check_spec


class LoadedCheckpoint:
    """The checkpoint that the engine loaded, by the names of the chain.

    Args:
        checkpoint: Files of the checkpoint.
        specs: Specs of the chain's tensors.
        aliases: Other names of tied tensors; those in the checkpoint are loaded as well.

    Attributes:
        names: Checkpoint names of every tensor of the chain; empty for tensors not in the
            checkpoint.
        present: Tensors of the chain that are in the checkpoint.
        loaded: Tensors given to the engine, by checkpoint name.

    Raises:
        TensorMismatchError: A tensor has another dtype or shape, or the checkpoint has none of the
            tensors.
    """

    def __init__(
        self, checkpoint: Checkpoint, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]
    ) -> None:
        self.checkpoint = checkpoint
        self.specs = specs
        self.owner = {**{name: name for name in specs}, **aliases}
        self.names = {
            name: [n for n, of in self.owner.items() if of == name and n in checkpoint.specs]
            for name in specs
        }
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
        """Tensors in the checkpoint with only equal elements."""
        return frozenset(name for name in self.present if not varied(self.bits(name)))

    def bits(self, name: str) -> LiveBits:
        """Return the flat bits of a tensor of the chain in the checkpoint."""
        return self.checkpoint.bits(self.names[name][0])

    def other(self, name: str, turn: int = 0) -> LiveBits:
        """Return other bits for a tensor, flat."""
        return live_bits(bits_of(other_bits(tensor_of(self.specs[name], self.bits(name)), turn)))

    def copy(self, name: str) -> npt.NDArray[Any]:
        """Return a writable copy of the flat bits of a tensor."""
        return self.checkpoint.bits(self.names[name][0])

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
        """Return meta tensors, by checkpoint name."""
        return {
            here: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            for here, spec in self.loaded.items()
        }


def tensor_of(spec: TensorSpec, bits: LiveBits) -> Tensor:
    """Return a new tensor with these bits, since loaders may edit their input."""
    copied = bits.clone() if isinstance(bits, Tensor) else torch.from_numpy(bits.copy())
    return copied.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
