"""20,000 versions: who comes late reads a few documents of them, on every store."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltachain.format import keys
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, ObjectInfo, Store, open_store
from deltachain.store.base import MAX_DOCUMENT
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import Version
from tests.accidents.scene import Journal, Kept, put_all
from tests.crash.child import KINDS, Place
from tests.support.backup import objects_of
from tests.support.models import Replica, State, bits_of, plain_model, replica_of, same, train_

VERSIONS = 20_000
BEHIND = 19_000
DOCUMENTS = 80
"""Documents that a follower so far behind asks for: about fifty are skips, looked up by name."""

BUDGET = 100
"""Requests that a follower on a free token of the Hub has in five minutes."""

LOOKS = 80
"""Looks that find the head without a hint: by doubling and halving, twice."""

PAYLOADS = 400
"""Newest versions whose payload is there: whoever reads an older one finds nothing."""


@dataclass(frozen=True)
class Long:
    objects: dict[str, bytes]
    then: State
    now: State


class Counting(Kept):
    def __init__(self, inner: Store) -> None:
        super().__init__(inner, Journal())
        self.begin()

    def begin(self) -> None:
        self.documents: list[str] = []
        self.looks, self._requests = 0, self.inner.requests

    @property
    def spent(self) -> int:
        return self.inner.requests - self._requests

    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        self._note(key)
        return self.inner.get(key, limit=limit)

    def read(self, key: str, *, nbytes: int, pin: str = "") -> bytes:
        self._note(key)
        return bytes(self.inner.read(key, nbytes=nbytes, pin=pin))

    def find(self, key: str) -> ObjectInfo | None:
        self.looks += 1
        return self.inner.find(key)

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        self.looks += 1
        return self.inner.find_all(keys)

    def _note(self, key: str) -> None:
        if key.endswith(".json"):
            self.documents.append(key)


@pytest.fixture(scope="module")
def long() -> Long:
    store, model = MemoryStore(), plain_model()
    config = PublishConfig(url=store.url, anchor_every=60)
    with Publisher(config, store=store).attach(model) as publisher:
        for step in range(1, VERSIONS + 1):
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
            if step == VERSIONS - BEHIND:
                then = bits_of(model)
    return Long(objects_of(store), then, bits_of(model))


def until(long: Long, version: Version) -> dict[str, bytes]:
    return {
        key: data
        for key, data in long.objects.items()
        if (at := keys.version_of(key) or 0) <= version
        and (key.endswith(".json") or version - at < PAYLOADS)
        and key != keys.HEAD_KEY
    }


@pytest.fixture
def subscribe(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Subscriber, Counting]]]:
    made: list[Subscriber] = []

    def build(replica: Replica, **settings: Any) -> tuple[Subscriber, Counting]:
        with monkeypatch.context() as patch:
            patch.delenv("DELTACHAIN_HF_CALLS", raising=False)
            store = Counting(open_store(place.url()))
        config = SubscribeConfig(url=place.url(), **settings)
        made.append(Subscriber(config, replica.target, store=store))
        return made[-1], store

    yield build
    for subscriber in made:
        subscriber.close()


Subscribe = Callable[..., tuple[Subscriber, Counting]]


def put(place: Place, objects: Mapping[str, bytes]) -> None:
    with closing(open_store(place.url())) as store:
        put_all(store, objects)


def check(subscriber: Subscriber, store: Counting, replica: Replica, long: Long) -> None:
    assert subscriber.version == VERSIONS
    assert same(replica.bits(), long.now)
    assert len(store.documents) <= DOCUMENTS, store.documents
    if store.url.startswith("hf://"):
        assert store.spent <= BUDGET
    assert store.looks <= LOOKS


@pytest.mark.slow
@pytest.mark.parametrize("place", KINDS, indirect=True)
@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("kind", ["dict", "folder"])
def test_who_comes_now_and_who_is_far_behind_join_at_once(
    kind: str, subscribe: Subscribe, place: Place, long: Long, tmp_path: Path, *, hint: bool
) -> None:
    put(place, until(long, VERSIONS - BEHIND))
    far = replica_of(plain_model(), kind, tmp_path / "far")
    behind, behind_store = subscribe(far)
    behind.update()
    assert same(far.bits(), long.then)
    old, new = until(long, VERSIONS - BEHIND), until(long, VERSIONS)
    put(place, {key: data for key, data in new.items() if key not in old})
    if hint:
        put(place, {keys.HEAD_KEY: long.objects[keys.HEAD_KEY]})
    newcomer = replica_of(plain_model(), kind, tmp_path / "newcomer")
    joining, joining_store = subscribe(newcomer)
    began = time.monotonic()
    joining.update()
    check(joining, joining_store, newcomer, long)
    behind_store.begin()
    behind.update()
    check(behind, behind_store, far, long)
    assert time.monotonic() - began < 60  # nobody waited for requests of a next window
