"""The four ways of bringing a version from a trainer to a replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from deltachain import PublishConfig, Publisher, SubscribeConfig, Subscriber
from tests.bench.chains import U16
from tests.bench.cross_region.layouts import Layout, SlimeDeltasZstd, TrlGaps
from tests.bench.cross_region.peers import PeerReceiver, PeerSender, Shelf
from tests.bench.cross_region.scene import Scene

DELTACHAIN: Final = "deltachain"

PEERS: Final[Mapping[str, Callable[[], Layout | None]]] = {
    "full checkpoints": lambda: None,
    "TRL drafts, gap_delta": TrlGaps,
    "slime deltas_zstd": SlimeDeltasZstd,
}

WAYS: Final = (*PEERS, DELTACHAIN)


class Sender(Protocol):
    def send(self, version: int) -> None: ...

    def close(self) -> None: ...


class Receiver(Protocol):
    def receive(self, version: int) -> None: ...

    def close(self) -> None: ...


class ChainSender:
    def __init__(self, scene: Scene, flat: U16, url: str) -> None:
        self._weights = scene.tensors(flat)
        self._publisher = Publisher(PublishConfig(url=url, when_busy="wait"))

    def send(self, version: int) -> None:
        if version == 0:
            self._publisher.attach(self._weights.items, assets={})
        else:
            self._publisher.publish(step=version).result()

    def close(self) -> None:
        self._publisher.close()


class ChainReceiver:
    def __init__(self, scene: Scene, flat: U16, url: str, poll_s: float) -> None:
        config = SubscribeConfig(url=url, poll_s=poll_s)
        self._subscriber = Subscriber(config, scene.tensors(flat))
        self._receipts = self._subscriber.follow()

    def receive(self, version: int) -> None:
        while next(self._receipts).version < version:
            pass

    def close(self) -> None:
        self._subscriber.close()


def sender(way: str, scene: Scene, flat: U16, *, url: str) -> Sender:
    if way == DELTACHAIN:
        return ChainSender(scene, flat, url)
    return PeerSender(scene, flat, PEERS[way](), Shelf(url, poll_s=0))


def receiver(way: str, scene: Scene, flat: U16, *, url: str, poll_s: float) -> Receiver:
    if way == DELTACHAIN:
        return ChainReceiver(scene, flat, url, poll_s)
    return PeerReceiver(scene, flat, PEERS[way](), Shelf(url, poll_s=poll_s))
