from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltachain import errors
from deltachain.codec import Change, encode_part
from deltachain.delta import TensorDelta
from deltachain.format.documents import ObjectRef
from deltachain.format.keys import digest_key
from deltachain.kernels import torch_kernels
from deltachain.kernels.torch_kernels import live_bits, storage_bits
from deltachain.replica import fetcher, placements
from deltachain.replica import rank as rank_module
from deltachain.replica import staged as staged_module
from deltachain.replica.batches import HostStager
from deltachain.replica.layout.classes import Classified, TensorClass
from deltachain.replica.layout.model_state import LoadGroup
from deltachain.replica.placements import Placement, Window, nested
from deltachain.replica.rank import Rank
from deltachain.replica.spool import Spool, SpooledObject, SpoolIndex, SpoolReader
from deltachain.replica.staged import RankStaged
from deltachain.store import MemoryStore
from deltachain.subscribe.targets.tensor_patch import prepare, state_of, write
from deltachain.types import Buffer, StateDigest, TensorSpec
from tests.contract import reference
from tests.gpu.ranks import Bench
from tests.support.engine import FakeModel, Sharding


class CountedStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.damages = 0

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        self.nbytes += nbytes
        return super().read(key, nbytes=nbytes, pin=pin)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.nbytes += length
        data = bytearray(super().get_range(key, start, length))
        if self.damages and start:
            self.damages -= 1
            data[-1] ^= 1
        return bytes(data)


def large_part(store: MemoryStore) -> tuple[ObjectRef, Sequence[TensorDelta]]:
    """An object of four large tensors in a store."""
    rng = np.random.default_rng(0)
    deltas = []
    for number in range(4):
        indices = np.flatnonzero(rng.random(1 << 22) < 0.3)
        values = rng.integers(1, 60_000, indices.size).astype(np.uint16)
        spec = TensorSpec(f"w{number}", "BF16", (1 << 22,))
        deltas.append(TensorDelta(spec=spec, indices=indices, values=values))
    part = encode_part(Change(delta, StateDigest()) for delta in deltas)
    store.put("deltas/x", part.data)
    ref = ObjectRef(
        key="deltas/x", nbytes=len(part.data), blake3=part.digest, directory=part.directory
    )
    return ref, deltas


@pytest.mark.parametrize("damages", [0, 1])
def test_a_host_fetches_the_ranges_that_its_ranks_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damages: int
) -> None:
    store = CountedStore()
    ref, deltas = large_part(store)
    store.damages = damages
    monkeypatch.setattr(fetcher, "open_store", lambda _: store)
    index = SpoolIndex(objects=(SpooledObject(ref=ref, edge=0),))
    spool = Spool.create(tmp_path, index)
    wanted = {"w1": (0, 1 << 22), "w2": (1 << 20, 2 << 20), "another": (0, 5)}
    fetcher.fill(spool, index, store.url, wanted)
    plans = {one.spec.name: one for one in SpoolReader(spool.folder).tensor_plans()}
    for name, (low, high) in list(wanted.items())[:2]:
        given = deltas[int(name[1])]
        assert given.indices is not None
        found = plans[name].read(low, high)
        assert found.indices is not None
        near = (given.indices >= low) & (given.indices < high)
        np.testing.assert_array_equal(found.indices, given.indices[near])
        np.testing.assert_array_equal(found.values, given.values[near])
    if damages:  # a range that was corrupt once: the whole object, proven by its digest
        assert store.nbytes > ref.nbytes
    else:
        assert store.nbytes < 0.6 * ref.nbytes
        with pytest.raises(errors.DigestMismatchError):
            plans["w3"].read(0, 1 << 22)


def test_what_a_host_reads_is_the_hull_of_its_ranks_windows() -> None:
    specs = {n: TensorSpec(n, "BF16", (100, 10)) for n in ("a", "b", "c", "d")}
    ranks = [
        {
            "a": Classified(kind="in_place", windows=((100, (20, 5), (10, 1)),)),
            "b": Classified(kind="loaded"),
            "c": Classified(kind="absent"),
            "d": Classified(kind="unused"),
        },
        {
            "a": Classified(kind="in_place", windows=((400, (50,), (1,)),)),
            "b": Classified(kind="absent"),
            "c": Classified(kind="absent"),
            "d": Classified(kind="unused"),
        },
    ]
    classes: dict[str, TensorClass] = {"a": "in_place", "b": "loaded", "c": "in_place"}
    some = {"a": (100, 450), "b": (0, 1000)}
    assert fetcher.wanted_by(ranks, classes, specs) == some
    assert fetcher.wanted_by(ranks, classes, {n: specs[n] for n in "ab"}) == some
    only_b = [{"b": rank["b"]} for rank in ranks]
    assert fetcher.wanted_by(only_b, classes, {"b": specs["b"]}) == {}


def test_a_fetch_ends_with_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountedStore()
    ref, _ = large_part(store)
    refs = [msgspec.structs.replace(ref, key="deltas/missing"), *[ref] * 60]
    index = SpoolIndex(objects=tuple(SpooledObject(ref=one, edge=0) for one in refs))
    monkeypatch.setattr(fetcher, "open_store", lambda _: store)
    spool = Spool.create(tmp_path, index)
    with pytest.raises(errors.ObjectNotFoundError):
        fetcher.fill(spool, index, store.url)
    assert store.nbytes < 30 * ref.nbytes
    with pytest.raises(errors.ApplyError, match="was not fetched"):
        list(SpoolReader(spool.folder).tensor_plans())


def numpy_of(bits: Any) -> Any:
    """Bits as numpy has them, whoever works on them."""
    if not isinstance(bits, Tensor):
        return bits
    return bits.numpy().view(f"<u{bits.element_size()}")


Box: TypeAlias = tuple[tuple[int, ...], Tensor, Tensor]


@st.composite
def boxes(draw: st.DrawFn) -> Box:
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


@settings(max_examples=40)
@given(boxes(), st.data())
def test_a_window_is_the_same_however_it_is_laid_out(box: Box, data: st.DataObject) -> None:
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


@settings(max_examples=40)
@given(boxes(), boxes())
def test_windows_of_other_elements_differ(one: Box, other: Box) -> None:
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


@pytest.mark.parametrize("on_host", [True, False], ids=["bits of numpy", "bits of torch"])
@pytest.mark.parametrize("kind", ["step", "absolute", "mixed", "dense"])
@settings(max_examples=15)
@given(box=boxes(), seed=st.integers(0, 1 << 16))
def test_a_delta_is_written_and_taken_back_and_its_digest_is_told(
    on_host: bool, kind: str, box: Box, seed: int
) -> None:
    shape, view, live = box
    truth = where(view, live)
    dtypes = {1: "U8", 2: "I16", 4: "I32", 8: "I64"}
    spec = TensorSpec("w", dtypes[live.element_size()], shape)
    delta = changed(spec, seed, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placements, "BLOCK", 3)
        if not on_host:
            patch.setattr(torch_kernels, "on_host", lambda _: False)
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


BASE = torch.zeros(12)


@pytest.mark.parametrize(
    ("live", "stride"),
    [
        pytest.param(BASE.view(3, 4), (0, 1), id="a source that repeats itself"),
        pytest.param(BASE.view(3, 4), (2, 1), id="a source that overlaps itself"),
        pytest.param(BASE[:4].expand(3, 4), (4, 1), id="a live view that repeats itself"),
        pytest.param(BASE.unfold(0, 4, 2)[:4], (4, 1), id="a live view that overlaps itself"),
    ],
)
def test_what_overlaps_itself_is_no_place(live: Tensor, stride: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="overlaps itself"):
        Placement(live, 0, stride)


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


ALIASES = {"head.weight": "embed.weight"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A rank that holds one version, and the plan to the next."""
    return Bench("cpu", "step", tmp_path)


def test_what_fits_the_budget_is_kept_and_the_rest_is_deferred(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostStager, "group_nbytes", 100)
    bench.stage(1)
    whole = bench.rank.staged[1]
    assert whole.deferred == ()
    bench.stage(2, budget=whole.nbytes // 2)
    staged = bench.rank.staged[2]
    assert 0 < staged.nbytes <= whole.nbytes // 2
    assert staged.deferred
    assert staged.placed
    assert (staged.names, staged.effects) == (whole.names, whole.effects)
    bench.rank.swap(2, 1, back=False)
    assert bench.model.holds(bench.new)


def test_telling_it_twice_changes_nothing(bench: Bench) -> None:
    bench.stage(1)
    assert bench.rank.swap(1, 0, back=True) == 0.0
    assert bench.model.holds(bench.old)
    for _ in range(2):
        bench.rank.swap(1, 1, back=False)
        assert bench.model.holds(bench.new)
    for _ in range(2):
        bench.rank.swap(1, 0, back=True)
        assert bench.model.holds(bench.old)


def test_a_ticket_that_is_given_again_is_written_again(bench: Bench) -> None:
    """As by another leader, that counts from one as well."""
    bench.stage(1)
    bench.rank.swap(1, 1, back=False)
    with torch.no_grad():
        bench.model.load((name, tensor.clone()) for name, tensor in bench.old.items())
    assert bench.rank.loads_the_same()
    bench.stage(1)
    bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.new)


def test_a_plan_for_a_refused_tensor_is_refused(bench: Bench) -> None:
    report = bench.rank.report()
    classes = {name: one.kind for name, one in report.items()}
    classes["norm.weight"] = "refused"
    holders = {name: ("0",) * len(one.windows) for name, one in report.items()}
    bench.rank.agree(classes, holders)
    with pytest.raises(errors.TensorMismatchError, match=r"'norm\.weight' cannot be written"):
        bench.stage(1)
    assert bench.rank.staged == {}
    assert bench.model.holds(bench.old)


def replace_norm(model: FakeModel) -> None:
    live = model.root.get_parameter("norm.weight")
    live.data = live.data.clone()


def move_experts(model: FakeModel) -> None:
    live = model.root.get_parameter("layers.0.experts.weight")
    live.data.copy_(live.data.flip(0).clone())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replace_norm, "what they hold is not"),
        (move_experts, r"'layers\.0\.experts\.weight' holds other bits"),
    ],
)
def test_what_the_engine_does_meanwhile_voids_what_was_staged(
    bench: Bench, change: Callable[[FakeModel], None], why: str
) -> None:
    bench.stage(1)
    change(bench.model)
    before = {name: tensor.clone() for name, tensor in bench.model.tensors().items()}
    with pytest.raises(errors.BaseMismatchError, match=why):
        bench.rank.swap(1, 1, back=False)
    assert bench.rank.staged == {}
    assert all(torch.equal(before[n], tensor) for n, tensor in bench.model.tensors().items())
    bench.rank.check_addresses()  # it is told once: what comes next is planned from nothing
    if change is replace_norm:
        bench.stage(2)  # where they are now
        bench.rank.swap(2, 1, back=False)
        assert bench.model.holds(bench.new)


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_an_engine_that_arranged_its_experts_anew_is_written_to_no_more(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the experts themselves were loaded again since, as by a repack."""
    tensors, maps = bench.model.tensors, {"expert_map": torch.arange(4)}
    monkeypatch.setattr(bench.model, "tensors", lambda: {**tensors(), **maps})
    rank = Rank(bench.model, bench.rank._specs.values(), bench.rank._aliases)
    rank.check_addresses()
    if how == "in place":
        maps["expert_map"].copy_(maps["expert_map"].flip(0).clone())
    else:
        maps["expert_map"] = torch.arange(4).flip(0)
    assert rank.loads_the_same()
    for _ in range(2):
        with pytest.raises(
            errors.EngineDamagedError, match="arranged its experts anew: 'expert_map'"
        ):
            rank.check_addresses()


def test_a_stage_that_began_before_tensors_were_replaced_is_void(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs beside the engine's own thread, and knows only where they were."""
    rank, stage = bench.rank, staged_module.stage

    def overtaken(*arguments: Any) -> RankStaged:
        staged = stage(*arguments)
        replace_norm(bench.model)
        with suppress(errors.BaseMismatchError):
            rank.check_addresses()
        return staged

    monkeypatch.setattr(rank_module, "stage", overtaken)
    with pytest.raises(errors.BaseMismatchError, match="what they hold is not"):
        bench.stage(1)
    assert rank.staged == {}


def test_a_stage_never_looks_where_tensors_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload beside it puts them elsewhere for a while."""

    def moving(_: object) -> str:
        raise AssertionError("asked in the thread that stages")

    monkeypatch.setattr(bench.rank._record, "difference", moving)
    bench.stage(1)
    bench.rank.state()


def test_what_is_computed_may_be_no_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    output = {"layers.0": torch.tensor([float("nan"), 1.0])}
    monkeypatch.setattr(bench.model, "compute", lambda layers: dict(output) if layers else {})
    group = LoadGroup((), frozenset({"layers.0"}))
    attached = replace(bench.rank._attached, groups=(("reloaded", group),))
    monkeypatch.setattr(bench.rank, "_attached", attached)
    assert bench.rank.loads_the_same()


def test_what_the_engine_did_not_load_after_all_is_read_back_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench("cpu", "step", tmp_path, Sharding(odd=("shadow",)))
    bench.stage(1)
    readable = {name.split(".")[2] for name in bench.rank._attached.readable}
    assert readable == {"shadow"}, "its weight is beside what it computes from"
    reload = bench.model.reload
    monkeypatch.setattr(bench.model, "reload", lambda _: None)
    with pytest.raises(errors.PartialApplyError, match=r"shadow\.weight' is not what was loaded"):
        bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.old)
    monkeypatch.setattr(bench.model, "reload", reload)
    bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.new)


def test_it_knows_whom_it_was_attached_for(bench: Bench) -> None:
    specs = list(bench.before.specs.values())
    assert bench.rank.is_for(specs, ALIASES)
    assert not bench.rank.is_for(specs, {})
    assert not bench.rank.is_for(specs[1:], ALIASES)
    assert not bench.rank.is_for([TensorSpec("w", "BF16", (3,)), *specs[1:]], ALIASES)


def test_a_rank_is_made_of_a_model_that_holds_its_checkpoint(bench: Bench) -> None:
    bench.stage(1)
    bench.rank.swap(1, 1, back=False)
    again = Rank(bench.model, bench.before.specs.values(), ALIASES)
    kinds = {one.kind for one in again.report().values()}
    assert kinds == {"refused"}, "it holds something else"
    assert bench.model.holds(bench.new), "and holds it still"


def test_all_stages_share_a_stream_since_others_cannot_take_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, entered = list[object](), list[object]()

    def stream(where: torch.device) -> object:
        made.append(where)
        return object()

    @contextmanager
    def using(one: object) -> Iterator[None]:
        entered.append(one)
        yield

    tensor = SimpleNamespace(device=torch.device("cuda", 1))
    model: Any = SimpleNamespace(tensors=lambda: {"w": tensor})
    current = SimpleNamespace(synchronize=lambda: None)
    for name, fake in {
        "Stream": stream,
        "device": using,
        "stream": using,
        "current_stream": lambda _: current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for _ in range(3):
        with rank_module.own_stream(model):
            pass
    assert made == [tensor.device]
    assert len(set(entered)) == 2
    rank_module.stage_stream.cache_clear()
