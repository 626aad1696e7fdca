"""Record the members, bits and outputs of an engine's model, find changes, and restore them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from deltachain.errors import EngineDamagedError, TensorMismatchError
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.load_methods import RELOADS, load_with, modules_in
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.members import (
    Members,
    MemoryIndex,
    SavedBits,
    is_opaque,
    numbers_in,
    same_number,
    storage_id,
)


class ModelState:
    """The members, bits and outputs of a model at one moment.

    Args:
        model: The rank's model; not in use meanwhile.
        bits: Saved bits of its live tensors.
        layers: Layers whose outputs are computed; all by default.
    """

    def __init__(
        self, model: EngineModel, bits: SavedBits, layers: frozenset[str] | None = None
    ) -> None:
        self.model = model
        self.bits = bits
        self.tensors = dict(model.tensors())
        modules = model.modules()
        self.owner = {name: layer_of(name, modules) for name in self.tensors}
        self.modules = modules
        self.memory = MemoryIndex((self.owner[name], one) for name, one in self.tensors.items())
        self._members = Members(modules.values())
        self.numbers = dict(_numbers(modules))
        self.processed = model.processed()
        self.outputs = self._compute(frozenset(modules) if layers is None else layers)

    @cached_property
    def opaque(self) -> frozenset[str]:
        """Processed layers without a testable output, but with members that cannot be inspected."""
        hidden = self.processed - self.outputs.keys()
        visible = {storage_id(tensor) for tensor in self.tensors.values()}
        return frozenset(
            layer
            for layer in hidden
            if any(is_opaque(module, visible) for module in modules_in(self.model, {layer}))
        )

    def changed(self, layers: frozenset[str] | None = None) -> frozenset[str]:
        """Return live tensors whose bits or memory have changed, and changed numbers.

        Args:
            layers: Layers to inspect; all by default.
        """
        now = self.model.tensors()
        numbers = dict(_numbers(self.modules))
        return frozenset(
            name
            for name, tensor in self.tensors.items()
            if (layers is None or self.owner[name] in layers)
            and (
                name not in now
                or now[name].data_ptr() != tensor.data_ptr()
                or self.bits.has_changed(tensor)
            )
        ) | frozenset(
            {name for name in now if name not in self.tensors}
            | {
                name
                for name, number in self.numbers.items()
                if not same_number(numbers.get(name), number)
                and (layers is None or layer_of(name, self.modules) in layers)
            }
        )

    def follows(self, layers: frozenset[str]) -> frozenset[str]:
        """Return layers whose output changed, or whose bits did if no output is needed or known.

        Only a layer with post-load processing may compute from a hidden copy.
        """
        found = set(self.other_outputs(layers))
        shown = self.outputs.keys() & self.processed
        for name, tensor in self.tensors.items():
            layer = self.owner[name]
            if layer in layers and layer not in shown and self.bits.has_changed(tensor):
                found.add(layer)
        return frozenset(found)

    def expect_same(self, layers: frozenset[str] = frozenset()) -> None:
        """Refuse any changed bit, moved tensor or changed output.

        Args:
            layers: Layers to inspect; empty for all.

        Raises:
            TensorMismatchError: There is such a change.
        """
        for name in sorted(self.changed(layers or None)):
            raise TensorMismatchError(f"{name} changed", tensor=name)
        for layer in sorted(self.other_outputs(layers or frozenset(self.outputs))):
            raise TensorMismatchError(f"{layer} computes something else", tensor=layer)

    def put_back(self, load: Callable[[], object] | None = None) -> None:
        """Restore the members and bits of the model.

        Args:
            load: Function that loads the first bits, and may raise. It is called if outputs still
                differ: loading may restore memory that cannot be inspected.
        """
        self._members.put_back()
        self.bits.put_back()
        if load is not None and self.other_outputs(frozenset(self.outputs)):
            with suppress(Exception):
                load()
            self.put_back()

    def other_outputs(self, layers: frozenset[str]) -> list[str]:
        """Return the layers whose output has changed."""
        wanted = layers & self.outputs.keys()
        now = self._compute(wanted)
        return [n for n in wanted if n not in now or not _same(now[n], self.outputs[n])]

    def _compute(self, layers: frozenset[str]) -> dict[str, Tensor]:
        with torch.no_grad():
            found = self.model.compute(layers) if layers else {}
        return {layer: output.detach().to("cpu", copy=True) for layer, output in found.items()}


def _numbers(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, float]]:
    for prefix, module in modules.items():
        for name, number in numbers_in(module):
            yield f"{prefix}.{name}" if prefix else name, number


def layer_of(name: str, modules: Mapping[str, object]) -> str:
    """Return the module that holds a live tensor, by the tensor's dotted name."""
    layer = name
    while layer:
        layer = layer.rpartition(".")[0]
        if layer in modules:
            return layer
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are the same, bit for bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pair = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*pair)


logger = logging.getLogger(__name__)


def restore_outputs(state: ModelState, source: LoadedCheckpoint) -> None:
    """Restore the model; if its outputs still differ, let it load its first weights again.

    Args:
        state: State of the model before the trials.
        source: The checkpoint that the engine loaded.

    Raises:
        EngineDamagedError: The outputs still differ after every attempt.
    """
    layers, tried = frozenset(state.modules), frozenset(state.outputs)
    state.put_back()
    for method in (*RELOADS, "loaded"):
        if not state.other_outputs(tried):
            return
        state.put_back(
            partial(load_with, state.model, method, layers, source.clones(source.present))
        )
    left = state.other_outputs(tried)
    if left:
        message = (
            f"{min(left)} computes something else after test loads; "
            "the engine keeps weights in memory that cannot be restored"
        )
        logger.critical("%s: restart the engine", message)
        raise EngineDamagedError(message)
