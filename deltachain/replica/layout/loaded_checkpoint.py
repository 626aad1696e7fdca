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
        checkpoint: Its files.
        specs: The chain's tensors.
        aliases: Other names of tied ones; those in the checkpoint are loaded as well.

    Attributes:
        names: Of every tensor of the chain, those under which the checkpoint has it; none where it
            has not.
        present: Tensors of the chain that the checkpoint has.
        loaded: What the engine is given, by the names of the checkpoint.

    Raises:
        TensorMismatchError: A tensor has another dtype or shape; or the checkpoint has none.
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
        """Tensors in the checkpoint all elements of which are equal."""
        return frozenset(name for name in self.present if not varied(self.bits(name)))

    def bits(self, name: str) -> LiveBits:
        """Flat bits of a tensor of the chain, as the checkpoint has it."""
        return self.checkpoint.bits(self.names[name][0])

    def other(self, name: str, turn: int = 0) -> LiveBits:
        """Other bits of a tensor, flat."""
        return live_bits(bits_of(other_bits(tensor_of(self.specs[name], self.bits(name)), turn)))

    def copy(self, name: str) -> npt.NDArray[Any]:
        """A copy of the flat bits of a tensor, which may be changed."""
        return self.checkpoint.bits(self.names[name][0]).copy()

    def clones(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors for a loader, under every name in the checkpoint, made one at a time.

        Those that the checkpoint has not are zeros.
        """
        for name in names:
            for here in self.names[name]:
                yield here, tensor_of(self.specs[name], self.bits(name))
            if not self.names[name]:
                spec = self.specs[name]
                yield name, torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])

    def meta(self) -> dict[str, Tensor]:
        """Tensors without bits, by the names of the checkpoint."""
        return {
            here: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            for here, spec in self.loaded.items()
        }


def tensor_of(spec: TensorSpec, bits: LiveBits) -> Tensor:
    """A tensor of its own with these bits: loaders edit what they are given."""
    copied = bits.clone() if isinstance(bits, Tensor) else torch.from_numpy(bits.copy())
    return copied.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
