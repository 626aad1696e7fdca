from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.publish.model.layout import NUMBER_BIT, RUNS, Box, ElementMap, ElementRun
from deltachain.types import Indices, TensorSpec


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    full = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, size)) for size in full)
    shape = tuple(draw(st.integers(0, size - at)) for size, at in zip(full, offset, strict=True))
    return Box(full, offset, shape)


def truth(box: Box) -> Indices:
    """Flat indices of a box, by slicing."""
    everything = np.arange(math.prod(box.full)).reshape(box.full)
    cut = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
    return everything[cut].reshape(-1)


@given(boxes())
def test_indices_of_a_box_are_those_of_a_slice(box: Box) -> None:
    if box.numel:
        assert box.flat(np.arange(box.numel)).tolist() == truth(box).tolist()


@given(boxes())
def test_elements_before_an_index_are_counted(box: Box) -> None:
    indices = truth(box)
    for index in range(math.prod(box.full) + 1):
        assert box.before(index) == np.searchsorted(indices, index)


@given(boxes())
def test_neighbours_of_a_box_are_neighbours_of_the_tensor(box: Box) -> None:
    indices = truth(box)
    for start in range(0, indices.size, box.run) if box.numel else ():
        assert set(np.diff(indices[start : start + box.run])) <= {1}


def fused(experts: int, rows: int, width: int) -> tuple[ElementRun, ...]:
    """Experts that a model has in one tensor, gate over up, and a checkpoint one by one."""
    slots, numel = [], rows * width
    for expert, (number, name) in product(range(experts), enumerate(("gate", "up"))):
        spec = TensorSpec(f"{expert}.{name}", "BF16", (rows, width))
        slots.append(ElementRun(spec, (2 * expert + number) * numel, 0, numel))
    return tuple(slots)


@st.composite
def element_maps(draw: st.DrawFn) -> tuple[ElementMap, dict[str, Indices]]:
    """A map, and by tensor of the checkpoint which element of the live one each element is."""
    experts, rows, width = (draw(st.integers(1, 4)) for _ in range(3))
    full = (experts, 2 * rows, width)
    offset = tuple(draw(st.integers(0, size)) for size in full)
    shape = tuple(draw(st.integers(0, size - at)) for size, at in zip(full, offset, strict=True))
    box, live = Box(full, offset, shape), np.arange(math.prod(full)).reshape(full)
    slots = fused(experts, rows, width)
    if draw(st.booleans()):
        there = {s.spec.name: live.reshape(-1)[s.start : s.start + s.numel] for s in slots}
        return ElementMap(box, slots), there
    # Gate and up alternate, and are transposed.
    halves = {0: live[:, 0::2].transpose(0, 2, 1), 1: live[:, 1::2].transpose(0, 2, 1)}
    there, table = {}, np.empty(live.size, np.int64)
    for number, slot in enumerate(slots):
        there[slot.spec.name] = halves[number % 2][number // 2].reshape(-1)
        table[there[slot.spec.name]] = np.arange(slot.numel) + (number << NUMBER_BIT)
    return ElementMap(box, slots, table), there


@given(element_maps(), st.randoms(use_true_random=False))
def test_changes_go_where_the_checkpoint_has_them(
    map_and_truth: tuple[ElementMap, dict[str, Indices]], random: object
) -> None:
    element_map, there = map_and_truth
    held = truth(element_map.box)
    local = np.array([i for i in range(held.size) if random.random() < 0.5], np.int64)  # type: ignore[attr-defined]
    found = []
    for spec, select, indices in element_map.split(local):
        assert (np.diff(indices) > 0).all()
        assert held[local[select]].tolist() == there[spec.name][indices].tolist()
        found += local[select].tolist()
    assert sorted(found) == local.tolist()


@given(element_maps(), st.integers(1, 9))
def test_windows_are_everything_once(
    map_and_truth: tuple[ElementMap, dict[str, Indices]], limit: int
) -> None:
    element_map, there = map_and_truth
    held, found = truth(element_map.box), []
    for spec, select, indices in element_map.windows(limit):
        places = np.asarray(indices)
        assert places.size <= limit
        assert (np.diff(places) > 0).all()
        assert held[select].tolist() == there[spec.name][places].tolist()
        found += np.arange(held.size)[select].tolist()
    assert sorted(found) == list(range(held.size))


def test_a_window_is_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RUNS > 1
    monkeypatch.setattr("deltachain.publish.model.layout.RUNS", 3)
    spec = TensorSpec("w", "BF16", (8, 8))
    columns = ElementMap.straight(spec, Box((8, 8), (0, 2), (8, 2)))
    assert [len(window.indices) for window in columns.windows(1000)] == [6, 6, 4]


def test_what_is_held_whole_is_found() -> None:
    slots = fused(3, 4, 5)
    rows = ElementMap(Box((3, 8, 5), (1, 0, 0), (2, 8, 5)), slots)
    assert rows.all_of(slots[0].spec) is None
    assert rows.all_of(slots[2].spec) == slice(0, 20)
    assert rows.all_of(slots[5].spec) == slice(60, 80)
    columns = ElementMap(Box((3, 8, 5), (0, 0, 0), (3, 8, 4)), slots)
    assert all(columns.all_of(slot.spec) is None for slot in slots)
