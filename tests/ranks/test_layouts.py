import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from deltachain.chain.chain import Chain
from deltachain.checkpoint import Checkpoint
from deltachain.cli.pull import pull
from deltachain.codec import Part
from deltachain.codec.encodings.max.encoding import MaxEncoding
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.models import Training
from tests.ranks.spawn import on_ranks, run

STEPS = 10

pytestmark = pytest.mark.dist


def steps_of(rank: int, layout: str, url: str, folder: str, first: int, steps: int) -> None:
    training = Training(url, layout, when_busy="wait")
    for number in range(first):  # as if restored from a checkpoint of that step
        training.train(number)
    dice = random.Random(rank)
    with CommDebugMode() as attaching:
        training.__enter__()
    assert attaching.get_total_counts() == 0
    with training.publisher as publisher:
        training.check(publisher.version, folder)
        for number in range(first, first + steps):
            training.train(number)
            time.sleep(dice.random() * 0.1)  # ranks are never in step by themselves
            with CommDebugMode() as communication:
                future = publisher.publish(step=number)
            assert communication.get_total_counts() == 0
            receipt = future.result(60)
            assert receipt.step == number
            training.check(receipt.version, folder)


def slow(layout: str, ranks: int) -> Any:
    return pytest.param(layout, ranks, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("rows", 2),
        ("rows", 3),
        slow("rows", 4),
        ("columns", 2),
        slow("columns", 3),
        slow("columns", 4),
        slow("hybrid", 2),
        ("hybrid", 4),
        ("tensor_parallel", 4),
        ("copies", 2),
        slow("copies", 3),
        ("experts", 2),
        slow("experts", 3),
        slow("experts", 4),
        ("stages", 2),
        slow("stages", 3),
        slow("stages", 4),
    ],
)
def test_every_version_of_a_sharded_model_is_the_gathered_one(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    url = (tmp_path / "chain").as_uri()
    run(steps_of, ranks, layout, url, str(tmp_path), 0, STEPS)
    chain = Chain.open(open_store(url))
    assert [proof.version for proof in verify(chain)] == list(range(STEPS + 1))


def test_a_restart_in_another_layout_from_another_state_publishes_the_difference(
    tmp_path: Path,
) -> None:
    url = (tmp_path / "chain").as_uri()
    run(steps_of, 2, "columns", url, str(tmp_path), 0, 3)
    run(steps_of, 3, "rows", url, str(tmp_path), 1, 2)
    chain = Chain.open(open_store(url))
    assert [proof.epoch for proof in verify(chain)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert chain.read(5).manifest.nnz > 0


def test_a_restart_with_another_world_size_continues_the_chain(tmp_path: Path) -> None:
    url = (tmp_path / "chain").as_uri()
    for first, ranks in ((0, 3), (3, 2), (6, 1)):
        run(steps_of, ranks, "rows", url, str(tmp_path), first, 3)
    epochs = [proof.epoch for proof in verify(Chain.open(open_store(url)))]
    assert sorted(set(epochs)) == [0, 1, 2]


@on_ranks(2)
def test_ranks_publish_max_together(rank: int, url: str, folder: str) -> None:
    with Training(url, encoding="max", when_busy="wait") as training:
        for number in range(2):
            receipt = training.publish(number).result(60)
            assert receipt.encoding == "max"
            training.check(receipt.version, folder)
    if rank:
        return
    store = open_store(url)
    for committed in Chain.open(store).history(1, 2):
        edge = committed.manifest.edge
        assert "max" in edge.encodings
        parts = [Part.from_bytes(store.get(ref.key)) for ref in edge.parts]
        assert len(parts) == 2
        rows = [row for part in parts for row in part.rows.values()]
        divided = [row for row in rows if MaxEncoding().encodes_with_old(row.spec)]
        assert {row.encoding for row in divided} == {"max"}  # small ones are the smaller of both


@on_ranks(3)
def test_an_export_of_which_every_rank_gives_a_part(rank: int, url: str, folder: str) -> None:
    def part() -> Iterator[tuple[str, Tensor]]:
        if rank < 2:
            yield f"layer.{rank}", torch.full((3, 4), float(version * (rank + 1)))
            yield "shared", torch.full((5,), float(version))

    version = 0
    config = PublishConfig(url=url, when_busy="wait", deadline_s=60)
    with Publisher(config).attach(part) as publisher:
        for number in (1, 2):
            version = number
            assert publisher.publish(step=version).result(60).version == version
    if rank == 0:
        pull(url, out=Path(folder) / "pulled")
        checkpoint = Checkpoint(Path(folder) / "pulled")
        for name, values in {
            "layer.0": [2.0] * 12,
            "layer.1": [4.0] * 12,
            "shared": [2.0] * 5,
        }.items():
            assert checkpoint.bits(name).view("float32").tolist() == values, name
