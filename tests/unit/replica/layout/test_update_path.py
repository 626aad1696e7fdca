"""What ranks agree on: the worst class wins, and every element must be somewhere."""

from __future__ import annotations

import msgspec
import pytest

from deltachain.replica.layout.classes import (
    ORDER,
    Agreement,
    Classified,
    Form,
    TensorClass,
    agree,
    orphans,
)
from deltachain.types import TensorSpec

SPEC = TensorSpec("w", "BF16", (4, 6))
WHOLE: Form = (0, (24,), (1,))
TOP: Form = (0, (12,), (1,))
BOTTOM: Form = (12, (12,), (1,))
LEFT: Form = (0, (4, 3), (6, 1))
RIGHT: Form = (3, (4, 3), (6, 1))


def held(*windows: Form) -> Classified:
    return Classified(kind="in_place", windows=windows)


def on_host(kind: TensorClass, reason: str = "so it is") -> Classified:
    return Classified(kind=kind, reason=reason)


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
