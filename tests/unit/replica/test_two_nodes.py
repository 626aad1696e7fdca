"""Ranks that do not see what their leader writes: refused at the start, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deltachain.errors import ApplyError, ConfigError
from deltachain.replica.messages import AttachRequest, Refusal
from deltachain.replica.rpc import RankService
from deltachain.replica.settings import RankSettings
from deltachain.replica.spool import PROBE, Spool, check_probe
from deltachain.testing.sharding import Sharding
from tests.unit.replica.replicas import Followed

Build = Callable[..., Followed]


def move(here: Followed, rank: int, spool: Path) -> None:
    """A rank runs on another node: what it has under the name of the spool is something else."""
    model = here.engine.models[rank]
    here.engine.services[rank] = RankService(lambda: model, rank, RankSettings(spool=spool))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_sees_another_folder_is_refused_before_anything_is_touched(
    followed: Build, tmp_path: Path, rank: int
) -> None:
    here = followed(Sharding(tp=2))
    move(here, rank, tmp_path / "the other node")
    before = here.engine.bits()
    with pytest.raises(ConfigError, match=f"rank {rank}: .* does not see the leader's file") as no:
        here.subscriber.update()
    assert "must share the folder of DELTACHAIN_SPOOL" in no.value.hint
    assert here.engine.bits() == before
    assert here.engine.events == []
    assert here.spools() == []
    assert here.engine.services[rank]._rank is None


def test_following_ends_with_it_instead_of_trying_for_ever(followed: Build, tmp_path: Path) -> None:
    here = followed(Sharding(tp=2))
    move(here, 1, tmp_path / "the other node")
    with pytest.raises(ConfigError, match="does not see"):
        next(here.subscriber.follow())


def test_one_folder_by_two_names_is_one(followed: Build, tmp_path: Path) -> None:
    here = followed(Sharding(tp=2))
    here.spool.mkdir()
    (tmp_path / "mounted").symlink_to(here.spool)
    move(here, 1, tmp_path / "mounted")
    here.publish(1)
    here.subscriber.update()
    assert here.holds(1)


def test_a_folder_that_holds_another_leaders_word_is_another(tmp_path: Path) -> None:
    probe = Spool.probe(tmp_path, "one")
    check_probe(probe.folder, "one")
    with pytest.raises(ConfigError, match="it holds something else"):
        check_probe(probe.folder, "other")
    (probe.folder / PROBE).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it holds something else"):
        check_probe(probe.folder, "one")
    probe.close()
    with pytest.raises(ConfigError, match="No such file"):
        check_probe(probe.folder, "one")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_a_probe_lies_in_the_spool_folder_alone(followed: Build, name: str) -> None:
    here = followed(Sharding())
    asked = AttachRequest(url=here.store.url, specs=(), aliases={}, probe=(name, "word"))
    answer = here.engine.services[0].handle(asked)
    assert isinstance(answer, Refusal)
    assert answer.error == "ConfigError"
    assert "is not a spool" in answer.message


def test_a_spool_that_cannot_be_written_to_is_said_at_the_start(followed: Build) -> None:
    here = followed(Sharding())
    here.spool.write_text("a file")
    with pytest.raises(ApplyError, match="plans could not be decoded there") as caught:
        here.subscriber.update()
    assert "DELTACHAIN_SPOOL" in caught.value.hint
