import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import deltachain
from deltachain.chain.chain import Chain
from deltachain.checkpoint import Checkpoint
from deltachain.cli.app import app
from deltachain.codec import Part
from deltachain.errors import BaseMismatchError, ChainError, ConfigError, ObjectNotFoundError
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.subscribe.targets.folder import FolderTarget
from tests.support.faults import FaultyStore
from tests.support.models import Replica, TinyModel, bits_of, same, scribble
from tests.support.values import present


def model() -> nn.Module:
    torch.manual_seed(3)
    made: nn.Module = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)).bfloat16()
    return made


def train(source: nn.Module) -> None:
    with torch.no_grad():
        for weight in source.parameters():
            weight.add_((torch.rand_like(weight) < 0.02) * torch.randn_like(weight) * 1e-3)


def layers() -> nn.Module:
    """A model whose small matrices share digests, a layer at a time."""
    torch.manual_seed(5)
    block = nn.ModuleDict({name: nn.Linear(128, 64, bias=False) for name in "abc"})
    made: nn.Module = nn.ModuleDict({"layers": nn.ModuleList([block, copy.deepcopy(block)])})
    return made.bfloat16()


def zeros(source: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(weight) for name, weight in source.state_dict().items()}


def same_bits(target: dict[str, Tensor], source: dict[str, Tensor]) -> bool:
    pairs = ((weight, source[name]) for name, weight in target.items())
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def copied(source: nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in source.state_dict().items()}


def published(url: str, versions: int, encodings: tuple[str, ...] = ("max",)) -> list[Any]:
    """The weights of each version; encodings take turns, as publishers do."""
    source, states = model(), []
    for number in range(versions):
        encoding = encodings[number * len(encodings) // versions]
        config = deltachain.PublishConfig(url=url, encoding=encoding)
        with deltachain.Publisher(config) as publisher:
            publisher.attach(source)
            train(source)
            publisher.publish()
            publisher.flush()
            states.append((publisher.version, copied(source)))
    return states


def encodings_of(url: str, version: int) -> tuple[str, ...]:
    chain = Chain.open(open_store(url))
    return chain.read(version).manifest.edge.encodings


def test_versions_are_followed_folded_and_joined(tmp_path: Path) -> None:
    url = f"{tmp_path}/chain"
    source = model()
    follower, joined = zeros(source), zeros(source)
    with deltachain.Publisher(deltachain.PublishConfig(url=url, encoding="max")) as publisher:
        publisher.attach(source)
        with deltachain.Subscriber(url, follower) as subscriber:
            subscriber.update()
            for versions in (1, 3):  # one edge, then three that are folded
                for _ in range(versions):
                    train(source)
                    publisher.publish()
                    publisher.flush()
                assert subscriber.update() is not None
                assert same_bits(follower, copied(source))
            before = copied(source)
            train(source)
            publisher.publish()
            publisher.flush()
            subscriber.update()
            subscriber.rollback()
            assert same_bits(follower, before)
    assert encodings_of(url, 4) == ("max",)
    with deltachain.Subscriber(url, joined) as newcomer:
        newcomer.update()
    assert same_bits(joined, copied(source))


def test_it_folds_with_other_encodings_in_one_plan(tmp_path: Path) -> None:
    url = f"{tmp_path}/chain"
    states = published(url, 6, ("step", "max", "overwrite"))
    target = zeros(model())
    with deltachain.Subscriber(url, target) as subscriber:
        subscriber.update(states[0][0])
        assert same_bits(target, states[0][1])
        subscriber.update()
    assert same_bits(target, states[-1][1])


def test_folders_pull_verify_and_show_it(tmp_path: Path) -> None:
    url, out = f"{tmp_path}/chain", tmp_path / "out"
    states = published(url, 2)
    with deltachain.Subscriber(url, FolderTarget(out)) as subscriber:
        subscriber.update(states[0][0])
        subscriber.update()
    checkpoint = Checkpoint(out)
    for name, weight in states[-1][1].items():
        bits = weight.view(torch.int16).flatten().numpy().view("u2")
        assert (checkpoint.bits(name) == bits).all()
    for command in ("verify", "log", "inspect"):
        shown = CliRunner().invoke(app, [command, url])
        assert shown.exit_code == 0, shown.output
    assert "max" in shown.output


def test_other_live_bits_are_found_before_anything_is_written(tmp_path: Path) -> None:
    url = f"{tmp_path}/chain"
    source, target = model(), zeros(model())
    with deltachain.Publisher(deltachain.PublishConfig(url=url, encoding="max")) as publisher:
        publisher.attach(source)
        with deltachain.Subscriber(url, target) as subscriber:
            subscriber.update()
            target["0.weight"].data[::2] *= -1.75  # torch does not count it
            altered = {name: weight.clone() for name, weight in target.items()}
            train(source)
            publisher.publish()
            publisher.flush()
            with pytest.raises(BaseMismatchError):
                subscriber.update()
            assert same_bits(target, altered)
            subscriber.update()  # from nothing
            assert same_bits(target, copied(source))


def test_tensors_that_share_a_digest_are_followed_folded_verified_and_named(tmp_path: Path) -> None:
    url = f"{tmp_path}/chain"
    source, target = layers(), zeros(layers())
    with deltachain.Publisher(deltachain.PublishConfig(url=url, encoding="max")) as publisher:
        publisher.attach(source)
        with deltachain.Subscriber(url, target) as subscriber:
            subscriber.update()
            for _ in range(8):
                train(source)
                publisher.publish()
                publisher.flush()
            chain = Chain.open(open_store(url))
            edge = chain.read(8).manifest.edge
            part = Part.from_bytes(chain.store.get(edge.parts[0].key))
            assert [bool(row.digest) for row in part.directory.tensors] == [False, False, True] * 2
            report = CliRunner().invoke(app, ["verify", url, "--json"])
            assert report.exit_code == 0, report.output
            deltas = json.loads(report.stdout)["edges"]["delta"]
            assert deltas["edges"] == deltas["proven"] > 0
            subscriber.update()
            assert same_bits(target, copied(source))
            target["layers.0.b.weight"].data[5, 7] += 1  # torch does not count it
            train(source)
            publisher.publish()
            publisher.flush()
            with pytest.raises(BaseMismatchError) as caught:
                subscriber.update()
    if "first to differ" in str(caught.value):  # else its tiles cannot be read with other bits
        assert "'layers.0.a.weight', 'layers.0.b.weight', 'layers.0.c.weight'" in str(caught.value)
    assert "layers.0.b.weight" in str(caught.value)


Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]


def assert_holds(replica: Replica, model: nn.Module) -> None:
    assert same(replica.bits(), bits_of(model))


# What is no target


@pytest.mark.parametrize("thing", [3, None, ["0.weight"]])
def test_what_is_no_target_is_refused(thing: Any, store: MemoryStore) -> None:
    with pytest.raises(ConfigError, match="no target") as caught:
        Subscriber(SubscribeConfig(url=store.url), thing, store=store)
    assert "module" in caught.value.hint


def test_the_url_comes_before_the_target() -> None:
    swapped: Any = TinyModel()
    with pytest.raises(ConfigError, match="URL or a path"):
        Subscriber(swapped, "policy")


# Joining


def test_without_a_chain_there_is_nothing_to_join(replica: Replica, subscribe: Subscribe) -> None:
    with pytest.raises(ObjectNotFoundError) as caught:
        subscribe(replica).update()
    assert "no publisher has created a chain here yet" in caught.value.hint


@pytest.mark.usefixtures("publisher")
def test_a_newcomer_joins_from_nothing(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1, 2)
    receipt = present(subscribe(replica).update())
    assert (receipt.version, receipt.previous, receipt.step) == (2, None, 2)
    assert_holds(replica, model)


def test_one_version_is_caught_up_with_its_delta_alone(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel, store: MemoryStore
) -> None:
    publish(1)
    faulty = FaultyStore(store)
    subscriber = subscribe(replica, on=faulty)
    subscriber.update()
    publish(2)
    faulty.keys_read.clear()
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous, receipt.lag_versions) == (2, 1, 0)
    payloads = [key for key in faulty.keys_read if key.startswith(("anchors/", "deltas/"))]
    assert [key.split("-")[0] for key in payloads] == [f"deltas/{2:020d}"]
    assert_holds(replica, model)
    assert subscriber.update() is None
    assert subscriber.update(2) is None


def test_several_versions_are_folded_into_one_apply(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    publish(2, 3, 4, 5)
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous) == (5, 1)
    assert receipt.plan.count("delta->") == 4
    assert_holds(replica, model)


def test_dense_changes_are_applied(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    publish(2, share=1.0)
    publish(3)
    subscriber.update()
    assert_holds(replica, model)


def test_a_version_can_be_named(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    at_one = bits_of(model)
    publish(2)
    subscriber = subscribe(replica)
    receipt = present(subscriber.update(1))
    assert (receipt.version, receipt.lag_versions) == (1, 1)
    assert same(replica.bits(), at_one)
    with pytest.raises(ChainError, match="version 7 is not committed, head is 2"):
        subscriber.update(7)


def test_an_older_version_is_reached_by_rollback_alone(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1, 2)
    subscriber = subscribe(replica)
    subscriber.update()
    with pytest.raises(ChainError, match="version 1 is older than the held 2") as caught:
        subscriber.update(1)
    assert "rollback" in caught.value.hint
    assert_holds(replica, model)


# Starting again


def test_a_target_that_holds_a_version_is_recognised_by_its_bits(
    replica: Replica, subscribe: Subscribe, publish: Publish
) -> None:
    publish(1, 2)
    subscribe(replica).update(1)
    if isinstance(replica.target, Path):
        (replica.target / "deltachain.json").unlink()
    again = subscribe(replica)
    again.update(2)
    assert again.last is not None
    assert again.last.previous == 1


def test_a_target_that_somebody_wrote_to_joins_from_nothing(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1, 2)
    subscribe(replica).update(1)
    scribble(replica)
    again = subscribe(replica)
    again.update()
    assert again.last is not None
    assert again.last.previous is None
    assert_holds(replica, model)


# Two things that a swap must not survive


def test_what_was_staged_before_another_swap_is_refused(
    replica: Replica, subscribe: Subscribe, publish: Publish
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    publish(2)
    stale = present(subscriber.stage())
    publish(3)
    subscriber.update()
    before = replica.bits()
    with pytest.raises(BaseMismatchError, match="staged before another swap"):
        subscriber.swap(stale)
    assert same(replica.bits(), before)
    assert subscriber.version == 3
    assert not subscriber.poisoned


def test_what_was_staged_before_a_scrub_that_failed_is_refused(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    publish(2)
    staged = present(subscriber.stage())
    scribble(replica)
    assert not subscriber.scrub()
    with pytest.raises(BaseMismatchError):
        subscriber.swap(staged)
    assert subscriber.version is None
    subscriber.update()
    assert_holds(replica, model)


def scribble_unseen(replica: Replica) -> None:
    """Flip a bit, and give the file of a folder its old time again."""
    files = replica.target.glob("*.safetensors") if isinstance(replica.target, Path) else ()
    times = {file: file.stat().st_mtime_ns for file in files}
    scribble(replica)
    for file, time_ns in times.items():
        os.utime(file, ns=(time_ns, time_ns))


def test_a_foreign_write_where_a_delta_writes_is_found_before_anything_is_written(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    scribble_unseen(replica)
    before = replica.bits()
    publish(2, share=0.7)  # touches every tensor nearly everywhere
    with pytest.raises(BaseMismatchError, match="nothing was written"):
        subscriber.update()
    assert same(replica.bits(), before)
    assert subscriber.version is None
    receipt = present(subscriber.update())
    assert receipt.previous is None
    assert_holds(replica, model)


def test_a_scrub_finds_a_foreign_write_and_the_next_update_heals(
    replica: Replica, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    subscriber.update()
    assert subscriber.scrub()
    scribble(replica)
    assert not subscriber.scrub()
    assert subscriber.status().poisoned
    assert subscriber.status().version is None
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous) == (1, None)
    assert subscriber.scrub()
    assert_holds(replica, model)


def test_a_replica_that_holds_nothing_proves_nothing(
    replica: Replica, subscribe: Subscribe, publish: Publish
) -> None:
    publish(1)
    subscriber = subscribe(replica)
    assert not subscriber.scrub()
    assert subscriber.status().version is None
    assert subscriber.status().head == 1


# Two replicas, and settings


@pytest.mark.parametrize("settings", [{"poll_s": 0}, {"stage_budget": -1}, {"undo_applies": -1}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        SubscribeConfig(url="memory://unused", **settings)  # type: ignore[arg-type]


def test_status_tells_held_head_and_lag(
    replica: Replica, subscribe: Subscribe, publish: Publish, store: MemoryStore
) -> None:
    publish(1, 2, 3)
    with subscribe(replica) as subscriber:
        subscriber.update(1)
        status = subscriber.status()
    assert (status.version, status.head, status.lag_versions) == (1, 3, 2)
    assert (status.url, status.pinned, status.poisoned) == (store.url, False, False)
    assert status.last is not None
    assert (status.last["version"], status.last["previous"]) == (1, None)
