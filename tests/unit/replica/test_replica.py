import asyncio
import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from deltachain import errors
from deltachain.chain.trust import SigningKey
from deltachain.format.keys import CHAIN_KEY, manifest_key
from deltachain.kernels import torch_kernels
from deltachain.replica.engine import run_on
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings, spool_folder
from deltachain.subscribe import SubscribeConfig
from tests.format.forge import dumps, enveloped
from tests.support.engine import HOSTED, PLAIN, FakeEngine, FakeModel, Sharding, full_of
from tests.support.faults import Fault
from tests.support.values import eventually, present
from tests.unit.replica.replicas import EVERY_SHAPE, SHAPES, Followed, led

URL = {"DELTACHAIN_URL": "s3://bucket/run"}


def test_without_a_chain_there_are_no_settings() -> None:
    assert ReplicaSettings.of({}) is None
    assert ReplicaSettings.of({"DELTACHAIN_URL": "", "DELTACHAIN_FOLLOW": "1"}) is None


def test_the_defaults_are_those_of_the_subscriber() -> None:
    settings = present(ReplicaSettings.of(URL))
    assert settings == ReplicaSettings(subscribe=SubscribeConfig(url="s3://bucket/run"))


def test_every_variable_is_read() -> None:
    settings = ReplicaSettings.of(
        URL
        | {
            "DELTACHAIN_BASE": "/models/base",
            "DELTACHAIN_POLL_S": "0.5",
            "DELTACHAIN_STAGE_BUDGET": "1e9",
            "DELTACHAIN_FOLLOW": "Yes",
            "DELTACHAIN_PAUSE": "wait",
            "DELTACHAIN_TOKEN": "secret",
            "DELTACHAIN_MAX_LAG": "3",
            "DELTACHAIN_MAX_SILENCE_S": "60",
            "DELTACHAIN_STRICT": "off",
            "DELTACHAIN_TRUSTED_KEYS": "trusted.txt",
            "OTHER": "x",
        }
    )
    assert settings == ReplicaSettings(
        subscribe=SubscribeConfig(
            url="s3://bucket/run",
            base=Path("/models/base"),
            poll_s=0.5,
            stage_budget=10**9,
            trusted_keys="trusted.txt",
        ),
        follow=True,
        strict=False,
        pause="wait",
        token="secret",  # noqa: S106
        max_lag=3,
        max_silence_s=60.0,
    )


def test_the_spool_is_named_or_the_users_own() -> None:
    assert spool_folder({"DELTACHAIN_SPOOL": "/spools"}) == Path("/spools")
    assert spool_folder({}) == spool_folder({"DELTACHAIN_SPOOL": ""})
    assert spool_folder({}).name.startswith("deltachain-")


KEY = SigningKey.of(b"\1" * 32)


@pytest.fixture
def signed(followed: "Build", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    """A replica of a chain that is signed."""
    file = tmp_path / "key"
    file.write_bytes(KEY.pem())
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(file))
    return followed()


def leader_of(here: Followed, trusted: SigningKey = KEY) -> Leader:
    environment = {
        "DELTACHAIN_URL": here.store.url,
        "DELTACHAIN_POLL_S": "0.01",
        "DELTACHAIN_FOLLOW": "1",
        "DELTACHAIN_SPOOL": str(here.spool),
        "DELTACHAIN_TRUSTED_KEYS": str(trusted.public),
    }
    settings = present(ReplicaSettings.of(environment))
    return Leader(settings, here.engine, store=here.faulty)


def test_a_replica_serves_on_while_an_unsigned_version_is_the_newest(signed: Followed) -> None:
    here = signed
    here.publish(1)
    leader = leader_of(here)
    try:
        leader.start()
        assert here.holds(1)
        true = manifest_key(2)
        here.faulty.down = True
        here.publish(2)
        genuine = here.store.get(true)
        payload = dumps(json.loads(genuine)["payload"])
        here.store.put(true, enveloped(payload))
        here.faulty.down = False
        leader.notify()
        eventually(lambda: "no trusted key signed it" in leader.status().trouble)
        assert (leader.status().version, leader.status().ready) == (1, True)
        assert here.holds(1)
        here.store.put(true, genuine)
        leader.notify()
        eventually(lambda: leader.status().version == 2 and not leader.status().trouble)
        assert here.holds(2)
    finally:
        leader.stop()


def test_a_replica_of_a_chain_by_another_key_never_gets_ready(signed: Followed) -> None:
    here = signed
    here.publish(1)
    leader = leader_of(here, SigningKey.of(b"\2" * 32))
    try:
        leader.start()
        eventually(lambda: f"{CHAIN_KEY}: no trusted key signed it" in leader.status().trouble)
        assert not leader.status().ready
        assert here.holds(0)
    finally:
        leader.stop()


async def _answer(found: object) -> object:
    await asyncio.sleep(0)
    if isinstance(found, Exception):
        raise found
    return found


def test_the_thread_of_the_loop_is_refused_at_once() -> None:
    async def main() -> None:
        run_on(asyncio.get_running_loop(), _answer(7))

    with pytest.raises(errors.ConfigError, match="runs the event loop of the engine") as caught:
        asyncio.run(main())
    assert "asyncio.to_thread" in caught.value.hint


async def _asked(found: object) -> object:
    return await asyncio.to_thread(run_on, asyncio.get_running_loop(), _answer(found))


@pytest.mark.parametrize(
    ("raised", "kind", "told"),
    [
        (RuntimeError("EngineCore died"), errors.ApplyError, "did not answer: EngineCore died"),
        (errors.PartialApplyError("taken back"), errors.PartialApplyError, "taken back"),
    ],
)
def test_another_thread_gets_the_answer_or_a_typed_error(
    raised: Exception, kind: type[Exception], told: str
) -> None:
    assert asyncio.run(_asked(7)) == 7
    with pytest.raises(kind, match=told):
        asyncio.run(_asked(raised))


Build = Callable[..., Followed]
EVERY = pytest.mark.parametrize("shape", EVERY_SHAPE)


@EVERY
def test_versions_are_followed_folded_and_taken_back(followed: Build, shape: Sharding) -> None:
    here = followed(shape)
    before = addresses(here)
    here.publish(1, 2, 3)
    receipt = present(here.subscriber.update(1))
    assert (receipt.previous, receipt.version) == (0, 1)
    assert here.holds(1)
    receipt = present(here.subscriber.update())  # two versions in one apply
    assert (receipt.previous, receipt.version) == (1, 3)
    assert here.holds(3)
    assert here.subscriber.scrub()
    here.faulty.down = True
    assert here.subscriber.rollback(1).version == 1
    assert here.holds(1)
    assert here.subscriber.scrub()
    assert here.subscriber.rollback(0).version == 0
    assert here.holds(0)
    assert addresses(here) == before


def addresses(here: Followed) -> list[dict[str, int]]:
    """Where the live tensors of each rank lie."""
    return [
        {name: tensor.data_ptr() for name, tensor in model.tensors().items()}
        for model in here.engine.models
    ]


@EVERY
def test_a_poisoned_replica_heals_from_nothing(followed: Build, shape: Sharding) -> None:
    here = followed(shape)
    here.publish(1)
    here.anchor()
    here.subscriber.open()
    here.subscriber.poisoned = True
    here.engine.events.clear()
    receipt = present(here.subscriber.update())
    assert receipt.previous is None
    assert here.holds(1)
    assert here.engine.events == ["pause", "write", "name 1", "resume"]
    assert here.subscriber.scrub()


@pytest.mark.parametrize(
    ("shape", "on_host"),
    [
        (Sharding(odd=HOSTED), True),
        pytest.param(  # zeros on one rank
            Sharding(tp=2, odd=tuple(n for n in HOSTED if n != "bias")),
            True,
            marks=pytest.mark.full,
        ),
        pytest.param(Sharding(odd=HOSTED), False, marks=pytest.mark.full),
        pytest.param(Sharding(tp=2), False, marks=pytest.mark.full),
        pytest.param(Sharding(tp=2, untied=True), False, marks=pytest.mark.full),
    ],
)
def test_what_can_not_be_written_in_place_is_loaded_by_the_engine(
    followed: Build, shape: Sharding, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of a device are torch tensors: the same ranks, forced onto that path."""
    if not on_host:
        monkeypatch.setattr(torch_kernels, "on_host", lambda _: False)
    here = followed(shape)
    here.publish(1, 2, 3)
    here.subscriber.update(1)
    loaded = set() if shape.odd == PLAIN else {"loaded", "reloaded"}
    assert set(here.target.classes()) == {"in_place", *loaded}
    assert here.holds(1)
    here.subscriber.update()
    assert here.holds(3)
    assert here.subscriber.scrub()
    here.subscriber.rollback()
    assert here.holds(1)
    here.subscriber.release()
    here.subscriber.poisoned = True
    here.subscriber.update()
    assert here.holds(3)


def test_only_layers_that_changed_are_loaded_again(
    followed: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stands still meanwhile: for as long as it takes to load what changed."""
    here = followed(Sharding(layers=4, odd=("packed", "flipped")))
    here.publish(1)
    here.subscriber.update()
    loaded: list[set[str]] = []
    reload = FakeModel.reload

    def noted(model: FakeModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = list(tensors)
        loaded.append({name for name, _ in given})
        reload(model, given)

    monkeypatch.setattr(FakeModel, "reload", noted)
    for changed in ({"layers.2.packed.weight"}, {"layers.0.packed.weight", "norm.weight"}):
        with torch.no_grad():
            for name in changed:
                here.model.get_parameter(name).add_(1)
        here.publisher.publish()
        here.publisher.flush()
        here.subscriber.update()
        assert here.engine.holds(full_of(here.model))
    assert loaded == [{"layers.2.packed.weight"}, {"layers.0.packed.weight"}]


def test_one_tensor_without_a_way_refuses_the_chain(followed: Build) -> None:
    here = followed(Sharding(tp=2, odd=("stuck",)))
    here.publish(1)
    before = here.engine.bits()
    with pytest.raises(
        errors.TensorMismatchError, match=r"2 of \d+ tensors have no proven way"
    ) as caught:
        here.subscriber.update()
    assert caught.value.tensor == "layers.0.stuck.weight"
    assert here.engine.bits() == before
    assert "write" not in here.engine.events


# What somebody else wrote


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_from_different_bits_are_refused_and_then_healed(followed: Build, rank: int) -> None:
    """Both ranks have the norm; a step would take one of them to other bits than the other."""
    here = followed()
    here.publish(1, 2)
    here.subscriber.update(1)
    one, two = (here.truth[version]["norm.weight"].view(torch.int16) for version in (1, 2))
    here.scribble(rank, "norm.weight", int((one != two).nonzero()[0]))
    before = here.engine.bits()
    with pytest.raises(errors.BaseMismatchError, match="ranks 0,1 hold different bits"):
        here.subscriber.update()
    assert here.engine.bits() == before
    here.subscriber.update()
    assert here.holds(2)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ("tp1", "layers.0.o.weight"),
        ("tp2", "layers.1.qkv.weight"),
        ("tp2", "norm.weight"),  # both ranks have it
        ("tp4", "layers.0.norm.weight"),
        ("pp2", "head.weight"),  # tied to what the first rank has
        ("untied", "head.weight"),
    ],
)
def test_a_foreign_write_is_refused_and_then_healed(followed: Build, shape: str, name: str) -> None:
    here = followed(SHAPES[shape])
    here.publish(1)
    here.subscriber.update()
    here.publish(2, share=1.0)
    here.scribble(here.shape.ranks - 1, name)
    before = here.engine.bits()
    with pytest.raises(errors.BaseMismatchError):
        here.subscriber.update()
    assert here.engine.bits() == before
    assert here.subscriber.version is None
    receipt = present(here.subscriber.update())
    assert receipt.previous is None
    assert here.holds(2)
    assert here.subscriber.scrub()


@pytest.mark.parametrize(
    ("shape", "name"),
    [("tp2", "layers.0.o.weight"), ("tp2", "norm.weight"), ("untied", "head.weight")],
)
def test_a_scrub_finds_a_foreign_write(followed: Build, shape: str, name: str) -> None:
    here = followed(SHAPES[shape])
    here.publish(1)
    here.subscriber.update()
    assert here.subscriber.scrub()
    here.scribble(0, name)
    assert not here.subscriber.scrub()
    assert here.subscriber.poisoned
    here.engine.events.clear()
    here.subscriber.update()
    assert here.holds(1)
    assert here.engine.events == ["pause", "write", "name 1", "resume"], "its caches are void"
    assert here.subscriber.scrub()


@pytest.mark.parametrize("tell", ["stage", "scrub"])
def test_tensors_that_the_engine_replaced_are_found_again_and_healed(
    followed: Build, tell: str
) -> None:
    here = followed(Sharding(tp=2))
    here.publish(1)
    here.subscriber.update()
    for name in ("layers.0.o.weight", "norm.weight"):
        live = here.engine.models[1].root.get_parameter(name)
        live.data = torch.zeros_like(live.data)
    if tell == "scrub":
        assert not here.subscriber.scrub()
    else:
        here.publish(2)
        with pytest.raises(
            errors.BaseMismatchError, match="rank 1: the engine replaced live tensors"
        ):
            here.subscriber.update()
    assert here.subscriber.version is None
    here.subscriber.update()
    assert here.holds(len(here.truth) - 1)
    assert here.subscriber.scrub()


# What is kept


@pytest.mark.full
def test_spools_are_gone_once_they_are_written(followed: Build) -> None:
    here = followed()
    here.publish(1, 2)
    staged = present(here.subscriber.stage(1))
    (spool,) = here.spools()
    assert {file.name for file in spool.iterdir()} == {"00000.safetensors", "index.json", "lock"}
    here.subscriber.swap(staged)
    assert here.spools() == []
    again = here.subscriber.stage()
    assert len(here.spools()) == 1
    del again
    gc.collect()
    assert here.spools() == [], "staged, and never written"


def test_ranks_forget_what_nobody_can_ask_for(followed: Build) -> None:
    here = followed(undo_applies=1)
    for version in range(1, 5):
        here.publish(version)
        here.subscriber.stage()  # thrown away
        here.subscriber.update()
    tickets = [set(rank.rank.staged) for rank in here.engine.services]
    assert tickets[0] == tickets[1]
    assert len(tickets[0]) <= 3, "the undo log, what it pushed out, and the newest"
    assert here.subscriber.rollback().version == 3
    assert here.holds(3)


def test_a_version_that_changes_nothing_is_followed(followed: Build) -> None:
    here = followed()
    here.subscriber.open()
    here.publisher.publish(step=9)
    here.publisher.flush()
    here.truth.append(here.truth[0])
    if here.subscriber.update() is not None:
        assert here.subscriber.version == 1
    assert here.holds(0)


def test_a_corrupt_object_reaches_no_rank(followed: Build) -> None:
    here = followed()
    here.publish(1)
    here.subscriber.open()
    here.faulty.add(Fault("corrupt", "deltas/", times=None))
    with pytest.raises(errors.DigestMismatchError):
        here.subscriber.update()
    assert here.holds(0)
    assert here.engine.events == []
    assert all(not rank.rank.staged for rank in here.engine.services)
    here.faulty.mend()
    here.subscriber.update()
    assert here.holds(1)


@pytest.mark.full
def test_another_subscriber_finds_what_the_last_one_left(followed: Build) -> None:
    """The ways into the weights are those that were found while the checkpoint was in them."""
    here = followed(Sharding(tp=2, odd=("cast", "packed")))
    here.publish(1, 2)
    here.subscriber.update(1)
    again = here.subscribe()
    again.open()
    assert again.version == 1
    receipt = present(again.update())
    assert receipt.previous == 1
    assert here.holds(2)
    assert again.scrub()
    again.rollback()
    assert here.holds(1)


LAYER = "layers.0.experts"


def arrange(engine: FakeEngine, *rows: tuple[int, ...]) -> None:
    """Have the engine move experts of its first layer to other slots, on any rank."""
    lives = [model.root.get_parameter(f"{LAYER}.weight").data for model in engine.models]
    now = [model.experts.get(LAYER, tuple(model.share.experts)) for model in engine.models]
    held = {
        expert: row.clone()
        for slots, live in zip(now, lives, strict=True)
        for expert, row in zip(slots, live, strict=True)
    }
    for model, live, slots in zip(engine.models, lives, rows, strict=True):
        model.experts[LAYER] = slots
        live.copy_(torch.stack([held[expert] for expert in slots]))


def test_experts_that_move_are_found_on_every_rank(followed: Callable[..., Followed]) -> None:
    here = followed()
    arrange(here.engine, (0, 1), (2, 3))
    here.publish(1, 2, 3)
    with led(here) as leader:
        leader.update(1)
        staged = leader.subscriber.stage(2)
        assert staged is not None
        arrange(here.engine, (2, 1), (3, 0))
        with pytest.raises(errors.ExpertsMovedError, match="every rank has its old bits"):
            leader.subscriber.swap(staged)
        assert here.holds(1)
        leader.update(2)
        assert here.holds(2)
        arrange(here.engine, (0, 3), (1, 2))
        assert leader.scrub()
        arrange(here.engine, (3, 2), (1, 0))
        assert leader.rollback(1).version == 1
        assert here.holds(1)
        leader.release()
        in_flight = errors.ExpertsMovedError("in flight")
        moving = mock.patch.object(FakeModel, "slots", side_effect=in_flight)
        with moving, pytest.raises(errors.ExpertsMovedError, match="in flight"):
            leader.update()
        assert here.holds(1)
        assert not leader.subscriber.poisoned
        leader.update()
        assert here.holds(3)


def test_a_loader_that_does_not_follow_the_map_ends_following(
    followed: Callable[..., Followed],
) -> None:
    here = followed()
    arrange(here.engine, (0, 1), (2, 3))
    here.publish(1, 2)
    here.subscriber.update(1)
    arrange(here.engine, (1, 0), (2, 3))
    stays = mock.patch.object(FakeModel, "_slots_of", lambda model, _: model.share.experts)
    with (
        stays,
        pytest.raises(errors.TensorMismatchError, match=r"slots of expert 1 of layers\.0\.experts"),
    ):
        here.subscriber.update(2)
    assert here.holds(1)
