import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import deltachain
from deltachain.chain.chain import Chain
from deltachain.cli.app import app
from deltachain.codec import Part
from deltachain.errors import BaseMismatchError, ChainError, ConfigError
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.models import Replica, TinyModel, scribble
from tests.support.values import present
from tests.unit.subscribe.accidents import Run, bits, unchanged

# Deltas that are read with the old bits: the encoding ``max``


def model() -> nn.Module:
    torch.manual_seed(3)
    made: nn.Module = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)).bfloat16()
    return made


def layers() -> nn.Module:
    """A model whose small matrices share digests, a layer at a time."""
    torch.manual_seed(5)
    block = [nn.ModuleDict({n: nn.Linear(128, 64, bias=False) for n in "abc"}) for _ in range(2)]
    block[1].load_state_dict(block[0].state_dict())
    made: nn.Module = nn.ModuleDict({"layers": nn.ModuleList(block)})
    return made.bfloat16()


class Trainer:
    """Publishes versions of a model in some encoding; begins again where it is asked to."""

    def __init__(self, url: Path, source: nn.Module) -> None:
        self.url, self.source = str(url), source
        self.target = {name: torch.zeros_like(w) for name, w in source.state_dict().items()}

    def publish(self, versions: int = 1, encoding: str = "max") -> None:
        config = deltachain.PublishConfig(url=self.url, encoding=encoding)
        with deltachain.Publisher(config).attach(self.source) as publisher:
            for _ in range(versions):
                with torch.no_grad():
                    for weight in self.source.parameters():
                        chosen = torch.rand_like(weight) < 0.02
                        weight.add_(chosen * torch.randn_like(weight) * 1e-3)
                publisher.publish()
                publisher.flush()

    def state(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.source.state_dict().items()}

    def is_followed(self) -> bool:
        return same_bits(self.target, self.state())


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    pairs = ((weight, other[name]) for name, weight in one.items())
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "chain", model())


def test_versions_are_followed_folded_and_joined(trainer: Trainer) -> None:
    trainer.publish()
    with deltachain.Subscriber(trainer.url, trainer.target) as subscriber:
        subscriber.update()
        for versions in (1, 3):  # one edge, then three that are folded
            trainer.publish(versions)
            assert subscriber.update() is not None
            assert trainer.is_followed()
        before = trainer.state()
        trainer.publish()
        subscriber.update()
        subscriber.rollback()
        assert same_bits(trainer.target, before)
    newest = present(Chain.open(open_store(trainer.url)).head())
    assert newest.manifest.edge.encodings == ("max",)
    joined = Trainer(Path(trainer.url), trainer.source)
    with deltachain.Subscriber(joined.url, joined.target) as newcomer:
        newcomer.update()
    assert joined.is_followed()


def test_it_folds_with_other_encodings_in_one_plan(trainer: Trainer) -> None:
    trainer.publish(2, "step")
    first = trainer.state()
    trainer.publish(2, "max")
    trainer.publish(2, "overwrite")
    with deltachain.Subscriber(trainer.url, trainer.target) as subscriber:
        subscriber.update(2)
        assert same_bits(trainer.target, first)
        subscriber.update()
    assert trainer.is_followed()


def test_folders_pull_verify_and_show_it(trainer: Trainer, tmp_path: Path) -> None:
    trainer.publish(2)
    with deltachain.Subscriber(trainer.url, tmp_path / "out") as subscriber:
        subscriber.update(1)
        subscriber.update()
    expected = bits(trainer.source)
    assert all((one == expected[name]).all() for name, one in bits(tmp_path / "out").items())
    for command in ("verify", "log", "inspect"):
        shown = CliRunner().invoke(app, [command, trainer.url])
        assert shown.exit_code == 0, shown.output
    assert "max" in shown.output


def test_other_live_bits_are_found_before_anything_is_written(trainer: Trainer) -> None:
    trainer.publish()
    with deltachain.Subscriber(trainer.url, trainer.target) as subscriber:
        subscriber.update()
        trainer.target["0.weight"].data[::2] *= -1.75  # torch does not count it
        trainer.publish()
        with unchanged(trainer.target), pytest.raises(BaseMismatchError):
            subscriber.update()
        subscriber.update()  # from nothing
    assert trainer.is_followed()


def test_tensors_that_share_a_digest_are_followed_folded_verified_and_named(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "chain", layers())
    trainer.publish()
    with deltachain.Subscriber(trainer.url, trainer.target) as subscriber:
        subscriber.update(0)
        trainer.publish(7)
        chain = Chain.open(open_store(trainer.url))
        edge = chain.read(8).manifest.edge
        part = Part.from_bytes(chain.store.get(edge.parts[0].key))
        assert [bool(row.digest) for row in part.directory.tensors] == [False, False, True] * 2
        report = CliRunner().invoke(app, ["verify", trainer.url, "--json"])
        assert report.exit_code == 0, report.output
        deltas = json.loads(report.stdout)["edges"]["delta"]
        assert deltas["edges"] == deltas["proven"] > 0
        subscriber.update()
        assert trainer.is_followed()
        trainer.target["layers.0.b.weight"].data[5, 7] += 1  # torch does not count it
        trainer.publish()
        with pytest.raises(BaseMismatchError):
            subscriber.update()


# What is no target, and settings that mean nothing


@pytest.mark.parametrize("thing", [3, None, ["0.weight"]])
def test_what_is_no_target_is_refused(thing: Any, store: MemoryStore) -> None:
    with pytest.raises(ConfigError, match="no target") as caught:
        Subscriber(SubscribeConfig(url=store.url), thing, store=store)
    assert "module" in caught.value.hint


def test_the_url_comes_before_the_target() -> None:
    swapped: Any = TinyModel()
    with pytest.raises(ConfigError, match="URL or a path"):
        Subscriber(swapped, "policy")


@pytest.mark.parametrize("settings", [{"poll_s": 0}, {"stage_budget": -1}, {"undo_applies": -1}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"Expected `(int|float)` >"):
        SubscribeConfig(url="memory://unused", **settings)  # type: ignore[arg-type]


# Joining and catching up


@pytest.fixture
def subscriber(run: Run, replica: Replica) -> Subscriber:
    """A replica of each kind that holds version 1 of 1."""
    run.publish(1)
    return run.join(replica, on=run.faulty)


def test_a_newcomer_joins_from_nothing(run: Run, replica: Replica) -> None:
    run.publish(1, 2)
    subscriber = run.subscribe(replica)
    assert not subscriber.scrub()  # holding nothing proves nothing
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous, receipt.step) == (2, None, 2)
    assert str(receipt).startswith("version 2 (from nothing) step 2 nnz ")
    assert run.matches(replica)


def test_one_version_is_caught_up_with_its_delta_alone(
    run: Run, replica: Replica, subscriber: Subscriber
) -> None:
    run.publish(2)
    run.faulty.keys_read.clear()
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous, receipt.lag_versions) == (2, 1, 0)
    payloads = [key for key in run.faulty.keys_read if key.startswith(("anchors/", "deltas/"))]
    assert [key.split("-")[0] for key in payloads] == [f"deltas/{2:020d}"]
    assert run.matches(replica)
    assert subscriber.update() is None
    assert subscriber.update(2) is None


def test_several_versions_are_folded_into_one_apply(
    run: Run, replica: Replica, subscriber: Subscriber
) -> None:
    run.publish(2, 3)
    run.publish(4, share=1.0)  # a dense change
    run.publish(5)
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous) == (5, 1)
    assert receipt.plan.count("delta->") == 4
    assert run.matches(replica)


def test_a_version_can_be_named(run: Run, replica: Replica) -> None:
    run.publish(1, 2, 3)
    with run.subscribe(replica) as subscriber:
        receipt = present(subscriber.update(1))
        assert (receipt.version, receipt.lag_versions) == (1, 2)
        assert run.matches(replica, 1)
        with pytest.raises(ChainError, match="version 7 is not committed, head is 3"):
            subscriber.update(7)
        status = subscriber.status()
    assert (status.version, status.head, status.lag_versions) == (1, 3, 2)
    assert (status.url, status.pinned, status.poisoned) == (run.store.url, False, False)
    last = present(status.last)
    assert (last["version"], last["previous"]) == (1, None)


def test_an_older_version_is_reached_by_rollback_alone(run: Run, replica: Replica) -> None:
    run.publish(1, 2)
    subscriber = run.join(replica)
    with pytest.raises(ChainError, match="version 1 is older than the held 2") as caught:
        subscriber.update(1)
    assert "rollback" in caught.value.hint
    assert run.matches(replica)


@pytest.mark.parametrize("scribbled", [False, True])
def test_a_target_that_holds_a_version_is_recognised_by_its_bits(
    run: Run, replica: Replica, *, scribbled: bool
) -> None:
    run.publish(1, 2)
    run.join(replica, 1)
    if scribbled:
        scribble(replica)
    elif isinstance(replica.target, Path):
        (replica.target / "deltachain.json").unlink()
    again = run.join(replica, 2)
    assert present(again.last).previous == (None if scribbled else 1)
    assert run.matches(replica)


# Two things that a swap must not survive


def test_what_was_staged_before_another_swap_is_refused(
    run: Run, replica: Replica, subscriber: Subscriber
) -> None:
    run.publish(2)
    stale = present(subscriber.stage())
    run.publish(3)
    subscriber.update()
    with unchanged(replica), pytest.raises(BaseMismatchError, match="staged before another swap"):
        subscriber.swap(stale)
    assert subscriber.version == 3
    assert not subscriber.poisoned


def test_what_was_staged_before_a_scrub_that_failed_is_refused(
    run: Run, replica: Replica, subscriber: Subscriber
) -> None:
    run.publish(2)
    staged = present(subscriber.stage())
    scribble(replica)
    assert not subscriber.scrub()
    with pytest.raises(BaseMismatchError):
        subscriber.swap(staged)
    assert subscriber.version is None
    subscriber.update()
    assert run.matches(replica)


def scribble_unseen(replica: Replica) -> None:
    """Flip a bit, and give the file of a folder its old time again."""
    files = replica.target.glob("*.safetensors") if isinstance(replica.target, Path) else ()
    times = {file: file.stat().st_mtime_ns for file in files}
    scribble(replica)
    for file, time_ns in times.items():
        os.utime(file, ns=(time_ns, time_ns))


def test_a_foreign_write_where_a_delta_writes_is_found_before_anything_is_written(
    run: Run, replica: Replica, subscriber: Subscriber
) -> None:
    scribble_unseen(replica)
    run.publish(2, share=0.7)  # touches every tensor nearly everywhere
    with unchanged(replica), pytest.raises(BaseMismatchError, match="nothing was written"):
        subscriber.update()
    assert subscriber.version is None
    receipt = present(subscriber.update())
    assert receipt.previous is None
    assert run.matches(replica)


def test_a_scrub_finds_a_foreign_write_and_the_next_update_heals(
    run: Run, replica: Replica, subscriber: Subscriber
) -> None:
    assert subscriber.scrub()
    scribble(replica)
    assert not subscriber.scrub()
    assert subscriber.status().poisoned
    assert subscriber.status().version is None
    receipt = present(subscriber.update())
    assert (receipt.version, receipt.previous) == (1, None)
    assert subscriber.scrub()
    assert run.matches(replica)
