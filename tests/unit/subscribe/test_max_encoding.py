"""Chains in the encoding ``max``: followed step by step, folded, joined, verified, undone."""

from __future__ import annotations

import copy
import json
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
from deltachain.errors import BaseMismatchError
from deltachain.store import open_store
from deltachain.subscribe.targets.folder import FolderTarget


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
