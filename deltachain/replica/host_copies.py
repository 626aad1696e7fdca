"""Copies of tensors on the host, which the engine loads by its own methods."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy.typing as npt
from torch import Tensor

from deltachain.errors import PoisonedError, TensorMismatchError
from deltachain.kernels.protocol import same_bits
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.discover import Layout
from deltachain.replica.layout.fresh_load import expect_fresh
from deltachain.replica.layout.load_methods import LoadGroup, LoadMethod, load_with
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, tensor_of
from deltachain.types import TensorSpec, Version


class HostCopies:
    """Copies of the tensors that an engine does not hold as they are in the checkpoint.

    Args:
        model: Model of the engine.
        source: The checkpoint that the engine loaded.
        specs: Specs of the chain's tensors.
    """

    def __init__(
        self, model: EngineModel, source: LoadedCheckpoint, specs: Mapping[str, TensorSpec]
    ) -> None:
        self._model, self._source, self._specs = model, source, specs
        self._bits: dict[str, npt.NDArray[Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._bits[name]

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors that have a copy."""
        return frozenset(self._bits)

    def keep(self, names: Iterable[str]) -> None:
        """Keep copies of these tensors alone; new ones have the bits of the checkpoint."""
        self._bits = {
            name: self._bits[name] if name in self._bits else self._source.copy(name)
            for name in names
        }

    def load(self, layout: Layout, names: Collection[str]) -> None:
        """Let the engine load changed copies, together with the rest of their groups.

        Raises:
            Exception: Any error of the engine.
        """
        changed = _groups_of(layout, names)
        for way in dict.fromkeys(way for way, _ in changed):
            groups = [group for mine, group in changed if mine == way]
            layers = frozenset().union(*(group.layers for group in groups))
            if not all(group.layers for group in groups):
                layers = frozenset()
            wanted = [name for group in groups for name in group.names if name in self._bits]
            load_with(self._model, way, layers, self.clones(wanted))

    def read_back(self, layout: Layout, names: Collection[str]) -> None:
        """Prove that loaded tensors are stored where they can be read back, and layers are fresh.

        Raises:
            TensorMismatchError: A live tensor holds other bits than were loaded, or a layer is not
                what a fresh load gives.
        """
        fresh = [group for _, group in _groups_of(layout, names) if group in layout.comparable]
        # First, and in order: ranks may exchange values while they quantise.
        expect_fresh(self._model, fresh, self.clones, self._specs)
        for name in layout.readable.keys() & set(names):
            for place in layout.readable[name]:
                if not same_bits(place.view, place.take(self._bits[name])):
                    raise TensorMismatchError(f"{name!r} is not what was loaded", tensor=name)

    def load_old(self, layout: Layout, names: Collection[str], version: Version) -> None:
        """Load copies that have the old bits again.

        Args:
            layout: Layout of the rank.
            names: Tensors that a swap changed.
            version: Version that could not be loaded, for the error message.

        Raises:
            PoisonedError: The engine cannot load them, either.
        """
        try:
            self.load(layout, names)
            self.read_back(layout, names)
        except Exception as exc:
            raise PoisonedError(
                f"the engine could load neither version {version} nor the old bits: {exc}",
                version=version,
            ) from exc

    def clones(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of copies under all names that the engine's checkpoint has for them."""
        for name in names:
            for here in self._source.names[name]:
                yield here, tensor_of(self._specs[name], self._bits[name])


def _groups_of(layout: Layout, names: Collection[str]) -> list[tuple[LoadMethod, LoadGroup]]:
    """Return the groups with one of the tensors, and the methods that load them."""
    return [(way, g) for way, g in layout.groups if not set(names).isdisjoint(g.names)]
