"""Copies on the host of tensors that an engine stores in another form than its checkpoint."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy.typing as npt
from torch import Tensor

from deltachain import errors
from deltachain.kernels.protocol import kernels_for, same_bits
from deltachain.types import TensorSpec, Version

from .engine import EngineModel
from .layout.discover import Layout
from .layout.fresh_load import expect_fresh
from .layout.loaded_checkpoint import LoadedCheckpoint, tensor_of
from .layout.model_state import LoadGroup, LoadMethod, load_with, scope_of


class HostCopies:
    """Copies of the tensors that an engine does not hold as they are in the checkpoint."""

    def __init__(
        self, model: EngineModel, source: LoadedCheckpoint, specs: Mapping[str, TensorSpec]
    ) -> None:
        self._model, self._source, self._specs = model, source, specs
        self.bits: dict[str, npt.NDArray[Any]] = {}

    def keep(self, names: Iterable[str]) -> None:
        """Keep copies of these tensors alone; new ones have the bits of the checkpoint."""
        kept = self.bits
        self.bits = {
            name: kept[name] if name in kept else self._source.bits(name) for name in names
        }

    def load(self, layout: Layout, names: Collection[str]) -> None:
        """Let the engine load changed copies, together with the rest of their groups."""
        changed = _groups_of(layout, names)
        for method in dict.fromkeys(method for method, _ in changed):
            groups = [group for mine, group in changed if mine == method]
            wanted = [name for group in groups for name in group.names if name in self.bits]
            load_with(self._model, method, scope_of(groups), self.clones(wanted))

    def read_back(self, layout: Layout, names: Collection[str]) -> None:
        """Prove that loaded tensors are what was loaded, and layers are what a fresh load gives."""
        fresh = [group for _, group in _groups_of(layout, names) if group in layout.comparable]
        # First, and in order: ranks may exchange values while they quantise.
        expect_fresh(self._model, fresh, self.clones, self._specs)
        for name in layout.readable.keys() & set(names):
            for place in layout.readable[name]:
                if not same_bits(place.view, place.take(self.bits[name])):
                    raise errors.TensorMismatchError(
                        f"{name!r} is not what was loaded", tensor=name
                    )

    def load_old(self, layout: Layout, names: Collection[str], version: Version) -> None:
        """Load copies that have the old bits again; a failure poisons the replica."""
        try:
            self.load(layout, names)
            self.read_back(layout, names)
        except Exception as exc:
            raise errors.PoisonedError(
                f"the engine could load neither version {version} nor the old bits: {exc}",
                version=version,
            ) from exc

    def clones(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            for here in self._source.names[name]:
                bits = self.bits[name]
                yield here, tensor_of(self._specs[name], kernels_for(bits).copy(bits))


def _groups_of(layout: Layout, names: Collection[str]) -> list[tuple[LoadMethod, LoadGroup]]:
    return [(way, g) for way, g in layout.groups if not set(names).isdisjoint(g.names)]
