"""Other systems' own receivers read our files, and we read the files of their own trainers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist

import deltachain
from deltachain.bridges import dialect_of
from deltachain.bridges.imports import Importer
from deltachain.store import Store, open_store
from tests.peers.systems import State, receiver, trainer
from tests.support.seaweed import Seaweed
from tests.unit.bridges.test_bridges import Run, model_of, raw, same

pytestmark = pytest.mark.peers

VERSIONS: Final = 20
LATE: Final = 11


@pytest.fixture
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A folder; of ModelExpress, which reads and writes nothing else, S3."""
    if "modelexpress" not in request.node.name:
        return open_store(str(tmp_path / "out"))
    seaweed: Seaweed = request.getfixturevalue("seaweed")
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for name, value in seaweed.env().items():
        patch.setenv(name, value)
    return open_store(request.getfixturevalue("s3_url")())


@pytest.mark.parametrize(
    ("dialect", "system", "full_every"),
    [
        ("trl-v1", "trl1", 5),
        ("trl", "trl2", 5),
        ("trl", "trl3", 5),
        ("slime", "slime", 0),
        ("slime", "slime", 5),
        ("skyrl", "skyrl", 0),
        ("modelexpress", "modelexpress", 0),
        ("modelexpress", "modelexpress", 5),
        ("checkpoint", "checkpoint", 0),
    ],
)
def test_two_receivers_follow_twenty_versions(
    dialect: str,
    system: str,
    full_every: int,
    files: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
    monkeypatch.setattr("deltachain.bridges.files.SHARD_NBYTES", 1 << 10)  # of several files
    run = Run(tmp_path, dialect, full_every=full_every, files=files)
    receivers = [receiver(system, run, tmp_path / "early")]
    receivers[0].take(run.done[0])
    for number in range(1, VERSIONS + 1):
        run.step()
        run.done.append(run.write())
        for one in receivers:
            one.take(run.done[-1])
        if number == LATE:
            receivers.append(receiver(system, run, tmp_path / "late"))
            start = max(at for at, done in enumerate(run.done) if done.full)
            assert dialect == "checkpoint" or start == (LATE - 1 if full_every else 0)
            for done in run.done[start:]:
                receivers[-1].take(done)
        for one in receivers:
            same(one.held(), run.raw())
    run.close()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = tmp_path_factory.mktemp("ranks") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("dialect", "system"),
    [
        ("trl-v1", "trl1"),
        ("trl", "trl2"),
        ("trl", "trl3"),
        ("trl", "trl3 raw"),
        ("slime", "slime xor xxh3-128"),
        ("slime", "slime overwrite adler32"),
        ("slime", "slime xor blake3"),
        ("skyrl", "skyrl"),
        ("modelexpress", "modelexpress"),
        ("checkpoint", "checkpoint"),
    ],
)
def test_a_chain_follows_twenty_versions_of_a_trainer(
    dialect: str, system: str, files: Store, tmp_path: Path
) -> None:
    run, copy = Run(tmp_path / "run", "checkpoint"), tmp_path / "copy"
    out = files.url.removeprefix("file://")

    def state() -> State:
        return {name: tensor.clone() for name, tensor in run.tensors()}

    write, base = trainer(system, out, state(), tmp_path / "local")
    config = deltachain.PublishConfig(url=str(copy))
    with Importer(files, dialect_of(dialect), config, base=base) as importer:
        for number in range(VERSIONS + 1):
            if number:
                run.step()
                write(number, state())
            list(importer.versions())
            assert importer.held == number
            same(raw(model_of(copy)), run.raw())
    run.close()
