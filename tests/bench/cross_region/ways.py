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
    """Makes the trainer's live weights a version."""

    def send(self, version: int) -> None:
        """Returns when replicas can see it."""

    def close(self) -> None:
        """Give everything back."""


class Receiver(Protocol):
    """Keeps a replica's live weights at the newest version."""

    def receive(self, version: int) -> None:
        """Returns when the live weights hold it."""

    def close(self) -> None:
        """Give everything back."""


class ChainSender:
    """deltachain's publisher, as a trainer has it."""

    def __init__(self, scene: Scene, flat: U16, url: str) -> None:
        self._weights = scene.tensors(flat)
        self._publisher = Publisher(PublishConfig(url=url, when_busy="wait"))

    def send(self, version: int) -> None:
        """See :class:`Sender`; the first version comes with attaching."""
        if version == 0:
            self._publisher.attach(self._weights.items, assets={})
        else:
            self._publisher.publish(step=version).result()

    def close(self) -> None:
        """See :class:`Sender`."""
        self._publisher.close()


class ChainReceiver:
    """deltachain's subscriber, following as a replica does."""

    def __init__(self, scene: Scene, flat: U16, url: str, poll_s: float) -> None:
        config = SubscribeConfig(url=url, poll_s=poll_s)
        self._subscriber = Subscriber(config, scene.tensors(flat))
        self._receipts = self._subscriber.follow()

    def receive(self, version: int) -> None:
        """See :class:`Receiver`; whatever is written was proven before."""
        while next(self._receipts).version < version:
            pass

    def close(self) -> None:
        """See :class:`Receiver`."""
        self._subscriber.close()


def sender(way: str, scene: Scene, flat: U16, *, url: str) -> Sender:
    """The trainer's side of a way."""
    if way == DELTACHAIN:
        return ChainSender(scene, flat, url)
    return PeerSender(scene, flat, PEERS[way](), Shelf(url, poll_s=0))


def receiver(way: str, scene: Scene, flat: U16, *, url: str, poll_s: float) -> Receiver:
    """A replica's side of a way."""
    if way == DELTACHAIN:
        return ChainReceiver(scene, flat, url, poll_s)
    return PeerReceiver(scene, flat, PEERS[way](), Shelf(url, poll_s=poll_s))
