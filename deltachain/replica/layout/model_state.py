"""The model of an engine at one moment, and the methods by which it loads tensors again.

Both engines build layers alike: a module with a ``weight`` and a ``quant_method``, which multiplies
by the weight, by a packed copy of it, or by another form of it made after loading.
"""

import dis
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from deltachain.errors import EngineDamagedError, TensorMismatchError
from deltachain.replica.engine import EngineModel
from deltachain.types import TensorSpec

from .loaded_checkpoint import LoadedCheckpoint, mixed
from .module_members import (
    Fingerprints,
    Members,
    MemoryIndex,
    SavedBits,
    SavedModel,
    in_threads,
    is_opaque,
    numbers_in,
    restoring,
    same_number,
    same_tensor,
    storage_id,
)

_G = TypeVar("_G")

COLUMNS: Final = 16  # number of columns of a weight that probing rows show

_RETURNING: Final = frozenset({"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"})
"""Instructions of a function that does nothing but return, in every Python since 3.11."""


def probing_rows(row: Tensor, seed: int) -> Tensor:
    """Return a row, and rows with a single one each, at columns chosen by a seed.

    ``row`` has no zeros, and the shape ``[1, columns]``; the result ``[1 + 16, columns]``, with
    fewer rows if there are fewer columns.
    """
    width = row.shape[1]
    chosen = torch.randperm(width, generator=torch.Generator().manual_seed(seed))[:COLUMNS]
    rows = torch.zeros(len(chosen), width, dtype=row.dtype)
    rows[torch.arange(len(chosen)), chosen] = 1
    return torch.cat([row, rows.to(row.device)])


def fixed_rows(
    count: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
    seed: int | None = None,
) -> Tensor:
    """Return ``[count, width]`` numbers without zeros; with a seed, probing rows as well."""
    row = torch.linspace(0.5, 1.5, count * width, device=device).to(dtype).view(count, width)
    return row if seed is None else probing_rows(row, seed)


def is_plain(layer: Any) -> bool:  # noqa: ANN401 - a layer of an engine
    """Return whether a linear layer multiplies by a test weight, and adds a test bias."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    members = [one for one in (weight, bias) if isinstance(one, Tensor)]
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return False
    saved = [one.detach().clone() for one in members]
    rows, columns = weight.shape
    try:
        pattern = torch.arange(rows * columns, device=weight.device).remainder(251)
        weight.data.copy_(pattern.view(rows, columns))
        if isinstance(bias, Tensor):
            bias.data.copy_(torch.arange(bias.numel(), device=bias.device).remainder(241))
        one_hot = torch.zeros(1, columns, dtype=weight.dtype, device=weight.device)
        one_hot[0, columns // 2] = 1
        added = 0 if bias is None else bias.data
        expected = weight.data[:, columns // 2] + added
        found = layer.quant_method.apply(layer, one_hot, bias).view(-1)
        return bool(torch.equal(found, expected))
    except Exception:  # noqa: BLE001 - a layer that cannot be tested is not plain
        return False
    finally:
        for one, before in zip(members, saved, strict=True):
            one.data.copy_(before)


def processed(model: nn.Module) -> frozenset[str]:
    """Return the layers with post-load processing, and their sublayers."""
    return frozenset(
        part
        for name, layer in model.named_modules()
        if list(_processing(layer))
        for part, _ in layer.named_modules(prefix=name)
    )


def idle(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the layers whose post-load processing only returns, and their sublayers.

    Engines inherit such an empty function in many quantisation methods. Layers inside a layer with
    any other processing are left out.
    """
    empty, acting = set[str](), set[str]()
    for name, layer in modules.items():
        methods = list(_processing(layer))
        if methods:
            (empty if all(map(_only_returns, methods)) else acting).add(name)
    return frozenset(
        name
        for name in modules
        if not empty.isdisjoint(_upwards(name)) and acting.isdisjoint(_upwards(name))
    )


def _processing(layer: nn.Module) -> Iterator[object]:
    for thing in (layer, getattr(layer, "quant_method", None)):
        method = getattr(thing, "process_weights_after_loading", None)
        if method is not None:
            yield method


def _upwards(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _only_returns(function: object) -> bool:
    plain = function.__func__ if isinstance(function, MethodType) else function
    return isinstance(plain, FunctionType) and _RETURNING.issuperset(
        step.opname for step in dis.get_instructions(plain)
    )


PART: Final = 4 << 30
"""Bytes of weights that are kept twice while loads are tried: larger models are tried in parts."""

TOGETHER: Final = 256 << 20
"""Bytes of weights up to which groups are packed together; a larger one is packed alone."""

LoadMethod: TypeAlias = Literal["loaded", "reloaded", "repacked"]

RELOADS: Final[tuple[LoadMethod, ...]] = ("reloaded", "repacked")
"""Methods that load whole layers again, in the order in which they are tried."""

METHODS: Final[tuple[LoadMethod, ...]] = ("loaded", *RELOADS)


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Checkpoint tensors that are loaded together or not at all, in the order of the chain.

    ``layers`` are those that they are loaded into, and those that share live elements with these;
    empty if unknown.
    """

    names: tuple[str, ...]
    layers: frozenset[str]


def scope_of(groups: Iterable[LoadGroup]) -> frozenset[str]:
    """Return the layers of some groups; empty, for any, if those of one group are unknown."""
    layers = [group.layers for group in groups]
    return frozenset().union(*layers) if all(layers) else frozenset()


def batches(
    groups: Iterable[_G],
    names: Callable[[_G], Iterable[str]],
    specs: Mapping[str, TensorSpec],
    most: int,
) -> Iterator[list[_G]]:
    """Yield groups together, up to ``most`` bytes of weights; a larger group is alone."""
    batch: list[_G] = []
    filled = 0
    for group in groups:
        nbytes = sum(specs[name].nbytes for name in names(group))
        if batch and filled + nbytes > most:
            yield batch
            batch, filled = [], 0
        batch.append(group)
        filled += nbytes
    if batch:
        yield batch


def load_with(
    model: EngineModel,
    method: LoadMethod,
    layers: frozenset[str],
    weights: Iterable[tuple[str, Tensor]],
    members: Members | None = None,
) -> None:
    """Have the engine load tensors of whole groups; live tensors keep their memory.

    ``layers`` are those that the tensors are loaded into; empty for any. After an error, which may
    be any of the engine's, the modules have the members of a given record of the same live tensors,
    or else those from before, except such as may hide weights: to keep these would keep the weights
    of a whole model twice. Bits may have changed.
    """
    if members is None:
        # A loader may replace any tensor, even of layers that it loads nothing into.
        modules = model.modules().values()
        members = Members(modules)
        members.release(modules)
    with restoring(members), torch.no_grad():
        if method == "repacked":
            model.repack(layers, weights)
        else:
            (model.load if method == "loaded" else model.reload)(weights)
        members.settle()


def modules_in(
    modules: Mapping[str, nn.Module], layers: Iterable[str]
) -> dict[str, list[nn.Module]]:
    """Return the modules of each layer."""
    found: dict[str, list[nn.Module]] = {layer: [] for layer in layers}
    for name, module in modules.items():
        layer = name
        while True:
            if layer in found:
                found[layer].append(module)
            layer = layer.rpartition(".")[0]
            if not layer:
                break
    return found


class ModelState:
    """The members, bits and outputs of a model at one moment; it is not in use meanwhile.

    Outputs are computed for ``layers``, by default for all. Without ``saved``, the state can be
    compared with, but not put back.
    """

    def __init__(
        self,
        model: EngineModel,
        source: LoadedCheckpoint,
        saved: SavedModel | None = None,
        layers: frozenset[str] | None = None,
    ) -> None:
        self.model, self.source = model, source
        self.tensors = dict(model.tensors())
        self.bits = saved.bits if saved else Fingerprints(self.tensors)
        self.modules = model.modules()
        self.owner = {name: layer_of(name, self.modules) for name in self.tensors}
        self.held: dict[str, list[Tensor]] = defaultdict(list)
        for name, one in self.tensors.items():
            self.held[self.owner[name]].append(one)
        self.memory = MemoryIndex((self.owner[name], one) for name, one in self.tensors.items())
        self._members = saved.members if saved else Members(())
        self.numbers = dict(_numbers(self.modules))
        self.processed = model.processed()
        self.outputs = self._compute(frozenset(self.modules) if layers is None else layers)
        self.loadable = frozenset[str]()
        self._loads: list[tuple[frozenset[str], Callable[[], object]]] = []
        self._stale = frozenset[str]()  # layers of these that were loaded since

    def now(self, layers: frozenset[str] | None = None) -> "ModelState":
        """Return the state of this moment, to compare with: it cannot be put back.

        With ``layers``, only these can be compared.
        """
        state = copy(self)
        kept = self.tensors.items()
        state.bits = Fingerprints(
            {n: one for n, one in kept if layers is None or self.owner[n] in layers}
        )
        state.numbers = dict(_numbers(self.modules))
        state.outputs = self._compute(frozenset(self.modules) if layers is None else layers)
        return state

    def load(
        self,
        method: LoadMethod,
        names: Iterable[str],
        others: Iterable[str] = (),
        layers: frozenset[str] = frozenset(),
        turn: int = 0,
    ) -> None:
        """Have the engine load tensors with their first bits, and ``others`` with other bits."""
        weights = mixed(self.source, names, others, turn)
        known = frozenset().union(*(one for one, _ in self._loads))
        self._stale |= known & layers if layers else known
        load_with(self.model, method, layers, weights, self._members)

    def release(self, groups: Iterable[LoadGroup], load: Callable[[], object]) -> None:
        """Do not keep what some groups compute with: a proven load of the first bits restores it.

        To keep it would take the memory of their weights once more.
        """
        self._release(scope_of(groups), load)

    def restore_by(self, load: Callable[[], object], layers: frozenset[str]) -> None:
        """Load first bits; if they restore the model, do not keep what layers compute with.

        To keep it would take the memory of their weights once more. Other bits changed the outputs
        of these layers before, and each swap creates again what they compute with: it may view
        the engine's weights, and no longer does.
        """
        if layers:
            with suppress(Exception):
                load()
                self.expect_same()
                self._release(layers, load)
                self.loadable |= layers

    def _release(self, layers: frozenset[str], load: Callable[[], object]) -> None:
        modules = self.model.modules()
        of_layers = chain.from_iterable(modules_in(modules, layers).values())
        self._members.release(of_layers if layers else modules.values())
        self._loads.append((layers, load))
        self._stale -= layers

    @cached_property
    def opaque(self) -> frozenset[str]:
        """Processed layers without a testable output, but with members that cannot be inspected."""
        hidden = self.processed - self.outputs.keys()
        visible = {storage_id(tensor) for tensor in self.tensors.values()}
        return frozenset(
            layer
            for layer, modules in modules_in(self.model.modules(), hidden).items()
            if any(is_opaque(module, visible) for module in modules)
        )

    def changed(self, layers: frozenset[str] | None = None) -> frozenset[str]:
        now, numbers = self.model.tensors(), dict(_numbers(self.modules))
        added = {name for name in now if name not in self.tensors}
        looked = {
            n: t for n, t in self.tensors.items() if layers is None or self.owner[n] in layers
        }
        moved = {n for n, t in looked.items() if n not in now or now[n].data_ptr() != t.data_ptr()}
        left = [name for name in looked if name not in moved]
        changed = in_threads(lambda n: self.bits.has_changed(looked[n]), left, looked.__getitem__)
        tensors = moved.union(n for n, is_changed in zip(left, changed, strict=True) if is_changed)
        return frozenset(added | tensors).union(
            name
            for name, number in self.numbers.items()
            if not same_number(numbers.get(name), number)
            and (layers is None or layer_of(name, self.modules) in layers)
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
        """Refuse any changed bit, moved tensor or changed output."""
        for name in sorted(self.changed(layers or None)):
            raise TensorMismatchError(f"{name} changed", tensor=name)
        for layer in sorted(self.other_outputs(layers or frozenset(self.outputs))):
            raise TensorMismatchError(f"{layer} computes something else", tensor=layer)

    def put_back(self, load: Callable[[], object] | None = None) -> None:
        """Restore the members and bits of the model.

        ``load`` loads the first bits, and may raise. It is called if outputs still differ: loading
        may restore memory that cannot be inspected. So may the loads that restored it before, which
        are repeated for all that was loaded since: not every output shows what a kernel keeps.
        """
        self._put_back()
        is_same = self._computes_the_same()
        loads = [(frozenset[str](), load)] if load else []
        for layers, again in (*loads, *self._loads):
            if is_same and self._stale.isdisjoint(layers):
                continue
            with suppress(Exception):
                again()
                self._stale -= layers
            self._put_back()
            is_same = self._computes_the_same()

    def _computes_the_same(self) -> bool:
        with suppress(Exception):  # half of a load may be left, that cannot be run
            return not self.other_outputs(frozenset(self.outputs))
        return False

    def _put_back(self) -> None:
        self._members.put_back()
        if isinstance(self.bits, SavedBits):  # others only compare
            self.bits.put_back()

    def unrestored(self) -> list[str]:
        """Return layers that compute something else, or were not loaded again as they need."""
        return [*self.other_outputs(frozenset(self.outputs)), *self._stale]

    def other_outputs(self, layers: frozenset[str]) -> list[str]:
        now = self.outputs_of(layers)
        return [
            n
            for n in layers & self.outputs.keys()
            if n not in now or not same_tensor(now[n], self.outputs[n])
        ]

    def numbers_of(self, layers: frozenset[str]) -> dict[str, float]:
        """Return the numbers that layers hold now."""
        return dict(_numbers({name: self.modules[name] for name in self.modules.keys() & layers}))

    def outputs_of(self, layers: frozenset[str]) -> dict[str, Tensor]:
        """Return what layers compute now, of those that were computed at first."""
        return self._compute(layers & self.outputs.keys())

    def _compute(self, layers: frozenset[str]) -> dict[str, Tensor]:
        with torch.no_grad():
            found = self.model.compute(layers) if layers else {}
        return {layer: output.detach().to("cpu", copy=True) for layer, output in found.items()}


def _numbers(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, float]]:
    for prefix, module in modules.items():
        for name, number in numbers_in(module):
            yield f"{prefix}.{name}" if prefix else name, number


def layer_of(name: str, modules: Mapping[str, object]) -> str:
    layer = name
    while layer:
        layer = layer.rpartition(".")[0]
        if layer in modules:
            return layer
    return ""


logger = logging.getLogger(__name__)


def restore_outputs(state: ModelState) -> None:
    """Restore the model; if its outputs still differ, let it load its first weights again.

    Raises an :class:`EngineDamagedError` if they differ after every attempt.
    """
    layers = frozenset(state.modules)
    state.put_back()
    for method in (*RELOADS, "loaded"):
        if not state.unrestored():
            return
        state.put_back(partial(state.load, method, state.source.present, layers=layers))
    left = state.unrestored()
    if left:
        message = (
            f"{min(left)} computes something else after test loads; "
            "the engine keeps weights in memory that cannot be restored"
        )
        logger.critical("%s: restart the engine", message)
        raise EngineDamagedError(message)
