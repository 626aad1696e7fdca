"""Sidecar agent: keeps a folder at the head and makes a stock server load it.

For servers without deltachain, and for adapters, which servers load from folders anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Protocol

from typing_extensions import override

from deltachain.errors import DeltaChainError
from deltachain.store import Store
from deltachain.subscribe import ApplyReceipt, SubscribeConfig, Subscriber
from deltachain.subscribe.targets.base import HeldVersion
from deltachain.subscribe.targets.folder_owner import OwnFolder, write_assets
from deltachain.threads import Closeable
from deltachain.types import Version


class Reader(Protocol):
    """A server that loads weights from a folder."""

    def has(self, folder: Path, version: Version) -> bool:
        """Return whether the server serves the version that it loaded from a folder.

        Raises:
            ControlPlaneError: The server does not answer, or does not generate.
        """

    def load(self, folder: Path, version: Version) -> None:
        """Make the server load the version in a folder, even if it has that version.

        Raises:
            ControlPlaneError: The server failed; the call may be repeated.
        """

    def close(self) -> None:
        """Close the connection; the server keeps its weights."""


class Agent(Closeable):
    """Follows a chain in a folder for a stock server.

    Each version is fetched, decoded and verified in the folder while the server keeps serving.

    Args:
        config: Settings, or the URL alone.
        folder: Folder of the newest version; must not be used by anything else.
        server: The server that loads the folder.
        store: The store; opened from the URL if ``None``.
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
        self._serves: HeldVersion | None = None
        self._loaded: ApplyReceipt | None = None

    def update(self, version: Version | None = None) -> ApplyReceipt | None:
        """Update folder and server to a version or to the head.

        Returns:
            ``None`` if the folder held the version already.

        Raises:
            ControlPlaneError: The server did not load the version.
            DeltaChainError: As :meth:`Subscriber.update`.
        """
        receipt = self.subscriber.update(version)
        self._bring()
        return receipt

    def follow(
        self,
        stop: Event | None = None,
        *,
        looked: Callable[[DeltaChainError | None], None] = lambda _: None,
    ) -> Iterator[ApplyReceipt]:
        """Follow the head until ``stop`` is set; see :meth:`Subscriber.follow`.

        Waits for a server that is down, and reloads one that has restarted.

        Args:
            stop: Ends the loop when set.
            looked: Called after each iteration with the error to be retried, or ``None`` once the
                server holds the version.
        """

        def after(trouble: DeltaChainError | None) -> None:
            if trouble is None:
                self._bring()
            looked(trouble)

        yield from self.subscriber.follow(stop=stop, looked=after)

    @override
    def close(self) -> None:
        """Release store, folder and connection; idempotent."""
        self._server.close()
        self.subscriber.close()

    def why_unready(self) -> str:
        """Return why the server does not serve what the folder holds; empty if it does."""
        held = self.subscriber.held
        if held is None or self._serves == held:
            return ""
        return f"the server has not loaded version {held.version}"

    def _bring(self) -> None:
        """Make the server load what the folder holds, unless it has loaded that already."""
        held, last = self.subscriber.held, self.subscriber.last
        if held is None:
            return
        trusted = self.subscriber.config.trust_remote_code
        write_assets(self.subscriber.chain, self._folder, trusted=trusted)
        # A folder that was damaged and written anew may have been loaded in between.
        is_written = last is not None and last is not self._loaded
        if is_written or not self._server.has(self._folder, held.version):
            self._serves = None
            self._server.load(self._folder, held.version)
        self._serves, self._loaded = held, last
