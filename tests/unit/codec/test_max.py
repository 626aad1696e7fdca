import math
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltachain.chain.tensor_plan import TensorPlan
from deltachain.codec import ENCODINGS, Change, Part, encode_part
from deltachain.codec import container as d
from deltachain.codec.container import TensorRow
from deltachain.codec.encodings.max import coder, encoding, tiles
from deltachain.codec.rows import (
    SHARED_NUMEL,
    RowDigests,
    check_digests,
    groups,
    share,
    with_full_rows,
    with_short_rows,
)
from deltachain.delta import ABSOLUTE, OldBits, TensorDelta, changes
from deltachain.errors import ConfigError, DigestMismatchError, MalformedError
from deltachain.format.keys import digest_key
from deltachain.kernels import host as kernel_host
from deltachain.kernels.arrays import WindowPlace
from deltachain.kernels.protocol import digest_change
from deltachain.replica.unused_state import UnusedState
from deltachain.types import WIRE_DTYPES, Bits, StateDigest, TensorSpec
from deltachain.verify import Weights
from tests.contract import reference_tiles
from tests.format import freeze, stranger
from tests.format.forge import take_apart
from tests.format.stranger import RefusedError
from tests.support.values import present
from tests.unit.codec.test_roundtrip import DENSITIES, delta_of

NAMES = ("h.0.a", "h.0.b", "h.0.c", "h.1.a", "h.1.b")
SPECS = tuple(TensorSpec(name, "BF16", (64, 32)) for name in NAMES)


def digest(number: int) -> StateDigest:
    return StateDigest(number, 2**64 - number)


def row(name: str, number: int, *, encoding: str = "max", numel: int = 10) -> TensorRow:
    return TensorRow(
        name=name,
        dtype="BF16",
        shape=(numel,),
        encoding=encoding,
        bucket=0,
        gap=1,
        nnz=1,
        segments=1,
        digest=str(digest(number)) if number else "",
    )


BETWEEN = [row("h.0.a", 1), row("h.0.s", 7, encoding="step"), row("h.0.b", 2), row("h.1.a", 3)]
HALF = SHARED_NUMEL // 2


@pytest.mark.parametrize(
    ("rows", "digests"),
    [
        ([row(name, number) for number, name in enumerate(NAMES, 1)], ["", "", "6", "", "9"]),
        ([row("h.0.a", 1), row("h.0.b", 2, encoding="step"), row("h.0.c", 3)], ["", "2", "4"]),
        (BETWEEN, ["", "7", "3", "3"]),
        ([row("embed", 1), row("embed.x", 2), row("h.10.a", 3)], ["1", "2", "3"]),
        ([row("h.1.a", 1), row("h.10.b", 2)], ["1", "2"]),
        ([row(f"h.0.{n}", n, numel=HALF) for n in (1, 2, 3)], ["", "3", "3"]),
        ([row("h.0.a", 1, numel=HALF), row("h.0.b", 2, numel=HALF + 1)], ["1", "2"]),
        ([], []),
    ],
    ids=[
        "layers",
        "other encoding",
        "between",
        "no layer",
        "other layer",
        "large",
        "too large",
        "none",
    ],
)
def test_tensors_of_a_layer_leave_their_digests_to_the_last(
    rows: list[TensorRow], digests: list[str]
) -> None:
    found = share(rows)
    assert [one.digest and str(StateDigest.parse(one.digest).lane0) for one in found] == digests


def test_rows_of_other_encodings_lie_between_those_of_a_group() -> None:
    names = [[one.name for one in group] for group in groups(share(BETWEEN))]
    assert names == [["h.0.s"], ["h.0.a", "h.0.b"], ["h.1.a"]]


def test_changes_are_compared_where_the_digest_of_all_is_known() -> None:
    rows = share([row(name, number) for number, name in enumerate(NAMES, 1)])
    found = RowDigests(rows)
    assert found.add("h.0.c", digest(3)) is None
    assert found.add("h.1.b", digest(5)) is None
    assert found.add("h.0.a", digest(1)) is None
    assert found.add("h.0.b", digest(2)) == (digest(1) + digest(2) + digest(3),) * 2
    other = present(found.add("h.1.a", digest(7)))
    assert other.actual - other.expected == digest(7) - digest(4)
    assert found.named("h.1.a") == "'h.1.a' to 'h.1.b'"
    assert RowDigests([row("w", 1)]).named("w") == "'w'"


def weights() -> tuple[dict[str, Bits], dict[str, Bits]]:
    rng = np.random.default_rng(3)
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for spec in SPECS:
        values = (rng.standard_normal(spec.numel) * 0.02).astype(np.float32)
        old[spec.name] = (values.view(np.uint32) >> 16).astype(np.uint16)
        new[spec.name] = old[spec.name] + (rng.random(spec.numel) < 0.02).astype(np.uint16)
    return old, new


def data_of(old: dict[str, Bits], new: dict[str, Bits]) -> bytes:
    rows = []
    for spec in SPECS:
        delta = changes(spec, old[spec.name], new[spec.name])
        at = present(delta.indices)
        change = digest_change(spec, at, old[spec.name][at], new[spec.name][at])
        encoding, before = ENCODINGS.get("max"), partial(OldBits, old[spec.name])
        rows.append(Change(delta, change, encoding=encoding, old=before))
    return encode_part(rows).data


def test_a_part_states_the_sums_and_strangers_read_it() -> None:
    old, new = weights()
    data = data_of(old, new)
    part = Part.from_bytes(data)
    assert [bool(one.digest) for one in part.directory.tensors] == [False, False, True, False, True]
    digests = RowDigests(part.directory.tensors)
    for spec in SPECS:
        delta = part.read(spec.name, old=OldBits(old[spec.name]))
        assert delta.indices is not None
        after = delta.new_bits(old[spec.name][delta.indices])
        assert (after == new[spec.name][delta.indices]).all()
        change = digest_change(spec, delta.indices, old[spec.name][delta.indices], after)
        found = digests.add(spec.name, change)
        assert found is None or found.actual == found.expected
    theirs = stranger.read_part(data, {name: bits.tolist() for name, bits in old.items()})
    assert list(theirs) == list(NAMES)


def test_a_digest_left_to_no_row_is_malformed() -> None:
    old, new = weights()
    pieces = take_apart(data_of(old, new))
    pieces.rows[-1]["digest"] = ""
    data = pieces.build()
    with pytest.raises(MalformedError, match=r"no row has the digest of tensor 'h\.1\.b'"):
        Part.from_bytes(data)
    with pytest.raises(RefusedError, match="digest"):
        stranger.read_part(data, {name: bits.tolist() for name, bits in old.items()})


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row("a", 0), row("b", 1, encoding="step")], "no row has the digest of tensor 'a'"),
        ([row("a", 0, encoding="step"), row("b", 1)], "no digest of tensor 'a'"),
        ([row("a", 1), row("b", 0)], "no row has the digest of tensor 'b'"),
        ([row("a", 1), row("", 0)], "no row has the digest of tensor ''"),
        ([msgspec.structs.replace(row("a", 1), digest="0" * 31)], "is not a state digest"),
    ],
)
def test_digests_that_are_none_are_refused(rows: list[TensorRow], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_digests(rows)


def told_wrongly(old: dict[str, Bits], new: dict[str, Bits]) -> bytes:
    """A part whose first digest is that of other changes."""
    pieces = take_apart(data_of(old, new))
    total = StateDigest.parse(pieces.rows[2]["digest"])
    pieces.rows[2]["digest"] = str(total + StateDigest(1, 0))
    return pieces.build()


def proven(data: bytes, old: dict[str, Bits], new: dict[str, Bits]) -> dict[str, Bits]:
    """The weights after the proof of an edge of one part."""
    digests = {s.name: kernel_host.digest(digest_key(s), old[s.name]) for s in SPECS}
    specs = {spec.name: spec for spec in SPECS}
    found, part = Weights(specs), Part.from_bytes(data)
    found.digests = digests
    for name, spec in specs.items():
        found.put(TensorDelta.dense(spec, old[name]))
    edge = SimpleNamespace(record=None, version=1, base=0, kind="delta")
    fetched: Any = SimpleNamespace(
        plan=SimpleNamespace(edges=[edge]),
        names=NAMES,
        parts=[part],
        tensor_plan=lambda name: TensorPlan(specs[name], (part,)),
    )
    state = sum((kernel_host.digest(digest_key(s), new[s.name]) for s in SPECS), StateDigest())
    found.prove(fetched, state, write=True)
    return {name: found.bits(spec, 0, spec.numel) for name, spec in specs.items()}


def test_verification_compares_the_sums() -> None:
    old, new = weights()
    bits = proven(data_of(old, new), old, new)
    assert all((bits[name] == new[name]).all() for name in NAMES)
    with pytest.raises(DigestMismatchError, match=r"'h\.0\.a' to 'h\.0\.c'"):
        proven(told_wrongly(old, new), old, new)


@dataclass
class Plan:
    """A plan whose parts have the given rows."""

    rows: list[list[TensorRow]]
    base: Any = None
    specs: dict[str, TensorSpec] = field(
        default_factory=lambda: {name: TensorSpec(name, "BF16", (10,)) for name in "abcd"}
    )

    @property
    def parts(self) -> list[Any]:
        return [SimpleNamespace(rows={one.name: one for one in rows}) for rows in self.rows]


def after(state: UnusedState, *rows: TensorRow) -> UnusedState:
    plan: Any = Plan([list(rows)])
    return state.after(plan)


def whole(name: str, number: int) -> TensorRow:
    return msgspec.structs.replace(row(name, number, encoding="dense"), nnz=10)


def test_unused_tensors_that_share_a_digest_are_known_in_their_sum() -> None:
    state = UnusedState({"a": digest(1), "b": digest(2)})
    one = after(state, row("a", 0), row("b", 30))
    assert one.total == digest(1) + digest(2) + digest(30)
    effect = present(state.effect(one))
    assert effect.change == digest(30)
    two = after(one, row("a", 100))
    assert two.total == digest(1) + digest(2) + digest(30) + digest(100)


def test_one_of_them_given_whole_says_nothing_of_the_others() -> None:
    state = UnusedState({"a": digest(1), "b": digest(2), "c": digest(3)})
    joint = after(state, row("a", 0), row("b", 30))
    one = after(joint, whole("a", 500))
    assert (one.digests, one.total) == ({"a": digest(500), "b": None, "c": digest(3)}, None)
    both = after(joint, whole("a", 500), whole("b", 600))
    assert both.total == digest(500) + digest(600) + digest(3)
    assert after(both, row("a", 7)).total == digest(500) + digest(600) + digest(3) + digest(7)


def test_a_digest_shared_with_a_tensor_in_use_says_nothing() -> None:
    state = UnusedState({"a": digest(1), "b": digest(2)})
    found = after(state, row("a", 0), row("c", 30))
    assert (found.digests, found.shared_with_used) == ({"a": None, "b": digest(2)}, "a")
    other = after(state, row("d", 0), row("c", 30))
    assert (other.total, other.shared_with_used) == (state.total, "")
    assert after(found, whole("a", 5)) == UnusedState({"a": digest(5), "b": digest(2)})
    unknown = UnusedState({"a": None, "b": digest(2)})
    assert after(unknown, row("a", 0), row("b", 30)).digests == {"a": None, "b": None}


def test_a_checkpoint_gives_each_anew() -> None:
    state = UnusedState({"a": digest(1), "b": None}, frozenset("ab"))
    bits: Bits = np.arange(10, dtype=np.uint16)
    plan: Any = Plan([], base=SimpleNamespace(bits=lambda _: bits))
    found = state.after(plan)
    assert not found.joint
    for name in "ab":
        assert found.digests[name] == kernel_host.digest(digest_key(plan.specs[name]), bits)


LETTERS = st.text(alphabet="ab.0:é", max_size=6)
SEGMENT = st.builds(
    d.Segment,
    start=st.just(0),
    length=st.just(d.SEGMENT),
    nnz=st.integers(0, 1 << 62),
    gaps=st.integers(0, 1 << 62),
)
ROW = st.tuples(LETTERS, st.sampled_from(["max", "step"]), st.lists(SEGMENT, max_size=3))


def directory(rows: list[tuple[str, str, list[d.Segment]]]) -> d.Directory:
    tensors = tuple(
        d.TensorRow(
            name=name,
            dtype="BF16",
            shape=(8, 6),
            encoding=encoding,
            bucket=0,
            gap=1,
            nnz=sum(segment.nnz for segment in segments),
            segments=len(segments),
            digest="",
        )
        for name, encoding, segments in rows
    )
    columns = d.columns_of([segment for *_, segments in rows for segment in segments])
    return d.Directory(tensors=tensors, segments=columns, streams=())


@given(st.lists(ROW, max_size=5))
def test_every_directory_comes_back_from_its_short_rows(
    rows: list[tuple[str, str, list[d.Segment]]],
) -> None:
    full = directory(rows)
    stored = with_short_rows(full)
    assert with_full_rows(stored) == full
    for (name, kind, _), row in zip(rows, stored.tensors, strict=True):
        assert (row.nnz == 0 and ":" in row.name) if kind == "max" else row.name == name


def test_names_of_too_many_characters_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d, "MAX_DIRECTORY", 4000)
    spec = TensorSpec("a" * 1000, "BF16", (8, 6))
    old = np.zeros(48, np.uint16)
    changes = [
        freeze.as_max(replace(spec, name=spec.name + letter), old, old + np.uint16(1))
        for letter in "abcd"
    ]
    assert len(Part.from_bytes(encode_part(changes[:3]).data).rows) == 3
    with pytest.raises(ConfigError, match="4004 characters"):
        encode_part(changes)


def test_columns_of_different_lengths_are_an_error() -> None:
    stored = with_short_rows(directory([("a", "max", [d.Segment(0, 48, 3, 9)])]))
    shorter = msgspec.structs.replace(stored.segments, nnz=())
    with pytest.raises(ValueError, match="columns differ in length"):
        with_full_rows(msgspec.structs.replace(stored, segments=shorter))


SHAPES = (
    (),
    (0,),
    (1,),
    (3, 0, 2),
    (7,),
    (17, 3),
    (2, 5, 13),
    (1000,),
    (512, 1024),
    (3, 300, 1000),
)
MAX = ENCODINGS.get("max")


def bits_of(seed: int, spec: TensorSpec) -> Bits:
    """Bits of weights of many exponents, with zeros of both signs and NaNs."""
    rng = np.random.default_rng(seed)
    wild: Bits = rng.integers(0, 256, spec.nbytes, np.uint8).view(spec.bits_dtype)
    if spec.dtype != "BF16":
        return wild
    normal = rng.standard_normal(spec.numel, dtype=np.float32) * np.float32(0.02)
    usual = (normal.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(rng.random(spec.numel) < 0.01, wild, usual)


def part_of(delta: TensorDelta, old: Bits, start: int = 0) -> Part:
    change = Change(delta, StateDigest(), encoding=MAX, old=partial(OldBits, old, start))
    return Part.from_bytes(encode_part([change]).data)


def equal(found: TensorDelta, delta: TensorDelta) -> bool:
    assert found.indices is not None
    assert delta.indices is not None
    return bool(
        np.array_equal(found.indices, delta.indices) and np.array_equal(found.values, delta.values)
    )


@settings(max_examples=80)
@given(
    st.integers(0, 2**32),
    st.sampled_from(sorted(WIRE_DTYPES)),
    st.sampled_from(SHAPES),
    st.sampled_from(DENSITIES),
)
def test_what_is_encoded_decodes_to_the_same(
    seed: int, dtype: str, shape: tuple[int, ...], density: float
) -> None:
    spec = TensorSpec("w", dtype, shape)
    old, delta = bits_of(seed, spec), delta_of(seed, spec, "step", density)
    part = part_of(delta, old)
    part.verify()
    found = part.read("w", old=OldBits(old)).validate()
    assert equal(found, delta)


def test_segments_near_some_elements_are_read_by_themselves() -> None:
    spec = TensorSpec("w", "BF16", (3000, 1024))
    old, delta = bits_of(1, spec), delta_of(1, spec, "step", 0.01)
    part = part_of(delta, old)
    assert delta.indices is not None
    for low, high in ((0, 10), (1_500_000, 1_600_000), (3_071_000, 3_072_000)):
        first, last = part.reader("w", (low, high)).segments[0], part.reader("w").segments[-1]
        start, stop = first.start, min(last.start + last.length, high + (1 << 20))
        found = part.read("w", (low, high), old=OldBits(old[start:stop], start))
        mine = (delta.indices >= low) & (delta.indices < high)
        assert found.indices is not None
        there = (found.indices >= low) & (found.indices < high)
        assert np.array_equal(found.indices[there], delta.indices[mine])
        assert np.array_equal(found.values[there], delta.values[mine])


def test_a_rank_encodes_the_rows_that_it_has() -> None:
    spec = TensorSpec("w", "BF16", (3000, 1024))
    old, delta = bits_of(2, spec), delta_of(2, spec, "step", 0.01)
    assert delta.indices is not None
    low, high = 1000 * 1024, 1700 * 1024
    mine = (delta.indices >= low) & (delta.indices < high)
    some = TensorDelta(spec=spec, indices=delta.indices[mine], values=delta.values[mine])
    part = part_of(some, old[low:high], low)
    assert all(low <= s.start and s.start + s.length <= high for s in part.reader("w").segments)
    assert equal(part.read("w", old=OldBits(old)), some)


def test_old_bits_are_asked_for() -> None:
    spec = TensorSpec("w", "BF16", (100,))
    old, delta = bits_of(3, spec), delta_of(3, spec, "step", 0.3)
    part = part_of(delta, old)
    assert part.needs_old("w")
    with pytest.raises(ConfigError, match="needs the bits before it"):
        part.read("w")
    spec = TensorSpec("w", "BF16", (encoding.SMALL_NUMEL + 1,))
    with pytest.raises(ConfigError, match="encoded with the bits before"):
        encode_part([Change(delta_of(3, spec, "step", 0.3), StateDigest(), encoding=MAX)])
    absolute = TensorDelta(
        spec=delta.spec, indices=delta.indices, values=delta.values, absolute=ABSOLUTE
    )
    with pytest.raises(ConfigError, match="indices and steps"):
        part_of(absolute, old)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from(sorted(WIRE_DTYPES)),
    st.sampled_from([shape for shape in SHAPES if math.prod(shape) <= encoding.SMALL_NUMEL]),
    st.sampled_from(DENSITIES),
)
def test_small_tensors_are_read_without_old_bits(
    seed: int, dtype: str, shape: tuple[int, ...], density: float
) -> None:
    spec = TensorSpec("w", dtype, shape)
    delta = delta_of(seed, spec, "step", density)
    data = encode_part([Change(delta, StateDigest(), encoding=MAX)]).data
    part = Part.from_bytes(data)
    part.verify()
    assert part.rows["w"].gap == 0
    assert not part.needs_old("w")
    assert equal(part.read("w").validate(), delta)
    theirs = stranger.read_part(data)["w"]
    assert delta.indices is not None
    assert (list(theirs.indices), list(theirs.values)) == (
        delta.indices.tolist(),
        delta.values.tolist(),
    )


def test_tensors_of_all_widths_share_a_bucket() -> None:
    specs = [
        TensorSpec("a", "F8_E4M3", (64, 64)),
        TensorSpec("a_scale", "F32", (4, 4)),
        TensorSpec("b", "F8_E4M3", (64, 64)),
        TensorSpec("norm", "BF16", (64,)),
    ]
    deltas = [delta_of(5, spec, "step", 0.3) for spec in specs]
    olds = [bits_of(n, spec) for n, spec in enumerate(specs)]
    changes = [
        Change(
            delta,
            StateDigest(),
            encoding=MAX,
            old=partial(OldBits, old) if MAX.encodes_with_old(spec) else None,
        )
        for spec, old, delta in zip(specs, olds, deltas, strict=True)
    ]
    part = Part.from_bytes(encode_part(changes).data)
    assert [row.name for row in part.directory.streams] == ["#0.class", "#0.tile"]
    assert [row.gap for row in part.directory.tensors] == [2, 0, 2, 0]
    for spec, old, delta in zip(specs, olds, deltas, strict=True):
        assert equal(part.read(spec.name, old=OldBits(old)), delta)


def test_other_old_bits_are_refused_or_give_other_elements() -> None:
    spec = TensorSpec("w", "BF16", (64, 100))
    old, delta = bits_of(4, spec), delta_of(4, spec, "step", 0.02)
    part, refused = part_of(delta, old), 0
    for seed in range(5, 25):
        try:
            found = part.read("w", old=OldBits(bits_of(seed, spec)))
            assert not equal(found, delta)
        except MalformedError:
            refused += 1
    assert refused


def test_sizes_at_the_densities_of_training() -> None:
    """Bits a change by binade as measured (the codec study): 6.7 is the limit at 1.2 %."""
    rng = np.random.default_rng(7)
    spec = TensorSpec("w", "BF16", (2048, 1024))
    weights = rng.standard_normal(spec.numel, dtype=np.float32) * np.float32(0.025)
    old = (weights.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    ulp = np.exp2(np.floor(np.log2(np.abs(weights) + 1e-30)) - 7)
    changed = rng.random(spec.numel) < np.minimum(3e-7 / ulp, 1)
    indices = np.flatnonzero(changed)
    values = np.where(rng.random(indices.size) < 0.5, 1, 0xFFFF).astype(np.uint16)
    delta = TensorDelta(spec=spec, indices=indices, values=values)
    max_nbytes = part_of(delta, old).front_nbytes + sum(
        sum(row.stored) for row in part_of(delta, old).directory.streams
    )
    step_nbytes = len(encode_part([Change(delta, StateDigest())]).content)
    assert 0.005 < indices.size / spec.numel < 0.03
    assert max_nbytes < 0.8 * step_nbytes


def test_small_tensors_share_tables_of_rates_and_sizes() -> None:
    """Codes of a byte, one in a thousand changed: a table of its own is not worth its bytes."""
    rng, changes, deltas = np.random.default_rng(8), [], []
    for number in range(24):
        spec = TensorSpec(f"w{number}", "F8_E4M3", (512, 512))
        old = rng.normal(0, 40, spec.numel).astype(np.int8).view(np.uint8)
        indices = np.flatnonzero(rng.random(spec.numel) < 0.001)
        values = rng.choice(np.array([1, 255], np.uint8), indices.size)
        if number == 23:  # unlike the others: larger steps, of all elements
            indices = np.arange(spec.numel)
            values = rng.integers(1, 100, spec.numel, np.uint8)
        deltas.append((TensorDelta(spec=spec, indices=indices, values=values), old))
        change = Change(deltas[-1][0], StateDigest(), encoding=MAX, old=partial(OldBits, old))
        changes.append(change)
    part = Part.from_bytes(encode_part(changes).data)
    for delta, old in deltas:
        assert equal(part.read(delta.spec.name, old=OldBits(old)), delta)
    tables = [part.reader(delta.spec.name).units("class").tobytes() for delta, _ in deltas]
    assert len(set(tables[:23])) < 6
    assert tables[23] not in tables[:23]


@pytest.mark.full
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(("shape", "cuts"), [((37, 64), 1), ((37, 64), 4), ((6, 2), 2), ((99,), 1)])
def test_kernels_agree_bit_for_bit(width: int, shape: tuple[int, ...], cuts: int) -> None:
    dtype = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}[width]
    spec = TensorSpec("w", dtype, shape)
    rng = np.random.default_rng(width)
    for density in DENSITIES:
        old, delta = bits_of(9, spec), delta_of(9, spec, "step", density)
        shift, mask = encoding.BINNED.get(dtype, (0, 255))
        grid = tiles.TileGrid(shape[-1], cuts, shift, mask)
        table = np.full(512, 255, np.uint8)
        for code in np.unique(tiles.bins(old, shift, mask)).tolist():
            table[code], table[256 + code] = rng.integers(0, 8), rng.integers(0, 8)
        check_kernels(rng, delta, old, table, grid)


def check_kernels(
    rng: np.random.Generator, delta: TensorDelta, old: Bits, table: Bits, grid: tiles.TileGrid
) -> None:
    assert delta.indices is not None
    band = -(-delta.spec.numel // grid.columns // 3) * grid.columns or delta.spec.numel
    starts = np.arange(0, delta.spec.numel, band)
    windows = np.stack([starts, np.minimum(band, delta.spec.numel - starts)], 1)
    args = windows, delta.indices, delta.values, old, table, grid
    coded, again = reference_tiles.encode_tiles(*args), coder.encode_tiles(*args)
    assert np.array_equal(coded.data, again.data)
    assert np.array_equal(coded.nbytes, again.nbytes)
    segments = np.zeros((len(windows), 6), np.int64)
    segments[:, :2], segments[:, 3] = windows, coded.nbytes
    segments[:, 2] = np.diff(np.searchsorted(delta.indices, [*starts, delta.spec.numel]))
    wanted = rng.random((len(windows), grid.cuts)) < 0.5
    for damage in range(40):
        data = coded.data.copy()
        if damage and data.size:
            data[rng.integers(data.size)] ^= 1 << rng.integers(8)
        for chosen in (None, wanted):
            streams = tiles.TileStreams(data, old, table, grid, chosen)
            found = [decoded(kernel, segments, streams) for kernel in (reference_tiles, coder)]
            assert found[0] == found[1]
            for box in boxes(grid, delta.spec.numel):
                staged = [
                    outcome(kernel, segments, streams, box) for kernel in (reference_tiles, coder)
                ]
                assert staged[0] == staged[1]
                assert (staged[0] is None) == (found[0] is None)
        if not damage:
            whole = decoded(coder, segments, tiles.TileStreams(data, old, table, grid))
            assert whole == (delta.indices.tolist(), delta.values.tolist())


def decoded(kernel: ModuleType, *args: object) -> tuple[list[int], list[int]] | None:
    try:
        indices, steps = kernel.decode_tiles(*args)
    except ValueError:
        return None
    return indices.tolist(), steps.tolist()


def boxes(grid: tiles.TileGrid, numel: int) -> list[WindowPlace]:
    """All elements in order; the later columns of each row, with a row of live bits between."""
    columns, rows = grid.columns, numel // grid.columns
    later = np.array([(rows, columns, 2 * columns), (columns - columns // 2, 1, 1)])
    return [WindowPlace(0, 0, np.array([(numel, 1, 1)])), WindowPlace(columns // 2, 3, later)]


def outcome(
    kernel: ModuleType,
    segments: npt.NDArray[np.int64],
    streams: tiles.TileStreams,
    box: WindowPlace,
) -> list[object] | None:
    """What a kernel stages, in order, with live bits that are not those before, and stay so."""
    room = box.at + 1 + int(((box.dims[:, 0] - 1) * box.dims[:, 2]).sum())
    live = np.random.default_rng(5).integers(0, 256, room * 8, np.uint8)
    weights = live.view(streams.old.dtype)[:room]
    before = weights.copy()
    try:
        staged = kernel.stage_tiles(segments, streams, box, weights, (1 << 63, 12345))
    except ValueError:
        return None
    finally:
        np.testing.assert_array_equal(weights, before)
    order = np.argsort(staged.positions)
    arrays = [(array.dtype, array[order].tolist()) for array in staged[:3]]
    return [*arrays, *staged[3:]]
