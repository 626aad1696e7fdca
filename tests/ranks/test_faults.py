from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.spawn import run

STRIKES = [
    (0, "absent", "", 2, 1),
    (1, "absent", "", 2, 1),
    (0, "in-diff", "", 2, 1),
    (1, "in-diff", "", 2, 1),
    (1, "kill", "deltas/", 2, 1),
    (1, "kill-after", "deltas/", 2, 1),
    (0, "kill", "deltas/", 2, 1),
    (0, "kill-after", "deltas/", 2, 1),
    (0, "kill", "manifests/", 1, 1),
    (0, "kill-after", "manifests/", 2, 1),
    (1, "kill", "anchors/", 2, 1),
    (0, "kill", "edges/", 3, 0),
]
"""Who dies, how, at the second write of what if any; how many versions are committed by then, and
whether training, which goes on after its second step, then differs from the newest."""


pytestmark = pytest.mark.dist


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "do", "prefix", "committed", "differs"), STRIKES)
def test_a_rank_that_is_killed_commits_nothing_and_the_next_publish_covers_it(
    tmp_path: Path, victim: int, do: str, prefix: str, committed: int, differs: int
) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.trials:dies", 2, url, victim, do, prefix, deaths=1)
    before = [proof.version for proof in verify(Chain.open(open_store(url)))]
    assert before == list(range(committed))
    run("tests.ranks.trials:ten_steps", 2, "stages", url, str(tmp_path), 2, 2)
    after = [proof.version for proof in verify(Chain.open(open_store(url)))]
    # The one that takes over, the difference if there is one, and two steps.
    assert after == list(range(committed + 1 + differs + 2))


def test_a_rank_that_stalls_is_named_and_the_next_version_covers_it(tmp_path: Path) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.trials:stalls", 2, url, str(tmp_path))


def test_a_rank_whose_training_fails_ends_at_once(tmp_path: Path) -> None:
    run("tests.ranks.trials:leaves", 2, (tmp_path / "chain").as_uri())


def test_ranks_that_publish_without_a_pause_commit_every_version(tmp_path: Path) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.trials:hurries", 2, url, str(tmp_path))
    proofs = list(verify(Chain.open(open_store(url))))
    assert [proof.version for proof in proofs] == list(range(25))


def test_ranks_that_could_not_attach_meet_at_the_next_attempt(tmp_path: Path) -> None:
    run("tests.ranks.trials:comes_late", 3, (tmp_path / "chain").as_uri(), str(tmp_path))


def test_a_rank_that_flushes_alone_is_in_step_again_later(tmp_path: Path) -> None:
    run("tests.ranks.trials:flushes_alone", 2, (tmp_path / "chain").as_uri(), str(tmp_path))


def test_a_rank_that_can_not_read_the_store_tells_the_others(tmp_path: Path) -> None:
    run("tests.ranks.trials:can_not_look", 2, (tmp_path / "chain").as_uri())


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_steps_after_the_last_version_are_published_at_the_end(tmp_path: Path, layout: str) -> None:
    run("tests.ranks.trials:leaves_steps", 2, layout, (tmp_path / "chain").as_uri(), str(tmp_path))


def test_a_rank_that_misses_a_publish_is_in_step_at_the_next(tmp_path: Path) -> None:
    run("tests.ranks.trials:misses_one", 2, (tmp_path / "chain").as_uri(), str(tmp_path))


def test_versions_that_cover_several_steps_are_of_one_step_on_all_ranks(tmp_path: Path) -> None:
    run("tests.ranks.trials:covers", 2, (tmp_path / "chain").as_uri(), str(tmp_path))


def test_a_store_that_went_back_stops_all_ranks_until_it_is_as_it_was(tmp_path: Path) -> None:
    run("tests.ranks.trials:store_goes_back", 2, (tmp_path / "chain").as_uri(), str(tmp_path))
