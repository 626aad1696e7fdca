import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.classes import (
    ORDER,
    Agreement,
    Classified,
    Form,
    TensorClass,
    agree,
    orphans,
)
from deltachain.replica.layout.discover import discover
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, layers_of
from deltachain.replica.layout.model_state import idle, is_plain, processed
from deltachain.replica.layout.module_members import (
    MemoryIndex,
    is_opaque,
    may_hide_tensors,
    storage_id,
)
from deltachain.replica.layout.runtime_tables import (
    RuntimeTables,
    made_by_running,
    record_loaded_state,
)
from deltachain.types import TensorSpec
from tests.unit.replica.layout.loaders import PLANNED, SIZE, OneLayer

PACKED = torch.ones(2)


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any = 1


class Handle:
    def __del__(self) -> None:
        self.address = 0


class KernelConfig(Handle):
    """What only says how."""


def closure_of(value: Any) -> Any:
    return lambda: value


def recursive() -> Any:
    def again() -> Any:
        return again

    return again


def with_default(value: Any) -> Any:
    def kernel(x: Any, weight: Any = value) -> Any:
        return x, weight

    return kernel


HIDING: dict[str, Any] = {
    "closure": closure_of(PACKED),
    "closure in a closure": closure_of(closure_of(PACKED)),
    "default": with_default(PACKED),
    "partial": partial(len, PACKED),
    "keyword of a partial": partial(dict, key=PACKED),
    "slot": Slotted(PACKED),
    "slot of a slot": Slotted(Slotted(PACKED)),
    "frozen set": frozenset([PACKED]),
    "handle": Handle(),
    "array": np.ones(2),
    "lock": threading.Lock(),
    "bound": [1, 2].__getitem__,
    "iterator": iter([PACKED]),
}

PLAIN: dict[str, Any] = {
    "closure": closure_of(1),
    "recursive": recursive(),
    "default": with_default(None),
    "partial": partial(len, "name"),
    "slot": Slotted(),
    "slot of a slot": Slotted(Slotted()),
    "frozen set": frozenset(["name"]),
    "configuration": KernelConfig(),
    "tensor": PACKED,
    "module": nn.Linear(1, 1),
    "path": Path(),
    "dtype": torch.bfloat16,
    "built in": len,
    "function of torch": torch.add,
    "function of modules": nn.functional.linear,
    "generator": torch.Generator(),
    "range": range(3),
    "nothing": None,
    "list": [PACKED],
}


@pytest.mark.parametrize("name", HIDING)
def test_this_may_hide_weights(name: str) -> None:
    assert may_hide_tensors(HIDING[name])


@pytest.mark.parametrize("name", PLAIN)
def test_this_hides_none(name: str) -> None:
    assert not may_hide_tensors(PLAIN[name])


class Method:
    """What acts on a layer after loading."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep a kernel."""


def shown(layer: nn.Module) -> set[int]:
    """Storages of what a layer is seen to hold."""
    return {storage_id(tensor) for tensor in layer.parameters()}


class Kernel:
    """What computes from a weight of its own."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def apply(self, x: Any) -> Any:
        return self.weight @ x


COPIES: dict[str, Any] = {
    "object": Kernel(PACKED),
    "bound method": Kernel(PACKED).apply,
    "object in an object": Kernel(Kernel(PACKED)),
    "closure in an object": Kernel(closure_of(PACKED)),
    "partial in an object": Kernel(partial(len, PACKED)),
    "list in an object": Kernel([Kernel(PACKED)]),
    "slot in an object": Kernel(Slotted(PACKED)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_behind_objects_is_found_unless_it_can_be_seen(name: str) -> None:
    layer = nn.Linear(1, 1)
    vars(layer)["kernel"] = COPIES[name]
    assert is_opaque(layer, shown(layer))
    assert not is_opaque(layer, {*shown(layer), storage_id(PACKED)})


def test_a_configuration_with_a_copy_is_found() -> None:
    layer, config = nn.Linear(1, 1), KernelConfig()
    vars(layer)["config"] = config
    assert not is_opaque(layer, shown(layer))
    vars(config)["scale"] = Kernel(PACKED)
    assert is_opaque(layer, shown(layer))


def test_objects_that_lead_back_to_themselves_have_an_end() -> None:
    layer, kernel = nn.Linear(1, 1), Kernel(None)
    kernel.weight = [kernel, layer]
    vars(layer)["kernel"] = kernel
    assert not is_opaque(layer, shown(layer))


def test_it_is_found_in_what_acts_and_not_in_what_is_only_there() -> None:
    layer = nn.Linear(1, 1)
    assert not is_opaque(layer, shown(layer))
    layer.group = Slotted()  # type: ignore[assignment]
    assert not is_opaque(layer, shown(layer))
    layer.method = Method()  # type: ignore[assignment]
    assert not is_opaque(layer, shown(layer))
    vars(layer.method)["kernels"] = [closure_of(PACKED)]
    assert is_opaque(layer, shown(layer))


class ProbedMethod:
    """Multiplies by a layer's weight, or by a copy of it that was made after loading."""

    def __init__(self, packed: Tensor | None = None) -> None:
        self.packed = packed

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[-1] != layer.weight.shape[1]:
            raise ValueError("no such row")
        found = x @ (layer.weight if self.packed is None else self.packed).t()
        return found if bias is None else found + bias

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.packed is not None:
            self.packed = layer.weight.data.clone()


class Linear(nn.Module):
    def __init__(self, *, packed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
        self.input_size_per_partition = 8
        self.quant_method: Any = ProbedMethod(self.weight.data.clone() if packed else None)


def test_a_layer_is_plain_if_it_multiplies_by_any_pattern() -> None:
    layer = Linear()
    before = layer.weight.data.clone()
    assert is_plain(layer)
    assert torch.equal(layer.weight.data, before)
    assert not layer.bias.data.any()


def test_a_layer_that_rearranges_is_not_plain() -> None:
    layer = Linear()
    layer.quant_method.apply = lambda layer, x, bias: x @ layer.weight.flip(0).t() + bias
    layer.weight.data.zero_()
    assert not is_plain(layer)
    layer.quant_method.apply = lambda layer, x, bias: x @ layer.weight.t() + bias.flip(0)
    assert not is_plain(layer)
    assert not layer.weight.data.any()


def test_layers_with_something_to_do_after_loading_are_known_with_their_parts() -> None:
    outer: Any = nn.Sequential(nn.Sequential(Linear(), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert processed(outer) == {"0.0"}
    outer[0].process_weights_after_loading = lambda layer: layer.eval()
    assert processed(outer) == {"0", "0.0", "0.1"}


def test_layers_whose_processing_only_returns_are_idle_outside_of_others() -> None:
    """As engines' base classes have it: no load makes their embeddings again."""

    class Empty:
        def process_weights_after_loading(self, _: nn.Module) -> None:
            """Pack, say."""
            return

    class Packing(Empty):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            super().process_weights_after_loading(layer)

    layer: Any = Linear()
    layer.part = nn.Linear(2, 2)
    layer.quant_method = Empty()
    outer: Any = nn.Sequential(layer, nn.Linear(2, 2))
    modules = dict(outer.named_modules())
    assert processed(outer) == idle(modules) == {"0", "0.part"}
    for acting in (
        Packing().process_weights_after_loading,
        partial(Empty().process_weights_after_loading),
        list(range(3)).append,
        lambda layer: layer.missing,
    ):
        layer.quant_method.process_weights_after_loading = acting
        assert processed(outer) == {"0", "0.part"}
        assert idle(modules) == set()
    layer.quant_method = Empty()
    outer.process_weights_after_loading = outer.to
    assert idle(modules) == set()


def test_a_tensor_that_a_loader_registers_is_loaded_into_its_layer() -> None:
    """As vLLM loads the bias of a head: nothing of it was there before."""
    head = Linear()
    owners = MemoryIndex([("head", head.weight)]).overlapping
    del head.bias

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            if name == "weight":
                head.weight.data.copy_(tensor)
            elif name == "bias":
                head.bias = nn.Parameter(torch.empty(4), requires_grad=False)
                head.bias.data.copy_(tensor)

    names = {
        "weight": torch.empty(4, 8, device="meta"),
        "bias": torch.empty(4, device="meta"),
        "other": torch.empty(4, device="meta"),
    }
    into = frozenset({"head"})
    assert layers_of(load, names, owners, {"head": head}) == {"weight": into, "bias": into}


class Rotary(OneLayer):
    """A layer that makes a table of its weight in its first step, as Fourier embeddings do."""

    table: Tensor
    parts: dict[int, Tensor]
    late: Tensor | None
    kv_cache: list[Tensor]
    steps: int

    def __init__(self) -> None:
        super().__init__(PLANNED["copy"])
        self.table = torch.zeros(SIZE)
        self.cast = torch.arange(4).float() / 3
        self.parts, self.late = {}, None
        self.update = True

    def run(self, length: int = 1) -> Tensor:
        if self.update:
            self.table = self.p.detach().float().cos()
            self.update = False
        if self.late is None:
            self.late = self.p.detach().float().sin()
        self.cast = self.cast.to(torch.bfloat16)
        if length not in self.parts:
            self.parts[length] = self.p.detach().float() * length
        return self.table + self.parts[length] + self.late

    def made_by_running(self) -> frozenset[str]:
        return made_by_running(self)


Make = Callable[[], tuple[Rotary, LoadedCheckpoint]]


@pytest.fixture
def rotary(tmp_path: Path) -> Make:
    """Makes one that was loaded, and has not run."""

    def make() -> tuple[Rotary, LoadedCheckpoint]:
        full = {"w": torch.randn(SIZE).to(torch.bfloat16)}
        save_file(full, tmp_path / "model.safetensors")
        model = Rotary()
        model.checkpoint = tmp_path
        model.load(full.items())
        record_loaded_state(model)
        checkpoint = Checkpoint(tmp_path)
        return model, LoadedCheckpoint(checkpoint, checkpoint.specs, {})

    return make


def test_what_did_not_run_is_followed(rotary: Make) -> None:
    model, source = rotary()
    assert made_by_running(model) == frozenset()
    assert discover(model, source).classes == {"w": "in_place"}


def test_a_table_that_was_made_by_running_is_refused(rotary: Make) -> None:
    model, source = rotary()
    model.run()
    assert made_by_running(model) == {"table", "late", "parts.1"}
    with pytest.raises(TensorMismatchError, match="late at run time"):
        discover(model, source)


def test_a_cast_is_no_other_table(rotary: Make) -> None:
    model, _ = rotary()
    model.run()
    assert model.cast.dtype is torch.bfloat16
    assert "cast" not in made_by_running(model)


def test_numbers_of_requests_are_no_tables(rotary: Make) -> None:
    model, _ = rotary()
    model.kv_cache = [torch.ones(3)]
    model.taken = torch.ones(3, dtype=torch.int64)
    assert made_by_running(model) == frozenset()


def test_nothing_is_known_of_what_was_not_recorded() -> None:
    model = Rotary()
    model.run()
    assert made_by_running(model) == frozenset()


def test_tables_that_were_made_later_are_forgotten_and_made_again(rotary: Make) -> None:
    model, _ = rotary()
    model.update = False
    tables = RuntimeTables(model.modules())
    model.run(1), model.run(2)
    model.p.data.add_(1)
    model.extra = torch.ones(2)
    tables.forget()
    assert (model.parts, model.late, hasattr(model, "extra")) == ({}, None, False)
    assert torch.equal(model.run(2), 2 * model.p.float() + model.p.float().sin())


def test_what_was_there_is_kept(rotary: Make) -> None:
    model, _ = rotary()
    model.run()
    tables, parts, late = RuntimeTables(model.modules()), dict(model.parts), model.late
    model.kv_cache = [torch.ones(3)]
    model.steps = 7
    tables.forget()
    assert (model.parts, model.late, model.steps) == (parts, late, 7)
    assert len(model.kv_cache) == 1


def test_modules_far_from_weights_are_left_alone() -> None:
    parent = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    tables = RuntimeTables(dict(parent.named_modules()))
    vars(parent)["scratch"] = vars(parent[0])["table"] = torch.ones(2)
    tables.forget()
    assert "scratch" in vars(parent)
    assert "table" not in vars(parent[0])


def test_a_flag_that_says_that_a_table_is_there_is_reset() -> None:
    model = nn.Linear(2, 2)
    vars(model)["ready"], vars(model)["busy"] = False, False
    tables = RuntimeTables({"": model})
    vars(model)["busy"] = True
    tables.forget()
    assert vars(model)["busy"], "no table was made"
    vars(model)["table"], vars(model)["ready"] = torch.ones(2), True
    tables.forget()
    assert not vars(model)["ready"]
    assert "table" not in vars(model)


def test_a_number_that_was_made_by_running_is_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model)["scale"], vars(model)["rate"] = None, float("nan")
    record_loaded_state(model)
    assert made_by_running(model) == frozenset()
    vars(model)["scale"] = 0.5
    assert made_by_running(model) == {"scale"}


class WithLoRA(nn.Linear):
    """What holds adapters beside the weights."""


def test_what_adapters_hold_is_no_table() -> None:
    model = WithLoRA(2, 2)
    record_loaded_state(model)
    vars(model)["A_buffer"] = torch.ones(2)
    assert made_by_running(model) == frozenset()


def test_a_model_that_cannot_be_recorded_is_loaded_and_not_followed() -> None:
    model = nn.LazyBatchNorm1d()  # its buffers have no shape yet
    record_loaded_state(model)
    with pytest.raises(TensorMismatchError, match="LazyBatchNorm1d held when it was loaded"):
        made_by_running(model)  # its tables could not be told from constants


SPEC = TensorSpec("w", "BF16", (4, 6))
WHOLE: Form = (0, (24,), (1,))
TOP: Form = (0, (12,), (1,))
BOTTOM: Form = (12, (12,), (1,))
LEFT: Form = (0, (4, 3), (6, 1))
RIGHT: Form = (3, (4, 3), (6, 1))


def held(*windows: Form) -> Classified:
    return Classified(kind="in_place", windows=windows)


def on_host(kind: TensorClass, reason: str = "so it is", *windows: Form) -> Classified:
    return Classified(kind=kind, reason=reason, windows=windows)


ABSENT = Classified(kind="absent")


def decide(*ranks: Classified) -> tuple[TensorClass, str, tuple[tuple[str, ...], ...]]:
    agreement = agree([SPEC], [{"w": rank} for rank in ranks])
    return agreement.classes["w"], agreement.reasons.get("w", ""), agreement.holders["w"]


@pytest.mark.parametrize(
    ("ranks", "holders"),
    [
        ([held(WHOLE)], [["0"]]),
        ([held(TOP, BOTTOM)], [["0", "0"]]),
        ([held(TOP), held(BOTTOM)], [["0"], ["1"]]),
        ([held(LEFT), held(RIGHT)], [["0"], ["1"]]),
        ([held(WHOLE), held(WHOLE)], [["0,1"], ["0,1"]]),
        ([held(TOP), held(TOP), held(BOTTOM), held(BOTTOM)], [["0,1"]] * 2 + [["2,3"]] * 2),
        ([held(WHOLE), ABSENT], [["0"], []]),
        ([ABSENT, held(TOP), held(BOTTOM)], [[], ["1"], ["2"]]),
        ([held(WHOLE, WHOLE)], [["0,0", "0,0"]]),
        ([held(WHOLE), held(WHOLE, WHOLE)], [["0,1,1"], ["0,1,1", "0,1,1"]]),
    ],
)
def test_windows_that_cover_the_tensor_are_in_place(
    ranks: list[Classified], holders: list[list[str]]
) -> None:
    assert decide(*ranks) == ("in_place", "", tuple(tuple(labels) for labels in holders))


@pytest.mark.parametrize(
    ("ranks", "elements"),
    [
        ([held(TOP)], 12),
        ([held(TOP), held(TOP)], 12),
        ([held(TOP), ABSENT], 12),
        ([held(TOP), held(WHOLE)], 36),
        ([held()], 0),
        ([on_host("reloaded", "packed", TOP), ABSENT], 12),
        ([on_host("repacked", "packed", TOP), on_host("loaded", "cast", TOP)], 12),
    ],
)
def test_windows_that_do_not_cover_the_tensor_are_refused(
    ranks: list[Classified], elements: int
) -> None:
    kind, reason, _ = decide(*ranks)
    assert kind == "refused"
    assert reason == f"the ranks hold {elements} of its 24 elements"


def test_what_no_rank_has_is_refused() -> None:
    assert decide(ABSENT, ABSENT)[:2] == ("refused", "no rank holds it")
    assert agree([SPEC], []).refused == {"w": "no rank holds it"}


@pytest.mark.parametrize("worse", ["loaded", "reloaded", "refused"])
@pytest.mark.parametrize("first", [True, False])
def test_the_worst_class_of_any_rank_is_everybodys(worse: TensorClass, first: bool) -> None:
    ranks = [on_host(worse), held(WHOLE)] if first else [held(WHOLE), on_host(worse)]
    kind, reason, holders = decide(*ranks)
    assert (kind, reason) == (worse, "so it is")
    assert holders == (("0,1",), ("0,1",)), "both keep a copy"


def test_classes_are_ordered_by_how_much_they_ask_of_the_engine() -> None:
    assert sorted(ORDER, key=ORDER.__getitem__) == [
        "absent",
        "unused",
        "in_place",
        "loaded",
        "reloaded",
        "repacked",
        "refused",
    ]


UNUSED = Classified(kind="unused", reason="nothing follows it")


def test_a_tensor_is_unused_if_every_rank_has_proven_that() -> None:
    assert decide(UNUSED, UNUSED)[:2] == ("unused", "nothing follows it")
    assert decide(UNUSED, ABSENT)[:2] == ("refused", "no rank holds it")
    kind, _, holders = decide(UNUSED, held(WHOLE))
    assert kind == "in_place"
    assert holders[0] == ()


def test_tensors_that_no_rank_has_are_to_be_proven_unused() -> None:
    ranks = [
        {"a": ABSENT, "b": ABSENT, "c": UNUSED, "d": UNUSED},
        {"a": ABSENT, "b": held(WHOLE), "c": ABSENT, "d": UNUSED},
    ]
    assert orphans("abcd", ranks) == ["a", "c"]


@pytest.mark.parametrize(
    "ranks",
    [
        [on_host("repacked", "packed", TOP), on_host("repacked", "packed", BOTTOM)],
        [on_host("reloaded", "packed", WHOLE), on_host("reloaded", "packed", TOP), ABSENT],
        [on_host("loaded", "computed"), on_host("loaded", "computed", TOP)],
    ],
)
def test_parts_that_are_loaded_again_together_are_the_tensor(ranks: list[Classified]) -> None:
    assert decide(*ranks)[0] == ranks[0].kind


def test_only_ranks_that_have_it_keep_a_copy() -> None:
    kind, _, holders = decide(on_host("loaded"), ABSENT, on_host("reloaded", "packed"))
    assert kind == "reloaded"
    assert holders == (("0,2",), (), ("0,2",))


def test_an_empty_tensor_is_in_place_wherever_it_is() -> None:
    spec = TensorSpec("w", "BF16", (0, 6))
    agreement = agree([spec], [{"w": held((0, (0, 6), (6, 1)))}])
    assert agreement.classes == {"w": "in_place"}


def test_what_ranks_and_leader_say_survives_json() -> None:
    one = held(LEFT, RIGHT)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Classified) == one
    agreement = agree([SPEC], [{"w": held(TOP)}, {"w": on_host("loaded")}])
    assert msgspec.json.decode(msgspec.json.encode(agreement), type=Agreement) == agreement


def load(*layers: str, comparable: bool = True) -> Classified:
    return Classified(kind="reloaded", layers=layers, comparable=comparable)


@pytest.mark.parametrize(
    ("ranks", "compared"),
    [
        ([{"a": load("x")}], "a"),
        ([{"a": load("x", comparable=False)}], ""),
        ([{"a": load("x")}] * 2, "a"),
        ([{"a": load("x")}, {"a": load("x", comparable=False)}], ""),
        ([{"a": load("x")}, {"a": ABSENT}], "a"),
        ([{"a": ABSENT}, {"a": ABSENT}], ""),
        ([{"a": on_host("loaded")}], ""),
        # one layer, with other tensors on each rank
        ([{"a": load("x"), "b": ABSENT}, {"a": ABSENT, "b": load("x", comparable=False)}], ""),
        # loaded together on one rank, apart on another
        (
            [
                {"a": load("x", "y"), "b": load("x", "y"), "c": load("z")},
                {"a": load("x"), "b": load("y", comparable=False), "c": load("z")},
            ],
            "c",
        ),
        # a tensor of the name of a layer
        ([{"a": load("b", comparable=False), "b": load("c")}], "b"),
    ],
)
def test_what_is_loaded_together_is_compared_by_all_ranks_or_by_none(
    ranks: list[dict[str, Classified]], compared: str
) -> None:
    specs = [TensorSpec(name, "BF16", (4, 6)) for name in ranks[0]]
    assert agree(specs, ranks).compared == set(compared)
