"""Tiles of ``max`` decoded where the weights are: bit for bit as on the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch

from deltachain.errors import BaseMismatchError, OldBitsError
from deltachain.format.keys import digest_key
from deltachain.kernels import reference, staging, tile_fallback
from deltachain.kernels.device import storage_bits
from deltachain.kernels.protocol import LiveBits
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.device_staging import DeviceStager, DeviceWrite
from deltachain.replica.spool_reader import TensorPlan
from deltachain.replica.staged import Share, _prepared, _Stage
from deltachain.replica.windows import Placement
from deltachain.subscribe.targets.patch import write
from deltachain.types import StateDigest
from tests.contract.tiles import TILE_CHECKS, TileArm, TileCheck
from tests.support.sharding import Sharding
from tests.unit.replica.test_device_staging import OnDevice
from tests.unit.replica.test_max_shares import (  # noqa: F401 - a fixture
    SPEC,
    halves,
    plan_of,
    scales,
    shards,
    small_tiles,
    versions,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", TILE_CHECKS, ids=lambda check: check.__name__)
def test_kernels_of_the_host_keep_the_contract(check: TileCheck) -> None:
    check(TileArm(tile_fallback, staging.kernels_of(CPU), CPU))


def stager_of(places: Sequence[Placement]) -> DeviceStager:
    return DeviceStager({"w": [(("", n), place) for n, place in enumerate(places)]}, {"w": SPEC})


def placed(live: torch.Tensor, offset: int) -> Placement:
    return Placement(live, offset, (1024, 1))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("encodings", [("max",), ("max", "step", "max", "max"), ("step", "max")])
def test_shares_of_rows_and_columns(axis: int, ways: int, encodings: tuple[str, ...]) -> None:
    states = versions(len(encodings))
    plan, change = plan_of(states, encodings), StateDigest()
    after = shards(states[-1], ways, axis)
    for (live, offset), (expected, _) in zip(shards(states[0], ways, axis), after, strict=True):
        place, before = placed(live, offset), live.clone()
        stager = stager_of([place])
        assert stager.takes(plan)
        ((staged, effects),) = stager.stage([stager.read(plan, *place.span)])
        assert torch.equal(live, before)
        change += sum((one.change for one in effects.values()), StateDigest())
        staged.run()
        assert torch.equal(live, expected)
        staged.undo().run()
        assert torch.equal(live, before)
    key = digest_key(SPEC)
    assert change == reference.digest(key, states[-1]) - reference.digest(key, states[0])


@pytest.mark.parametrize("ways", [1, 2, 8, 32])
def test_small_scales_are_shared_anywhere(ways: int) -> None:
    spec, old, new, plan = scales()
    for rank in range(ways):
        rows = 32 // ways
        mine = slice(rank * rows * 6, (rank + 1) * rows * 6)
        live = torch.from_numpy(old[mine].view(np.int32).copy()).view(rows, 6)
        place = Placement(live, mine.start, (6, 1))
        stager = DeviceStager({spec.name: [(("", 0), place)]}, {spec.name: spec})
        assert stager.takes(plan)
        for staged, _ in stager.stage([stager.read(plan, *place.span)]):
            staged.run()
        assert np.array_equal(live.numpy().reshape(-1).view(np.uint32), new[mine])


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_one_edge_are_decoded_with_the_same_old_bits(axis: int) -> None:
    states = versions(2)
    parts = (*halves(states[0], states[1]), *halves(states[1], states[2]))
    plan = TensorPlan(SPEC, parts, edges=(0, 0, 1, 1))
    after = shards(states[2], 2, axis)
    for (live, offset), (expected, _) in zip(shards(states[0], 2, axis), after, strict=True):
        place = placed(live, offset)
        stager = stager_of([place])
        ((staged, _),) = stager.stage([stager.read(plan, *place.span)])
        staged.run()
        assert torch.equal(live, expected)


def test_several_places_of_a_tensor_are_one_share() -> None:
    """Rows of three heads, in the order of the engine: the middle one first."""
    states = versions(1)
    plan = plan_of(states, ("max",))
    live = torch.from_numpy(states[0].view(np.int16).copy()).view(4, 256, 1024)[[1, 0, 2]]
    places = [placed(live[n], at * 256 * 1024) for n, at in enumerate((1, 0, 2))]
    stager = stager_of(places)
    ((staged, effects),) = stager.stage([stager.read(plan, 0, 3 * 256 * 1024)])
    staged.run()
    expected = torch.from_numpy(states[1].view(np.int16).copy()).view(4, 256, 1024)[[1, 0, 2]]
    assert torch.equal(live, expected)
    assert len(effects) == 3


def test_a_share_that_cuts_a_tile_is_refused() -> None:
    plan = plan_of(versions(1), ("max",))
    live, offset = shards(versions(0)[0], 8, 1)[3]
    place = placed(live, offset)
    with pytest.raises(OldBitsError, match="cuts a tile"):
        stager_of([place]).read(plan, *place.span)


def test_other_live_bits_are_named_before_anything_is_staged() -> None:
    states = versions(1)
    plan = plan_of(states, ("max",))
    live, offset = shards(states[0] ^ np.uint16(1 << 9), 2, 0)[0]
    place = placed(live, offset)
    stager = stager_of([place])
    with pytest.raises(BaseMismatchError, match="'w' does not hold the bits before"):
        list(stager.stage([stager.read(plan, *place.span)]))


class OnCard(Placement):
    """Elements whose bits only torch can read, as on a card."""

    @cached_property
    def storage(self) -> LiveBits:
        return storage_bits(self.live)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_host_decodes_with_a_copy_of_bits_on_a_device(axis: int) -> None:
    """As where DELTACHAIN_DECODE is host."""
    states = versions(3)
    plan = plan_of(states, ("max", "step", "max"))
    after = shards(states[3], 2, axis)
    for (live, offset), (expected, _) in zip(shards(states[0], 2, axis), after, strict=True):
        place, before = OnCard(live, offset, (1024, 1)), live.clone()
        share = Share(((("", 0), place),), *place.span)
        stage = _Stage(lambda _, share=share: share, 1 << 30, None)  # type: ignore[misc]
        found = stage.read(plan)
        assert found.waits
        stage.take(found)
        staged = stage.result()
        assert torch.equal(live, before)
        for one in staged.writes(lambda _, share=share: share):  # type: ignore[misc]
            one.run()
        assert torch.equal(live, expected)
        for _, one in _prepared(plan_of([states[3], states[2]], ("max",)), share):
            write(place, one.patch)
        assert torch.equal(live, shards(states[2], 2, axis)[0 if not offset else 1][0])


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.usefixtures("small_tiles")
def test_a_chain_of_max_is_followed_folded_and_taken_back(tmp_path: Path, ways: int) -> None:
    here = OnDevice(Sharding(tp=ways), tmp_path)
    try:
        here.publisher.close()
        config = PublishConfig(url=here.store.url, anchor_factor=1e6, encoding="max")
        here.publisher = Publisher(config, store=here.store).attach(here.model)
        here.truth.append(here.truth[0])  # a publisher that takes over commits a version
        here.publish(2)
        here.subscriber.update()
        assert here.holds(2)
        one = here.staged()[0]
        assert any(isinstance(w, DeviceWrite) for w in one.placed)
        here.publish(3, 4, 5)
        receipt = here.subscriber.update()
        assert receipt is not None
        assert "anchor" not in receipt.plan
        assert here.holds(5)
        here.subscriber.rollback()
        assert here.holds(2)
    finally:
        here.close()
