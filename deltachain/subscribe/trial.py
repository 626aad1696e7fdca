"""What the engine holds and computes, and whether it follows each tensor alone.

Loading what is loaded already must change no bit. For every tensor by itself, loading other bits of
it must change what each of its layers holds or computes, and loading the first bits again must lead
back, bit for bit. A loader that quietly does nothing, or does it for the neighbours only, passes
none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError, TensorMismatchError
from deltachain.subscribe.engine import EngineModel
from deltachain.subscribe.members import Bits, Members, numbers_in
from deltachain.subscribe.ways import Group, Way, bring

Weights: TypeAlias = Callable[[Iterable[str]], Iterable[tuple[str, Tensor]]]
"""Makes checkpoint tensors by their names in the chain, anew each time: loaders edit them."""

LARGE: Final = 64.0
"""Magnitude above which numbers are made smaller, not larger: formats of eight bits end at 240."""


class State:
    """What a model holds and computes, as it was when this was made.

    Args:
        model: Not in use meanwhile.
        bits: Of its live tensors.
        layers: Those that are tried; all when not given.
    """

    def __init__(
        self, model: EngineModel, bits: Bits, layers: frozenset[str] | None = None
    ) -> None:
        self.model = model
        self.bits = bits
        self.tensors = dict(model.tensors())
        modules = model.modules()
        self.owner = {name: layer_of(name, modules) for name in self.tensors}
        self.modules = modules
        self._members = Members(modules.values())
        self.numbers = dict(_numbers(modules))
        self.processed = model.processed()
        self.outputs = self._compute(frozenset(modules) if layers is None else layers)

    def changed(self, layers: frozenset[str] | None = None) -> frozenset[str]:
        """Live tensors with other bits, or in other memory, than they had, and other numbers.

        Args:
            layers: Those that are looked at; all when not given.
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
            | {name for name, number in self.numbers.items() if numbers.get(name) != number}
        )

    def follows(self, layers: frozenset[str]) -> frozenset[str]:
        """Layers that compute something else; or hold it, where they cannot be tried or need not.

        What is processed after loading may be computed from a hidden copy; nothing else is.
        """
        found = set(self._other_outputs(layers))
        shown = self.outputs.keys() & self.processed
        for name, tensor in self.tensors.items():
            layer = self.owner[name]
            if layer in layers and layer not in shown and self.bits.has_changed(tensor):
                found.add(layer)
        return frozenset(found)

    def expect_same(self, layers: frozenset[str] = frozenset()) -> None:
        """Refuse any bit that changed, any tensor that moved, any other output.

        Args:
            layers: Those that are tried; all where empty.

        Raises:
            TensorMismatchError: One did.
        """
        for name in sorted(self.changed(layers or None)):
            raise TensorMismatchError(f"{name} changed", tensor=name)
        for layer in sorted(self._other_outputs(layers or frozenset(self.outputs))):
            raise TensorMismatchError(f"{layer} computes something else", tensor=layer)

    def put_back(self) -> None:
        """Have the model hold again what it held."""
        self._members.put_back()
        self.bits.put_back()

    def _other_outputs(self, layers: frozenset[str]) -> Iterator[str]:
        wanted = layers & self.outputs.keys()
        now = self._compute(wanted)
        for layer in wanted:
            if layer not in now or not _same(now[layer], self.outputs[layer]):
                yield layer

    def _compute(self, layers: frozenset[str]) -> dict[str, Tensor]:
        with torch.no_grad():
            found = self.model.compute(layers) if layers else {}
        return {layer: output.detach().to("cpu", copy=True) for layer, output in found.items()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What trying a way showed.

    Attributes:
        touched: Live tensors that other bits of some tensor changed.
        refused: Why groups cannot be loaded so, by their first tensor; empty where the engine has
            no such way.
        idle: Tensors of the other groups that nothing followed.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    touched: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Trial:
    """One way of loading, tried on groups of tensors that have no layer in common.

    Attributes:
        state: Of the model, which holds it again afterwards.
        way: That is tried.
        weights: Of the checkpoint that the model holds.
        links: The layers that must follow each tensor.
        visible: Tensors that live in the model bit by bit.
        shared: Those of them that others may be loaded over.
    """

    state: State
    way: Way
    weights: Weights
    links: Mapping[str, frozenset[str]]
    visible: Container[str] = ()
    shared: Container[str] = ()

    def run(self, groups: Sequence[Group]) -> Outcome:
        """Try all groups at once, and one by one where something goes wrong."""
        known = [group for group in groups if group.layers]
        left = list(groups)
        outcomes = []
        try:
            outcomes.append(self._try(known))
            self._expect_apart(known)
            left = [group for group in groups if not group.layers]
        except Exception:  # noqa: BLE001 - an engine's loader may raise anything
            self.state.put_back()
            outcomes.clear()
        for group in left:
            try:
                outcomes.append(self._try([group]))
            except EngineVersionError:
                outcomes.append(Outcome({group.names[0]: ""}))
            except Exception as exc:  # noqa: BLE001
                self.state.put_back()
                told = exc.args[0] if isinstance(exc, TensorMismatchError) else repr(exc)
                outcomes.append(Outcome({group.names[0]: f"loading it again fails: {told}"[:200]}))
        return Outcome(
            {name: why for one in outcomes for name, why in one.refused.items()},
            frozenset().union(*(one.touched for one in outcomes)),
            frozenset().union(*(one.idle for one in outcomes)),
        )

    def _try(self, groups: Sequence[Group]) -> Outcome:
        """Try groups of known layers together, or a single one; raises where it is not exact."""
        if not groups:
            return Outcome()
        self._load(groups, {})
        self.state.expect_same()
        refused = {group.names[0]: "" for group in groups}
        touched: set[str] = set()
        idle: set[str] = set()
        for names in zip_longest(*(group.names for group in groups)):
            picked = {n: g for n, g in zip(names, groups, strict=True) if n is not None}
            self._load(picked.values(), picked)
            changed = self.state.changed()
            touched |= changed
            for name, group in picked.items():
                why = self._judge(name, group, changed)
                if why is None:
                    refused.pop(group.names[0], None)
                elif why:
                    raise TensorMismatchError(why, tensor=name)
                else:
                    idle.add(name)
            self._load(picked.values(), {})
            self.state.expect_same()
        self._expect_repeatable(groups)
        why_not = {first: f"nothing follows {first}" for first in refused}
        return Outcome(why_not, frozenset(touched), frozenset(idle))

    def _expect_apart(self, groups: Sequence[Group]) -> None:
        """Refuse a loader that does not take a group without each other one.

        A swap loads those that changed. Groups are told apart by the digits of their numbers.

        Raises:
            TensorMismatchError: It loads something else.
            Exception: Whatever it raises.
        """
        for digit in range((len(groups) - 1).bit_length()):
            for value in (0, 1):
                mine = [one for at, one in enumerate(groups) if (at >> digit) & 1 == value]
                self._load(mine, {})
                self.state.expect_same()

    def _judge(self, name: str, group: Group, changed: frozenset[str]) -> str | None:
        """Whether a tensor alone was followed: ``None``; nothing did: empty; or what did not.

        A tensor that nothing follows stays a member of its group: it may act only beside others,
        or be overwritten by one of them. A loader alone has nothing that it could act on.
        """
        layers = group.layers or frozenset(self.state.modules)
        found = self.state.follows(layers)
        held = {self.state.owner[live] for live in changed if live in self.state.owner}
        if not found & layers and not held & layers:
            must = name in self.visible or self.way == "loaded"
            return f"nothing follows {name}" if must and name not in self.shared else ""
        missing = self.links.get(name, frozenset()) - found
        return f"{min(missing)} does not follow {name}" if missing else None

    def _expect_repeatable(self, groups: Sequence[Group]) -> None:
        """Refuse a loader that does another thing with the same bits the next time.

        Raises:
            TensorMismatchError: It does.
        """
        others = {name: group for group in groups for name in group.names}
        self._load(groups, others)
        once = State(self.state.model, Bits(self.state.model.tensors()))
        self._load(groups, others)
        once.expect_same()
        self._load(groups, {})
        self.state.expect_same()

    def _load(self, groups: Iterable[Group], others: Mapping[str, Group]) -> None:
        """Load groups, with other bits for some tensors."""
        groups = list(groups)
        names = [name for group in groups for name in group.names]
        layers = frozenset().union(*(group.layers for group in groups))
        if not all(group.layers for group in groups):
            layers = frozenset()
        bring(self.state.model, self.way, layers, mixed(self.weights, names, others))


def mixed(
    weights: Weights, names: Iterable[str], others: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint tensors, some of them with other bits in every element."""
    changed = frozenset(others)
    for name in names:
        for here, tensor in weights([name]):
            yield here, other_bits(tensor) if name in changed else tensor


def other_bits(tensor: Tensor) -> Tensor:
    """A tensor of which every element is another, by more than any rounding.

    Elements that were alike are not: they show where each of them goes.
    """
    if tensor.dtype is torch.bool:
        return ~tensor
    seeded = torch.Generator().manual_seed(tensor.numel())
    power = torch.randint(0, 3, tensor.shape, generator=seeded).to(tensor.device)
    if not tensor.is_floating_point():
        return tensor ^ (1 + power).to(tensor.dtype)
    factor = (2.0 ** (1 + power)).float()
    wide = tensor.float()
    scaled = torch.where(wide.abs() > LARGE, wide / factor, wide * factor)
    return torch.where(wide == 0, factor, scaled).to(tensor.dtype)


def _numbers(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, float]]:
    for prefix, module in modules.items():
        for name, number in numbers_in(module):
            yield f"{prefix}.{name}" if prefix else name, number


def layer_of(name: str, modules: Mapping[str, object]) -> str:
    """The module that holds a live tensor, by the tensor's dotted name."""
    layer = name
    while layer:
        layer = layer.rpartition(".")[0]
        if layer in modules:
            return layer
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are the same, bit for bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pair = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*pair)
