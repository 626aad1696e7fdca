import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltachain import threads as slab
from deltachain.chain.chain import Chain
from deltachain.codec import Change, Part, encode_part
from deltachain.delta import ABSOLUTE, STEP, TensorDelta, changes, density, fold, fold_all
from deltachain.errors import ConfigError, MalformedError
from deltachain.format.documents import Edge, ObjectRef, Table
from deltachain.format.keys import digest_key, payload_key
from deltachain.publish.writer import Writer
from deltachain.replica.layout.classes import join_sets
from deltachain.store import MemoryStore
from deltachain.types import Bits, Indices, TensorSpec
from deltachain.verify import verify
from tests.contract import reference
from tests.support.fetch import fetch


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
@pytest.mark.parametrize("count", [0, 1, 3, 50_000, 1 << 20, slab.NBYTES])
def test_an_array_has_the_size_that_was_asked_for(count: int, dtype: type) -> None:
    found = slab.empty(count, dtype)
    assert found.shape == (count,)
    assert found.dtype == dtype
    assert found.flags.writeable
    assert found.flags.aligned


def test_arrays_in_use_are_never_written_by_others() -> None:
    rng = np.random.default_rng(0)
    kept: dict[int, np.ndarray] = {}
    for number in range(600):
        found = slab.empty(int(rng.integers(1, 1 << 20)), np.uint16)
        found[:] = number
        kept[number] = found[found.size // 3 :]  # a view keeps its memory too
        del found
        if len(kept) > 5:
            gone = int(rng.choice(list(kept)))
            assert (kept.pop(gone) == gone).all()
    assert all((array == number).all() for number, array in kept.items())


def test_memory_that_nobody_uses_is_used_again() -> None:
    one = slab.empty(100_000, np.uint16)
    at = one.ctypes.data
    assert slab.empty(100_000, np.uint16).ctypes.data != at
    del one
    assert slab.empty(100_000, np.uint16).ctypes.data == at


groups = st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=12)


def slowly(given_groups: list[list[int]]) -> set[frozenset[int]]:
    found = {frozenset(group) for group in given_groups if group}
    while pair := next((p for p in itertools.combinations(found, 2) if p[0] & p[1]), None):
        found = found - set(pair) | {pair[0] | pair[1]}
    return found


@given(groups)
def test_they_are_joined_over_others(some: list[list[int]]) -> None:
    found = join_sets(some)
    assert set(found) == slowly(some)
    assert len(found) == len(set(found))
    order = list(dict.fromkeys(itertools.chain.from_iterable(some)))
    assert [min(map(order.index, one)) for one in found] == sorted(
        min(map(order.index, one)) for one in found
    )


def test_long_chains_take_no_time() -> None:
    pairs = itertools.pairwise(range(200_000))
    assert join_sets(pairs) == [frozenset(range(200_000))]


WINDOWED = TensorSpec("w", "BF16", (6, 4))
BITS: Bits = np.arange(100, 124, dtype=np.uint16)
COLUMNS = np.arange(24).reshape(6, 4)


def window(indices: Indices) -> Change:
    delta = TensorDelta(spec=WINDOWED, indices=indices, values=BITS[indices], absolute=ABSOLUTE)
    return Change(
        delta, reference.digest_at(digest_key(WINDOWED), indices, BITS[indices]), windows=True
    )


def chain_of(*windows: Indices) -> Chain:
    """A chain whose only version is an anchor in as many parts."""
    store = MemoryStore()
    table = Table(tensors=((WINDOWED.name, WINDOWED.dtype, WINDOWED.shape),))
    chain = Chain.create(store, table, chain_id="0" * 32, time=0.0, assets={})
    writer = Writer(chain, numel=WINDOWED.numel, metadata={}, parent=None)
    refs = []
    for number, indices in enumerate(windows):
        part = encode_part([window(indices)])
        key = payload_key("anchor", 0, 0, f"{number:032x}", 0)
        store.put(key, part.data)
        nbytes, directory = len(part.data), part.directory
        refs.append(ObjectRef(key=key, nbytes=nbytes, blake3=part.digest, directory=directory))
    edge = Edge(kind="anchor", encodings=("dense",), parts=tuple(refs))
    state = reference.digest(digest_key(WINDOWED), BITS)
    writer.commit(edge, state=state, step=None, nnz=WINDOWED.numel)
    return chain


@pytest.mark.parametrize(
    "windows",
    [
        [np.arange(0, 8), np.arange(8, 24)],
        [np.arange(8, 24), np.arange(0, 8)],
        [COLUMNS[:, :1].reshape(-1), COLUMNS[:, 1:].reshape(-1)],
        [np.arange(0, 7), np.arange(7, 9), np.arange(9, 24)],
    ],
)
def test_windows_add_up_to_the_tensor(windows: list[Indices]) -> None:
    chain = chain_of(*windows)
    head = chain.head()
    assert head is not None
    delta = fetch(chain, chain.plan(None, head)).read("w")
    assert delta.is_dense
    assert delta.values.tolist() == BITS.tolist()
    assert len(list(verify(chain))) == 1


def test_an_element_that_two_parts_give_is_refused() -> None:
    chain = chain_of(np.arange(0, 9), np.arange(8, 24))
    with pytest.raises(MalformedError, match="'w' twice"):
        list(verify(chain))


def test_a_window_is_a_segment_for_each_run_and_never_raw() -> None:
    part = Part.from_bytes(encode_part([window(COLUMNS[:, 1:3].reshape(-1))]).data)
    assert part.directory.segments.start == (1, 5, 9, 13, 17, 21)
    assert part.directory.segments.length == (2,) * 6
    with pytest.raises(ConfigError, match="windows"):
        encode_part([window(np.arange(3))], raw=True)


DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}


def apply(bits: Bits, delta: TensorDelta) -> Bits:
    """What a delta does, element by element and by the book."""
    new = bits.copy()
    top = 1 << 8 * bits.itemsize
    indices = range(bits.size) if delta.indices is None else delta.indices.tolist()
    mask = np.broadcast_to(delta.absolute, delta.values.shape).tolist()
    for i, value, absolute in zip(indices, delta.values.tolist(), mask, strict=True):
        new[i] = value if absolute else (int(bits[i]) + value) % top
    return new


@st.composite
def histories(draw: st.DrawFn) -> tuple[Bits, list[TensorDelta]]:
    """Bits of a small tensor, and deltas of every kind to them, small enough to collide."""
    width = draw(st.sampled_from(sorted(DTYPES)))
    numel = draw(st.integers(0, 6))
    spec = TensorSpec("w", DTYPES[width], (numel,))
    top = (1 << 8 * width) - 1
    some = st.one_of(st.sampled_from([1, top, top // 2 + 1, 2]), st.integers(1, top))
    deltas = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["step", "absolute", "mixed", "dense"]))
        if kind == "dense":
            whole = draw(st.lists(st.integers(0, top), min_size=numel, max_size=numel))
            deltas.append(TensorDelta.dense(spec, np.array(whole, spec.bits_dtype)))
            continue
        indices = draw(st.sets(st.integers(0, numel - 1))) if numel else set()
        mask = {"step": STEP, "absolute": ABSOLUTE}.get(kind)
        if mask is None:
            mask = np.array([draw(st.booleans()) for _ in indices], np.bool_)
        values = [draw(some) for _ in indices]
        deltas.append(
            TensorDelta(
                spec=spec,
                indices=np.array(sorted(indices), np.int64),
                values=np.array(values, spec.bits_dtype),
                absolute=mask,
            )
        )
    bits = draw(st.lists(st.integers(0, top), min_size=numel, max_size=numel))
    return np.array(bits, spec.bits_dtype), deltas


def form(delta: TensorDelta) -> tuple[Any, ...]:
    """All there is to a delta, in a form that compares."""
    mask = np.broadcast_to(delta.absolute, delta.values.shape).tolist()
    indices = None if delta.indices is None else delta.indices.tolist()
    return indices, delta.values.tolist(), mask, delta.values.dtype


@settings(max_examples=300)
@given(histories())
def test_a_folded_delta_does_what_its_parts_do_and_changes_none_of_them(
    history: tuple[Bits, list[TensorDelta]],
) -> None:
    bits, deltas = history
    before = [form(delta) for delta in deltas]
    folded = fold_all(deltas).validate()
    assert [form(delta) for delta in deltas] == before
    expected = bits
    for delta in deltas:
        expected = apply(expected, delta.validate())
    assert apply(bits, folded).tolist() == expected.tolist()


@pytest.mark.full
@settings(max_examples=300)
@given(histories(), st.data())
def test_folding_is_associative(
    history: tuple[Bits, list[TensorDelta]], data: st.DataObject
) -> None:
    deltas = list(history[1])
    expected = form(fold_all(deltas))
    while len(deltas) > 1:
        at = data.draw(st.integers(0, len(deltas) - 2))
        deltas[at : at + 2] = [fold(deltas[at], deltas[at + 1])]
    assert form(deltas[0]) == expected


@settings(max_examples=100)
@given(histories())
def test_changes_are_the_steps_from_old_to_new(history: tuple[Bits, list[TensorDelta]]) -> None:
    old, deltas = history
    new = apply(old, deltas[0])
    found = changes(deltas[0].spec, old, new).validate()
    assert not found.absolute.any()
    assert apply(old, found).tolist() == new.tolist()
    assert found.nnz == int(np.count_nonzero(old != new))
    assert found.indices is not None
    assert np.array_equal(found.new_bits(old[found.indices]), new[found.indices])


def test_few_elements_fold_as_they_should() -> None:
    spec = TensorSpec("w", "BF16", (2,))
    old, new = np.array([0, 5], np.uint16), np.array([0x8000, 6], np.uint16)
    there, back = changes(spec, old, new), changes(spec, new, old)
    assert fold(there, back).nnz == 0
    assert fold(there, there).values.tolist() == [2]  # 0x8000 twice is nothing
    spec = TensorSpec("w", "U8", (2,))
    whole = TensorDelta.dense(spec, np.array([7, 8], np.uint8))
    halves = [replace(whole, indices=np.array([n]), values=whole.values[n : n + 1]) for n in (0, 1)]
    folded = fold_all(halves)
    assert folded.is_dense
    assert folded.values.tolist() == [7, 8]


SPEC = TensorSpec("layer.w", "BF16", (4,))


def sparse(**fields: Any) -> TensorDelta:
    sound: dict[str, Any] = {
        "spec": SPEC,
        "indices": np.array([0, 3], np.int64),
        "values": np.array([1, 2], np.uint16),
    }
    return TensorDelta(**(sound | fields))


def test_what_keeps_its_promises_is_valid() -> None:
    delta = sparse()
    assert delta.validate() is delta
    assert (delta.nnz, delta.nbytes, delta.is_dense) == (2, 20, False)
    assert (density(0, 0), density(1, 4)) == (0.0, 0.25)
    assert sparse(absolute=np.array([True, False])).validate().nnz == 2
    assert sparse(values=np.array([0, 0], np.uint16), absolute=ABSOLUTE).validate().nnz == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"values": np.array([1, 2], np.uint32)},
        {"values": np.array([1, 2], np.int16)},
        {"values": np.array([[1, 2]], np.uint16)},
        {"values": np.array([1], np.uint16)},
        {"values": np.array([1, 0], np.uint16)},
        {"indices": np.array([0, 3], np.int32)},
        {"indices": np.array([3, 0], np.int64)},
        {"indices": np.array([3, 3], np.int64)},
        {"indices": np.array([0, 4], np.int64)},
        {"indices": np.array([-1, 3], np.int64)},
        {"indices": np.array([[0, 3]], np.int64)},
        {"indices": None},
        {"indices": None, "values": np.zeros(4, np.uint16)},
        {"indices": None, "values": np.zeros(3, np.uint16), "absolute": ABSOLUTE},
        {"absolute": np.array([True])},
        {"absolute": np.array([True, False, True])},
        {"absolute": np.array([True, False]), "values": np.array([1, 0], np.uint16)},
    ],
)
def test_what_breaks_a_promise_is_malformed(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedError, match=r"layer\.w"):
        sparse(**fields).validate()
