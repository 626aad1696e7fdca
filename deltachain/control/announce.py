"""Announcements of new versions to all replicas of a policy."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from typing_extensions import override

from deltachain.errors import ChainError, ConfigError, ControlPlaneError
from deltachain.retry import Backoff
from deltachain.threads import Closeable, started
from deltachain.types import Version

from .replica_client import ReplicaClient

logger = logging.getLogger(__name__)

Wait: TypeAlias = Literal["all", "quorum", "any", "none"]

DEADLINE_S: Final = 60.0
PAUSES: Final = Backoff(0.2, 5.0, random_share=0.5)
"""Back-off before a failed announcement is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """Result of an announcement.

    Attributes:
        version: The announced version.
        held: The version held, by address of the replica; ``None`` if unknown, or if it belongs to
            another history.
        trouble: The last error of each replica that does not hold the version yet, by address.
        waited_s: Seconds that the call blocked.
        enough: Whether as many replicas as requested hold the version.
    """

    version: Version
    held: Mapping[str, Version | None]
    trouble: Mapping[str, str]
    waited_s: float
    enough: bool

    @property
    def stragglers(self) -> tuple[str, ...]:
        """Replicas that do not hold the version yet; the announcement to them is repeated."""
        return tuple(url for url, held in self.held.items() if held is None or held < self.version)

    def __str__(self) -> str:
        there = len(self.held) - len(self.stragglers)
        late = f", behind: {', '.join(self.stragglers)}" if self.stragglers else ""
        return f"version {self.version} on {there} of {len(self.held)}, {self.waited_s:.2f} s{late}"


class _Wanted(NamedTuple):
    version: Version
    manifest: str


class Fleet(Closeable):
    """Announces new versions to all replicas in parallel and tracks which version each holds.

    Each replica has a thread of its own, so that a hanging one does not delay others. A failed
    announcement is repeated with back-off, for the newest version, until the replica holds it.

    Args:
        engines: Addresses of vLLM or SGLang servers that follow the chain, or clients of them.
        token: The ``DELTACHAIN_TOKEN`` of the servers, or a file of tokens; see
            :class:`ReplicaClient`. Empty for none.
        key: The engines' own API key, or a file in the same way; empty for none.

    Attributes:
        clients: One for each replica, by its address.

    Raises:
        ConfigError: An address occurs twice or is invalid, or a file of tokens is.

    Examples:
        >>> with deltachain.Fleet(["http://127.0.0.1:8000", "http://127.0.0.1:30000"]) as fleet:
        ...     announced = fleet.announce(version=1, wait="quorum", deadline=0.1)
        >>> announced.enough    # no server answers at these addresses
        False
    """

    def __init__(
        self,
        engines: Sequence[str | ReplicaClient],
        *,
        token: str | Path = "",
        key: str | Path = "",
    ) -> None:
        clients = [
            ReplicaClient(engine, token=token, key=key) if isinstance(engine, str) else engine
            for engine in engines
        ]
        self.clients: Mapping[str, ReplicaClient] = {client.url: client for client in clients}
        if len(self.clients) < len(clients):
            raise ConfigError("the fleet has an engine twice")
        self._changed = Condition()
        self._wanted: _Wanted | None = None
        self._held: dict[str, Version | None] = dict.fromkeys(self.clients)
        self._untold: set[str] = set()
        self._trouble: dict[str, str] = {}
        self._closed = False
        self._served: set[str] = set()
        self._serve()

    def announce(
        self,
        version: Version,
        *,
        manifest: str = "",
        wait: Wait = "all",
        deadline: float = DEADLINE_S,
    ) -> Announced:
        """Announce a version to all replicas and wait until enough of them hold it.

        Args:
            version: A committed version.
            manifest: Digest of its manifest, as in a receipt. A replica with another manifest of
                this number does not count. If empty, replicas compare their version with the store.
            wait: Number of replicas to wait for: all, more than half, any one, or none.
            deadline: Seconds after which the call returns in any case.

        Raises:
            ConfigError: ``wait`` has another value.
        """
        if wait not in get_args(Wait):
            raise ConfigError(f"wait={wait!r}: expected one of {get_args(Wait)}")
        self._serve()
        start, count = time.monotonic(), len(self.clients)
        wanted = {"all": count, "quorum": count // 2 + 1, "any": 1, "none": 0}[wait]
        wanted = min(wanted, count)

        def enough() -> bool:
            told = [held for url, held in self._held.items() if url not in self._untold]
            return sum(held is not None and held >= version for held in told) >= wanted

        with self._changed:
            if self._wanted is None or version >= self._wanted.version:
                self._wanted = _Wanted(version, manifest)
            self._untold = set(self.clients)  # a replica that held it may have restarted since
            self._changed.notify_all()
            done = self._changed.wait_for(enough, deadline)
            held = dict(self._held)
            trouble = {url: told for url, told in self._trouble.items() if told}
        return Announced(
            version=version,
            held=held,
            trouble=trouble,
            waited_s=time.monotonic() - start,
            enough=done,
        )

    @override
    def close(self) -> None:
        """End all announcements; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for url in self.clients.keys() - self._served:
                self.clients[url].close()

    def _serve(self) -> None:
        with self._changed:
            for url in self.clients.keys() - self._served:
                thread = Thread(target=self._run, args=(url,), name=f"deltachain-{url}")
                thread.daemon = True
                if started(thread):
                    self._served.add(url)
                    self._trouble.pop(url, None)
                else:
                    self._trouble[url] = "not announced: this process cannot start another thread"

    def _run(self, url: str) -> None:
        failures, pause_s = 0, 0.0
        with self.clients[url] as client:
            while (wanted := self._next(url, pause_s)) is not None:
                held, trouble = _update(client, wanted)
                behind = held is None or held < wanted.version
                if behind and not trouble:
                    trouble = f"it stays at version {held}"  # pinned by a rollback
                pause_s = PAUSES.pause_s(failures) if behind else 0.0
                failures = failures + 1 if behind else 0
                if behind and trouble != self._trouble.get(url):
                    logger.warning("%s lacks version %d: %s", url, wanted.version, trouble)
                with self._changed:
                    if not behind:
                        self._untold.discard(url)
                    self._held[url] = held
                    self._trouble[url] = trouble
                    self._changed.notify_all()

    def _next(self, url: str, pause_s: float) -> _Wanted | None:
        """Wait for the next version to announce to a replica; ``None`` once the fleet closes."""

        def behind() -> bool:
            held = self._held[url]
            wanted = self._wanted
            late = wanted is not None and (held is None or held < wanted.version)
            return late or url in self._untold

        with self._changed:
            self._changed.wait_for(lambda: self._closed, pause_s)
            self._changed.wait_for(lambda: self._closed or behind())
            return None if self._closed else self._wanted


def tell(servers: Sequence[str], version: Version, *, deadline: float) -> None:
    """Announce a version to servers, each ``HOST:PORT``, with the token in ``DELTACHAIN_TOKEN``.

    Raises:
        ConfigError: A server occurs twice.
        ControlPlaneError: A server does not hold the version before the deadline, in seconds.
    """
    token = os.environ.get("DELTACHAIN_TOKEN", "")
    with Fleet([f"http://{server}" for server in servers], token=token) as fleet:
        announced = fleet.announce(version, deadline=deadline)
    if not announced.enough:
        raise ControlPlaneError(f"{announced}: {dict(announced.trouble)}")


def _update(client: ReplicaClient, wanted: _Wanted) -> tuple[Version | None, str]:
    """Announce to a replica; return the version of this history that it holds, and the error."""
    try:
        found = client.update(wanted.version, manifest=wanted.manifest)
        trouble, is_proven = "", True
    except ControlPlaneError as exc:
        trouble, is_proven = str(exc), exc.refusal == ChainError.__name__
        try:
            found = client.status()
        except ControlPlaneError:
            return None, trouble
    if found.version == wanted.version and found.manifest != wanted.manifest != "":
        return None, trouble or f"it holds another version {found.version}: {found.manifest}"
    is_this_one = found.version == wanted.version and wanted.manifest
    if is_this_one or found.version is None or found.version < wanted.version:
        return found.version, trouble
    # it is ahead, or no manifest was given: then its own check against the store must have passed
    return (found.version if is_proven and not found.doubt else None), trouble
