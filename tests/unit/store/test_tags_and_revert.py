"""Tags, searches and reverts on real stores: a folder, an S3 server, an emulated Hub."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.tags import VersionChoice, choose
from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.revert import revert
from deltachain.store import Store, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.crash.child import KINDS, Place, open_place
from tests.support.models import TinyModel, bits_of, replica_of, same, train_

VERSIONS = 5


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return open_place(request.param, tmp_path, request.getfixturevalue, monkeypatch.setenv)


@pytest.fixture
def opened(place: Place) -> Callable[[], Store]:
    return lambda: open_store(place.url(), writer=True)


@pytest.mark.parametrize(
    "place",
    [pytest.param(k, marks=() if k == "file" else pytest.mark.full) for k in KINDS],
    indirect=True,
)
def test_a_tagged_version_is_found_and_gone_back_to(
    place: Place, opened: Callable[[], Store], tmp_path: Path
) -> None:
    model, states = TinyModel(), []
    with Publisher(PublishConfig(url=place.url()), store=opened()).attach(model) as publisher:
        for step in range(1, VERSIONS + 1):
            states.append(bits_of(model))
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
    chain = Chain.open(opened())
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(
            lambda v: tags.set_(Chain.open(opened()), "best", chain.read(v), time=time.time()),
            range(4),
        )
        numbers = [tag.number for tag in made]
    assert len(numbers) == 4
    if chain.store.capabilities.conditional_put:
        assert sorted(numbers) == list(range(4))
    tags.set_(chain, "best", chain.read(2), time=time.time())
    assert [(tag.name, tag.version) for tag in tags.read_all(chain)] == [("best", 2)]
    assert choose(chain, VersionChoice(step=2)).version == 2
    assert choose(chain, VersionChoice(at=time.time() + 1e6)).version == VERSIONS
    goal = choose(chain, VersionChoice(tag="best"))
    if not chain.store.capabilities.conditional_put:
        with pytest.raises(ConfigError, match="cannot decide between two writers"):
            revert(chain, goal)
        return
    revert(chain, goal)
    replica = replica_of(model, "dict", tmp_path)
    config = SubscribeConfig(url=place.url())
    with Subscriber(config, replica.target, store=opened()) as subscriber:
        subscriber.update()
        assert subscriber.version == VERSIONS + 1
        assert same(replica.bits(), states[2])
