"""Windows and places, against brute force: every index by itself, on numpy and on torch bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltachain.delta import TensorDelta
from deltachain.format.keys import digest_key
from deltachain.kernels import device, reference
from deltachain.kernels.device import live_bits, storage_bits
from deltachain.replica import windows
from deltachain.replica.windows import Placement, Window, nested
from deltachain.subscribe.targets.patch import prepare, state_of, write
from deltachain.types import BITS_DTYPES, TensorSpec

ON_HOST = [True, False]
"""Whether bits are numpy's, or torch's as on a device."""


def numpy_of(bits: Any) -> Any:
    """Bits as numpy has them, whoever works on them."""
    if not isinstance(bits, Tensor):
        return bits
    return bits.numpy().view(f"<u{bits.element_size()}")


def forced(patch: pytest.MonkeyPatch, on_host: bool) -> None:
    """Let torch work on bits of the host, as it does on those of a device."""
    if not on_host:
        patch.setattr(device, "on_host", lambda _: False)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """A full tensor's shape, a strided view of its flat indices, and a live view of that shape."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    view = torch.arange(int(np.prod(shape))).view(shape)
    for axis in range(view.ndim):
        start = draw(st.integers(0, view.shape[axis] - 1))
        size = draw(st.integers(1, view.shape[axis] - start))
        step = draw(st.integers(1, 3))
        view = view.narrow(axis, start, size)[(slice(None),) * axis + (slice(None, None, step),)]
    view = view.permute(draw(st.permutations(range(view.ndim))))
    live = draw(lives(tuple(view.shape)))
    assume(is_nested(view))
    return shape, view, live


@st.composite
def lives(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """A view of some storage: permuted, padded on both sides, strided, at an offset."""
    order = draw(st.permutations(range(len(shape))))
    pads = [draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in order]
    step = draw(st.integers(1, 2))
    sizes = [step * shape[axis] + sum(pad) for axis, pad in zip(order, pads, strict=True)]
    seed = draw(st.integers(0, 1 << 16))
    generator = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from([torch.int16, torch.uint8, torch.int32, torch.int64]))
    live = torch.randint(0, 100, sizes, generator=generator).to(dtype)
    for axis, pad in enumerate(pads):
        size = live.shape[axis] - sum(pad)
        cut = live.narrow(axis, pad[0], size)
        live = cut[(slice(None),) * axis + (slice(None, None, step),)]
    live = live.permute([order.index(axis) for axis in range(len(shape))])
    assume(is_nested(live))
    return live


def is_nested(view: Tensor) -> bool:
    """Whether division finds its coordinates; steps may interleave so that it does not."""
    return nested(zip(view.shape, view.stride(), strict=True))


def place_of(view: Tensor, live: Tensor) -> Placement:
    """The place that a recorded copy of this view into that one would make."""
    return Placement(live, int(view.storage_offset()), view.stride())


def where(view: Tensor, live: Tensor) -> dict[int, int]:
    """Position in live storage of every flat index, one at a time."""
    at = live.storage_offset() + sum(
        torch.arange(n).view([-1 if i == axis else 1 for i in range(live.ndim)]) * s
        for axis, (n, s) in enumerate(zip(live.shape, live.stride(), strict=True))
    )
    positions = torch.as_tensor(at).expand(live.shape).reshape(-1).tolist()
    return dict(zip(view.reshape(-1).tolist(), positions, strict=True))


@pytest.mark.parametrize("on_host", ON_HOST)
@settings(max_examples=60, deadline=None)
@given(boxes(), st.integers(0, 1 << 16), st.floats(0, 1))
def test_indices_go_where_one_by_one_they_would(
    on_host: bool, box: tuple[tuple[int, ...], Tensor, Tensor], seed: int, share: float
) -> None:
    shape, view, live = box
    truth = where(view, live)
    numel = int(np.prod(shape))
    indices = np.flatnonzero(np.random.default_rng(seed).random(numel) < share)
    with pytest.MonkeyPatch.context() as patch:
        forced(patch, on_host)
        place = place_of(view, live)
        given_ = indices if on_host else torch.from_numpy(indices)
        selected, positions = place.locate(given_)
        picked = numpy_of(given_)[
            selected if isinstance(selected, slice) else np.asarray(selected)
        ].tolist()
    assert picked == [index for index in indices.tolist() if index in truth]
    assert np.asarray(positions).tolist() == [truth[index] for index in picked]


@pytest.mark.parametrize("on_host", ON_HOST)
@settings(max_examples=40, deadline=None)
@given(boxes())
def test_view_cut_and_numbers_are_of_the_same_elements_in_the_same_order(
    on_host: bool, box: tuple[tuple[int, ...], Tensor, Tensor]
) -> None:
    shape, view, live = box
    truth = where(view, live)
    numel = int(np.prod(shape))
    with pytest.MonkeyPatch.context() as patch:
        forced(patch, on_host)
        patch.setattr(windows, "BLOCK", 3)
        place = place_of(view, live)
        flat = np.arange(numel, dtype=BITS_DTYPES[live.element_size()])
        numbers = np.full(place.view.shape, -1)
        for which, found in place.numbers():
            numbers[which] = np.asarray(found).reshape(numbers[which].shape)
        taken = numpy_of(place.take(flat))
        held, storage = numpy_of(place.view), numpy_of(place.storage)
    assert sorted(numbers.ravel().tolist()) == sorted(truth)
    assert (taken == numbers.astype(taken.dtype)).all()
    expected = [storage[truth[index]] for index in numbers.ravel().tolist()]
    assert held.ravel().tolist() == expected


@settings(max_examples=40, deadline=None)
@given(boxes(), st.data())
def test_a_window_is_the_same_however_it_is_laid_out(
    box: tuple[tuple[int, ...], Tensor, Tensor], data: st.DataObject
) -> None:
    _, view, live = box
    one = place_of(view, live)
    turned = view.permute(data.draw(st.permutations(range(view.ndim))))
    other = place_of(turned, data.draw(lives(tuple(turned.shape))))
    assert one.window == other.window
    assert one.window.numel == one.numel == view.numel()
    assert all(size > 1 for size in one.window.size)
    again = torch.as_strided(
        torch.arange(1 << 16), one.window.size, one.window.stride, one.window.offset
    )
    assert sorted(again.reshape(-1).tolist()) == sorted(view.reshape(-1).tolist())


@settings(max_examples=40, deadline=None)
@given(boxes(), boxes())
def test_windows_of_other_elements_differ(
    one: tuple[tuple[int, ...], Tensor, Tensor], other: tuple[tuple[int, ...], Tensor, Tensor]
) -> None:
    elements = [set(view.reshape(-1).tolist()) for _, view, _ in (one, other)]
    first, second = (place_of(view, live).window for _, view, live in (one, other))
    assert (first == second) == (elements[0] == elements[1])


def changed(spec: TensorSpec, seed: int, kind: str) -> TensorDelta:
    """A delta of a third of the elements, or of all."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(1, 200, spec.numel).astype(spec.bits_dtype)
    if kind == "dense":
        return TensorDelta.dense(spec, bits)
    indices = np.flatnonzero(rng.random(spec.numel) < 0.3)
    masks: dict[str, Any] = {
        "step": np.array(False),
        "absolute": np.array(True),
        "mixed": rng.random(indices.size) < 0.5,
    }
    return TensorDelta(spec=spec, indices=indices, values=bits[indices], absolute=masks[kind])


@pytest.mark.parametrize("on_host", ON_HOST)
@pytest.mark.parametrize("kind", ["step", "absolute", "mixed", "dense"])
@settings(max_examples=15, deadline=None)
@given(box=boxes(), seed=st.integers(0, 1 << 16))
def test_a_delta_is_written_and_taken_back_and_its_digest_is_told(
    on_host: bool, kind: str, box: tuple[tuple[int, ...], Tensor, Tensor], seed: int
) -> None:
    shape, view, live = box
    truth = where(view, live)
    dtypes = {1: "U8", 2: "I16", 4: "I32", 8: "I64"}
    spec = TensorSpec("w", dtypes[live.element_size()], shape)
    delta = changed(spec, seed, kind)
    with pytest.MonkeyPatch.context() as patch:
        forced(patch, on_host)
        place = place_of(view, live)
        bits = numpy_of(live_bits(storage_bits(live)))
        before, expected = bits.copy(), bits.copy()
        indices = range(spec.numel) if delta.indices is None else delta.indices.tolist()
        absolute = np.broadcast_to(delta.absolute, delta.values.shape)
        for index, value, whole in zip(indices, delta.values, absolute, strict=True):
            if index in truth:
                old = expected[truth[index] : truth[index] + 1]
                old[:] = value if whole else old + value
        state = state_of(spec, place)
        made = prepare(place, delta)
        assert (bits == before).all(), "staging wrote"
        write(place, made)
        assert (bits == expected).all()
        assert state_of(spec, place) == state + made.change
        write(place, made.undo())
        assert (bits == before).all()
    assert made.effect.nnz == sum(index in truth for index in indices)
    if kind == "dense":
        assert made.effect.written == state + made.effect.change
    held = np.array(sorted(truth))
    old_bits = before[[truth[index] for index in held.tolist()]]
    assert state == reference.digest_at(digest_key(spec), held, old_bits)


def overlapping() -> dict[str, Callable[[], Placement]]:
    base = torch.zeros(12)
    return {
        "a source that repeats itself": lambda: Placement(base.view(3, 4), 0, (0, 1)),
        "a source that overlaps itself": lambda: Placement(base.view(3, 4), 0, (2, 1)),
        "a live view that repeats itself": lambda: Placement(base[:4].expand(3, 4), 0, (4, 1)),
        "a live view that overlaps itself": lambda: Placement(base.unfold(0, 4, 2)[:4], 0, (4, 1)),
    }


@pytest.mark.parametrize("what", overlapping())
def test_what_overlaps_itself_is_no_place(what: str) -> None:
    with pytest.raises(ValueError, match="overlaps itself"):
        overlapping()[what]()


def test_nested_is_what_reaches_every_index_in_one_way() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        dims = [(int(rng.integers(1, 4)), int(rng.integers(0, 13))) for _ in range(3)]
        reached = [0]
        for size, stride in dims:
            reached = [at + i * stride for at in reached for i in range(size)]
        if nested(dims):
            assert len(set(reached)) == len(reached), dims


def test_one_element_and_none() -> None:
    for size in (1, 0):
        live = torch.full((size, 1), 5, dtype=torch.int16)
        place = Placement(live, 3, (7, 7))
        spec = TensorSpec("w", "I16", (8,))
        picked, positions = place.locate(np.arange(8))
        assert np.arange(8)[picked].tolist() == [3] * size
        assert np.asarray(positions).tolist() == [0] * size
        held = np.array([3] * size, dtype=np.int64)
        bits = np.array([5] * size, "<u2")
        assert state_of(spec, place) == reference.digest_at(digest_key(spec), held, bits)
    assert Placement(torch.zeros(1), 3, (7,)).window == Window(3, (), ())


def test_bits_of_a_storage_are_all_of_it_and_share_its_memory() -> None:
    whole = torch.zeros(6, 4, dtype=torch.bfloat16)
    bits = live_bits(storage_bits(whole[2:, 1:3]))
    assert bits.shape == (24,)
    whole[5, 3] = 1.0
    assert int(bits[23]) == 0x3F80
