from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.codec import Part
from deltachain.codec.encodings.max.encoding import MaxEncoding
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.spawn import run

STEPS = 10


pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("rows", 2),
        ("rows", 3),
        ("columns", 2),
        ("hybrid", 4),
        ("tensor_parallel", 4),
        ("flat", 4),
        ("flat_alone", 3),
        ("flat_hybrid", 4),
        ("copies", 2),
        ("experts", 2),
        ("stages", 2),
    ],
)
def test_every_version_of_a_sharded_model_is_the_gathered_one(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.trials:ten_steps", ranks, layout, url, str(tmp_path), 0, STEPS)
    chain = Chain.open(open_store(url))
    assert [proof.version for proof in verify(chain)] == list(range(STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("rows", 4),
        ("columns", 3),
        ("columns", 4),
        ("hybrid", 2),
        ("copies", 3),
        ("experts", 3),
        ("experts", 4),
        ("stages", 3),
        ("stages", 4),
    ],
)
def test_so_it_is_with_other_numbers_of_ranks(tmp_path: Path, layout: str, ranks: int) -> None:
    test_every_version_of_a_sharded_model_is_the_gathered_one(tmp_path, layout, ranks)


def test_a_restart_in_another_layout_from_another_state_publishes_the_difference(
    tmp_path: Path,
) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.trials:ten_steps", 2, "columns", url, str(tmp_path), 0, 3)
    run("tests.ranks.trials:ten_steps", 3, "rows", url, str(tmp_path), 1, 2)
    chain = Chain.open(open_store(url))
    assert [proof.epoch for proof in verify(chain)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert chain.read(5).manifest.nnz > 0


def test_ranks_publish_max_together(tmp_path: Path) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.trials:publishes_max", 2, url, str(tmp_path))
    store = open_store(url)
    chain = Chain.open(store)
    for committed in chain.history(1, 2):
        edge = committed.manifest.edge
        assert "max" in edge.encodings
        parts = [Part.from_bytes(store.get(ref.key)) for ref in edge.parts]
        assert len(parts) == 2
        rows = [row for part in parts for row in part.rows.values()]
        divided = [row for row in rows if MaxEncoding().encodes_with_old(row.spec)]
        assert {row.encoding for row in divided} == {"max"}  # small ones are the smaller of both


def test_an_export_of_which_every_rank_gives_a_part(tmp_path: Path) -> None:
    run("tests.ranks.trials:exports", 3, (tmp_path / "chain").as_uri(), str(tmp_path))


def test_a_restart_with_another_world_size_continues_the_chain(tmp_path: Path) -> None:
    url = (tmp_path / "chain").as_uri()
    first = 0
    for ranks in (3, 2, 1):
        run("tests.ranks.trials:ten_steps", ranks, "rows", url, str(tmp_path), first, 3)
        first += 3
    epochs = [proof.epoch for proof in verify(Chain.open(open_store(url)))]
    assert sorted(set(epochs)) == [0, 1, 2]
