"""An agent beside a server: it keeps a folder at the head, and lets the server read from it.

For servers that know nothing of chains, and for what they read from folders anyway: adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Protocol

from typing_extensions import override

from deltachain.closeable import Closeable
from deltachain.errors import DeltaChainError
from deltachain.store import Store
from deltachain.subscribe import ApplyReceipt, SubscribeConfig, Subscriber
from deltachain.subscribe.targets.folder_owner import OwnFolder, write_assets
from deltachain.types import Version


class Reader(Protocol):
    """A server that serves what lies in a folder."""

    def bring(self, folder: Path, version: Version) -> None:
        """Let it serve the version that lies in a folder; nothing where it does already.

        Raises:
            ControlPlaneError: It does not; again is allowed.
        """

    def close(self) -> None:
        """Give the connection back; what is served stays."""


class Agent(Closeable):
    """Follows a chain on behalf of a server.

    A version is fetched, decoded and proven in a folder while the server goes on with what it has.

    Args:
        config: Where the chain lies; or the URL alone.
        folder: Filled with the newest version, and by nothing else.
        server: Reads it.
        store: The store, if it is not to be opened from the URL.
    """

    def __init__(
        self,
        config: SubscribeConfig | str,
        folder: Path,
        server: Reader,
        *,
        store: Store | None = None,
    ) -> None:
        self.subscriber = Subscriber(config, OwnFolder(folder), store=store)
        self._folder, self._server = folder, server

    def update(self, version: Version | None = None) -> ApplyReceipt | None:
        """Bring folder and server to a version, or the head.

        Returns:
            ``None`` where the folder held it already.

        Raises:
            ControlPlaneError: The server did not take it.
            DeltaChainError: As :meth:`Subscriber.update`.
        """
        receipt = self.subscriber.update(version)
        self._bring()
        return receipt

    def follow(self, stop: Event | None = None) -> Iterator[ApplyReceipt]:
        """Keep both at the head until ``stop`` is set; see :meth:`Subscriber.follow`.

        A server that is down is waited for; one that was started again is told anew.
        """
        yield from self.subscriber.follow(stop=stop, looked=self._looked)

    @override
    def close(self) -> None:
        """Give everything back. Closing twice is allowed."""
        self._server.close()
        self.subscriber.close()

    def _looked(self, trouble: DeltaChainError | None) -> None:
        if trouble is None:
            self._bring()

    def _bring(self) -> None:
        version = self.subscriber.version
        if version is not None:
            trusted = self.subscriber.config.trust_remote_code
            write_assets(self.subscriber.chain, self._folder, trusted=trusted)
            self._server.bring(self._folder, version)
