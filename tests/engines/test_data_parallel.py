"""Several engines behind one address: all hold one version, or none moves."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.engines.replica import Replica, error_of, replicas, serving
from tests.engines.serving import STOP_S
from tests.engines.trainer import Trainer

pytestmark = pytest.mark.engine

ENGINES = 2


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replicas(tmp_path_factory.mktemp("parallel"), dp=ENGINES) as replica:
        yield replica


def serve(replica: Replica, version: int) -> bool:
    """Whether engines, which take turns, all serve a version."""
    return all(replica.serves(version) for _ in range(2 * ENGINES))


def test_all_engines_follow_and_go_back_as_one(replica: Replica) -> None:
    for _ in range(3):
        new = replica.trainer.step()
        assert len(replica.server.update()["ranks"]) == ENGINES
        assert replica.holds(new)
        assert serve(replica, new)
    assert replica.server.post("rollback", version=new - 1).json()["version"] == new - 1
    assert replica.holds(new - 1)
    assert serve(replica, new - 1)


@pytest.mark.parametrize(("at", "nth"), [("stage", 1), ("write", 4)])
def test_one_engine_that_refuses_keeps_all_at_the_old_version(
    replica: Replica, at: str, nth: int
) -> None:
    old = replica.trainer.head
    replica.trainer.step()
    replica.strike(at, nth=nth)
    error = error_of(replica.server.post("update"), 409)
    assert replica.is_struck()
    assert f"rank {ENGINES - 1}: " in error["message"]
    assert replica.holds(old)
    assert serve(replica, old)


def test_an_engine_that_is_killed_while_it_writes_ends_serving(
    trainer: Trainer, tmp_path: Path
) -> None:
    with serving(trainer, tmp_path, dp=ENGINES) as replica:
        replica.server.update(trainer.step())
        trainer.step()
        replica.strike("write", nth=4, kill=True)
        with suppress(httpx.TransportError):
            assert not replica.server.post("update").is_success
        assert replica.is_struck()
        replica.server.client.timeout = 2
        until = time.monotonic() + STOP_S
        while replica.server.alive and time.monotonic() < until:
            assert replica.server.readiness() <= {503}
            with pytest.raises((httpx.TransportError, AssertionError)):
                replica.server.generate([5, 6, 7], 4)
    with serving(trainer, tmp_path, dp=ENGINES) as replica:
        assert replica.holds(2)
        assert serve(replica, 2)
