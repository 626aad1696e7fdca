"""Ranks of an engine decode the tiles of ``max`` that they hold, and do without those they cut."""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from deltachain.chain.fetch import Fetched
from deltachain.chain.tensor_plan import TensorPlan
from deltachain.codec import ENCODINGS, Change, Part, encode_part
from deltachain.codec.encode import EncodedPart
from deltachain.delta import OldBits, TensorDelta, changes
from deltachain.errors import BaseMismatchError, OldBitsError
from deltachain.format.keys import digest_key
from deltachain.kernels.protocol import LiveBits
from deltachain.kernels.torch_kernels import storage_bits
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.placements import Placement
from deltachain.replica.spool import SpoolReader, host_bits
from deltachain.replica.staged import Share, _prepared, _Stage
from deltachain.replica.unused_state import UnusedState
from deltachain.subscribe.targets.tensor_patch import LiveElements, prepare, write
from deltachain.types import Bits, StateDigest, TensorSpec
from tests.contract import reference
from tests.support.spools import spool_of_parts
from tests.support.values import present
from tests.unit.replica.replicas import SHAPES, Followed

Build = Callable[..., Followed]

SPEC = TensorSpec("w", "BF16", (1024, 1024))


def versions(count: int) -> list[Bits]:
    rng = np.random.default_rng(11)
    normal = rng.standard_normal(SPEC.numel, dtype=np.float32) * np.float32(0.02)
    found = [(normal.view(np.uint32) >> np.uint32(16)).astype(np.uint16)]
    for _ in range(count):
        new = found[-1].copy()
        there = rng.random(SPEC.numel) < 0.01
        new[there] += rng.choice(np.array([1, 2, 0xFFFF], np.uint16), int(there.sum()))
        found.append(new)
    return found


def encoded(old: Bits, new: Bits, encoding: str = "max") -> EncodedPart:
    delta = changes(SPEC, old, new)
    before = partial(OldBits, old)
    change = Change(delta, StateDigest(), encoding=ENCODINGS.get(encoding), old=before)
    return encode_part([change])


def part(old: Bits, new: Bits, encoding: str = "max") -> Part:
    return Part.from_bytes(encoded(old, new, encoding).data)


def plan_of(states: list[Bits], encodings: tuple[str, ...]) -> TensorPlan:
    pairs = zip(states, states[1:], encodings, strict=False)
    return TensorPlan(SPEC, tuple(part(*one) for one in pairs))


def publish_max(here: Followed) -> None:
    """Go on with a chain in the encoding ``max``."""
    here.publisher.close()
    config = PublishConfig(url=here.store.url, anchor_factor=1e6, encoding="max")
    here.publisher = Publisher(config, store=here.store).attach(here.model)
    here.truth.append(here.truth[0])  # a publisher that takes over commits a version


def share_of(live: torch.Tensor, offset: int) -> Share:
    place = Placement(live, offset, (1024, 1))
    return Share(((("", 0), place),), *place.span)


def places_of(share: Share) -> list[LiveElements]:
    return [place for _, place in share.places]


def apply(plan: TensorPlan, share: Share) -> StateDigest:
    """Write what a plan changes; the change of the digest."""
    change = StateDigest()
    for _, one in _prepared(plan, share):
        change += one.patch.effect.change
        for place in one.places:
            write(place, one.patch)
    return change


def shards(bits: Bits, ways: int, axis: int) -> list[tuple[torch.Tensor, int]]:
    full = torch.from_numpy(bits.view(np.int16).copy()).view(1024, 1024)
    size = 1024 // ways
    return [
        (full.narrow(axis, n * size, size).clone(), n * size * (1 if axis else 1024))
        for n in range(ways)
    ]


def halves(old: Bits, new: Bits) -> list[EncodedPart]:
    """Two parts of one edge: changes of even columns, and of odd ones, in the same tiles."""
    found = []
    for odd in (0, 1):
        some = old.copy().reshape(SPEC.shape)
        some[:, odd::2] = new.reshape(SPEC.shape)[:, odd::2]
        found.append(encoded(old, some.reshape(-1)))
    return found


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_one_edge_are_decoded_with_the_same_old_bits(axis: int) -> None:
    states = versions(2)
    parts = [*halves(states[0], states[1]), *halves(states[1], states[2])]
    plan = TensorPlan(SPEC, tuple(Part.from_bytes(p.data) for p in parts), edges=(0, 0, 1, 1))
    after = shards(states[2], 2, axis)
    for (live, offset), (expected, _) in zip(shards(states[0], 2, axis), after, strict=True):
        apply(plan, share_of(live, offset))
        assert torch.equal(live, expected)
    whole = plan.read(
        0, SPEC.numel, lambda low, high: OldBits(states[0][low:high], low, shared=True)
    )
    assert np.array_equal(whole.new_bits(states[0][whole.indices]), states[2][whole.indices])


def test_objects_of_one_edge_wait_for_each_other_where_old_bits_are_needed(tmp_path: Path) -> None:
    states = versions(1)
    parts = halves(states[0], states[1])
    spool = spool_of_parts(tmp_path, parts)
    for number, one in enumerate(parts):
        spool.put(number, one.data)
    (plan,) = SpoolReader(spool.folder).tensor_plans()
    assert (len(plan.parts), plan.edges) == (2, (0, 0))
    found = plan.read(0, SPEC.numel, lambda low, high: OldBits(states[0][low:high], low))
    assert np.array_equal(found.new_bits(states[0][found.indices]), states[1][found.indices])
    assert found.nnz == np.count_nonzero(states[0] != states[1])


def scales() -> tuple[TensorSpec, Bits, Bits, TensorPlan]:
    """Scales of blocks, before and after a change, and its plan."""
    spec = TensorSpec("w_scale_inv", "F32", (32, 6))
    rng = np.random.default_rng(6)
    old = rng.random(spec.numel, np.float32).view(np.uint32)
    more = rng.integers(1, 1 << 20, spec.numel, np.uint32)
    new = np.where(rng.random(spec.numel) < 0.1, old + more, old)
    change = Change(changes(spec, old, new), StateDigest(), encoding=ENCODINGS.get("max"))
    part = Part.from_bytes(encode_part([change]).data)
    return spec, old, new, TensorPlan(spec, (part,))


@pytest.mark.parametrize("ways", [2, 4, 8, 32])
def test_ranks_share_small_scales_anywhere(ways: int) -> None:
    _, old, new, plan = scales()
    for rank in range(ways):
        rows = 32 // ways
        mine = slice(rank * rows * 6, (rank + 1) * rows * 6)
        live = torch.from_numpy(old[mine].view(np.int32).copy()).view(rows, 6)
        place = Placement(live, mine.start, (6, 1))
        apply(plan, Share(((("", 0), place),), *place.span))
        assert np.array_equal(live.numpy().reshape(-1).view(np.uint32), new[mine])


def test_live_bits_are_read_where_they_lie_and_never_written() -> None:
    states = versions(3)
    live, offset = shards(states[0], 2, 0)[1]
    share = share_of(live, offset)
    before = host_bits(places_of(share), SPEC, 0, SPEC.numel)
    assert before.shared
    assert (before.start, before.held) == (offset, None)
    assert before.bits.ctypes.data == live.data_ptr()
    again = live.clone()
    _prepared(plan_of(states, ("max", "max", "step")), share)
    assert torch.equal(live, again)


@pytest.mark.parametrize("axis", [0, 1])
def test_one_pass_over_tiles_equals_decoding_first(axis: int) -> None:
    """A tensor plan of one object is staged from its streams; one of several is folded before."""
    states = versions(1)
    plan = plan_of(states, ("max",))
    for live, offset in shards(states[0], 2, axis):
        share = share_of(live, offset)
        old = partial(host_bits, places_of(share), SPEC)
        assert plan.steps(share.low, share.high, old) is not None
        ((_, staged),) = _prepared(plan, share)
        decoded = prepare(share.places[0][1], plan.read(share.low, share.high, old))
        assert staged.patch.effect == decoded.effect
        order = np.argsort(np.asarray(staged.patch.indices))
        for one, other in (
            (staged.patch.indices, decoded.indices),
            (staged.patch.old, decoded.old),
            (staged.patch.new, decoded.new),
        ):
            np.testing.assert_array_equal(np.asarray(one)[order], other)
        assert decoded.nnz > 2000


def test_one_pass_over_tiles_names_bits_that_are_not_those_before() -> None:
    states = versions(1)
    other = states[0] ^ np.uint16(1 << 9)
    live, offset = shards(other, 2, 0)[0]
    with pytest.raises(BaseMismatchError, match="'w' does not hold the bits before"):
        _prepared(plan_of(states, ("max",)), share_of(live, offset))


SMALL = {"SMALL_TILES": ((2, 64), (4, 1 << 16)), "VOCABULARY": 32, "PADDED_TO": 8}
"""Tiles that divide the matrices of the smallest model in two each way, and its vocabulary too."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(f"deltachain.codec.encodings.max.encoding.{name}", value)


@pytest.mark.parametrize("shape", ["tp1", "tp2", "tp2pp2", "untied tp2"])
@pytest.mark.usefixtures("small_tiles")
def test_two_ranks_follow_small_matrices_and_vectors(followed: Build, shape: str) -> None:
    """Vectors are given without old bits, and so is what cannot be divided."""
    here = followed(SHAPES[shape])
    publish_max(here)
    here.publish(2)
    receipt = present(here.subscriber.update())
    assert "anchor" not in receipt.plan
    assert here.holds(2)
    head = present(here.subscriber.chain.head())
    assert head.manifest.edge.encodings == ("max",)


def shared_after(state: UnusedState, fetched: Fetched) -> UnusedState:
    """No rank holds a tensor whose digest is in the sum of others that ranks hold."""
    is_max = any("max" in edge.encodings for edge in fetched.plan.edges)
    return UnusedState({"w": None}, shared_with_used="w") if is_max else state


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        pytest.param("tp4", r"'.*' cuts a tile of the encoding max", id="a tile is cut"),
        pytest.param("tp2", "the digest of 'w', which this engine does not use", id="a digest"),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_ranks_that_cannot_decode_take_another_way_where_there_is_one(
    followed: Build, monkeypatch: pytest.MonkeyPatch, shape: str, why: str
) -> None:
    here = followed(SHAPES[shape])
    publish_max(here)
    here.subscriber.update()
    if shape == "tp2":
        monkeypatch.setattr(UnusedState, "after", shared_after)
    for seed in (2, 3):
        here.publish(seed)
        with pytest.raises(OldBitsError, match=why):
            here.subscriber.update()
        assert here.holds(seed - 1)
        assert not here.subscriber.poisoned
        assert not here.spools()
        here.anchor()
        receipt = present(here.subscriber.update())
        assert f"anchor->{seed} " in receipt.plan
        assert here.holds(seed)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("encodings", [("max",), ("max", "step", "max", "max")])
def test_shares_of_rows_and_columns(axis: int, ways: int, encodings: tuple[str, ...]) -> None:
    states = versions(len(encodings))
    plan, change = plan_of(states, encodings), StateDigest()
    after = shards(states[-1], ways, axis)
    for (live, offset), (expected, _) in zip(shards(states[0], ways, axis), after, strict=True):
        change += apply(plan, share_of(live, offset))
        assert torch.equal(live, expected)
    key = digest_key(SPEC)
    assert change == reference.digest(key, states[-1]) - reference.digest(key, states[0])


def test_a_share_that_cuts_a_tile_is_refused() -> None:
    states = versions(1)
    plan = plan_of(states, ("max",))
    live, offset = shards(states[0], 8, 1)[3]
    before = live.clone()
    with pytest.raises(OldBitsError, match="cuts a tile"):
        _prepared(plan, share_of(live, offset))
    assert torch.equal(live, before)


def test_a_plan_from_nothing_needs_no_live_bits() -> None:
    states = versions(2)
    whole = Change(TensorDelta.dense(SPEC, states[0]), StateDigest())
    anchor = Part.from_bytes(encode_part([whole]).data)
    parts = (anchor, part(states[0], states[1], "max"), part(states[1], states[2], "max"))
    plan = TensorPlan(SPEC, parts, None, from_nothing=True)
    found = plan.read(512 * 1024, SPEC.numel)
    assert found.covers(512 * 1024, SPEC.numel)
    at = 512 * 1024 - found.start
    assert np.array_equal(found.values[at:], states[2][512 * 1024 :])


class OnCard(Placement):
    """Elements whose bits only torch can read, as on a card."""

    @cached_property
    def storage(self) -> LiveBits:
        return storage_bits(self.live)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_host_decodes_with_a_copy_of_bits_on_a_device(axis: int) -> None:
    states = versions(3)
    plan = plan_of(states, ("max", "step", "max"))
    after = shards(states[3], 2, axis)
    for (live, offset), (expected, _) in zip(shards(states[0], 2, axis), after, strict=True):
        place, before = OnCard(live, offset, (1024, 1)), live.clone()
        share = Share(((("", 0), place),), *place.span)
        stage = _Stage(lambda _, share=share: share, 1 << 30)  # type: ignore[misc]
        with mock.patch.object(TensorPlan, "read", side_effect=AssertionError("in a thread")):
            keep = stage.read(plan)
        keep()
        staged = stage.result()
        assert torch.equal(live, before)
        for one in staged.writes(lambda _, share=share: share):  # type: ignore[misc]
            one.run()
        assert torch.equal(live, expected)
        apply(plan_of([states[3], states[2]], ("max",)), share)
        assert torch.equal(live, shards(states[2], 2, axis)[0 if not offset else 1][0])
