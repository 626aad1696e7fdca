from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deltachain.publish import PublishConfig, Publisher
from deltachain.store import Store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.hub.server import HubServer
from tests.support.models import TinyModel, bits_of, replica_of, same, train_


def test_chain_is_published_and_followed_with_a_read_only_token(
    hub: HubServer, opened: Callable[..., Store], tmp_path: Path
) -> None:
    model = TinyModel()
    replica = replica_of(model, "dict", tmp_path)
    writing = opened()
    reading = opened(token=hub.read_token)
    publisher = Publisher(PublishConfig(url=writing.url), store=writing).attach(model)
    subscriber = Subscriber(SubscribeConfig(url=reading.url), replica.target, store=reading)
    for step in range(3):
        train_(model, step)
        publisher.publish(step=step)
        publisher.flush()
        subscriber.update()
        assert same(replica.bits(), bits_of(model))
    publisher.close()
    subscriber.close()
