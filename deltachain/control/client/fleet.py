"""All replicas of a policy, told together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias, get_args

from deltachain.control.client.replica import ReplicaClient
from deltachain.errors import ChainError, ConfigError, ControlPlaneError
from deltachain.replica.status import ReplicaStatus
from deltachain.threads import started
from deltachain.types import Version

Wait: TypeAlias = Literal["all", "quorum", "any", "none"]

DEADLINE_S: Final = 60.0
AGAIN_S: Final = (0.2, 5.0)
"""Seconds before a replica is told again that did not take it: at first, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """How an announcement went.

    Attributes:
        version: What was announced.
        held: The version that every replica is known to hold, by its address; ``None`` for unknown,
            and for one of another history.
        trouble: What went wrong last with those that do not hold it yet.
        waited_s: Seconds that the caller was held.
        enough: Whether as many as were asked for hold it.
    """

    version: Version
    held: Mapping[str, Version | None]
    trouble: Mapping[str, str]
    waited_s: float
    enough: bool

    @property
    def stragglers(self) -> tuple[str, ...]:
        """Replicas that do not hold the version yet; they are told until they do."""
        return tuple(url for url, held in self.held.items() if held is None or held < self.version)

    def __str__(self) -> str:
        """One line for logs."""
        there = len(self.held) - len(self.stragglers)
        late = f", behind: {', '.join(self.stragglers)}" if self.stragglers else ""
        return f"version {self.version} on {there} of {len(self.held)}, {self.waited_s:.2f} s{late}"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What replicas are brought to: a version, and the digest of its manifest if that is known."""

    version: Version
    manifest: str

    def is_another(self, found: ReplicaStatus) -> bool:
        """Whether a replica holds this number of another history."""
        return found.version == self.version and found.manifest != self.manifest != ""


class Fleet:
    """Tells replicas of new versions, all at once, and knows which hold what.

    Each replica has a thread of its own, so that one that hangs holds up no other. A replica that
    did not take a version is told again, of the newest by then, until it does.

    Args:
        engines: Addresses of vLLM or SGLang servers that follow the chain, or clients of them.
        token: Their ``DELTACHAIN_TOKEN``.
        key: The engines' own API key, where they have one.

    Attributes:
        clients: One for each replica, by its address.

    Raises:
        ConfigError: An address is there twice.
    """

    def __init__(
        self, engines: Sequence[str | ReplicaClient], *, token: str = "", key: str = ""
    ) -> None:
        clients = [
            ReplicaClient(engine, token=token, key=key) if isinstance(engine, str) else engine
            for engine in engines
        ]
        self.clients: Mapping[str, ReplicaClient] = {client.url: client for client in clients}
        if len(self.clients) < len(clients):
            raise ConfigError("an engine is in the fleet twice")
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
        """Let every replica go to a version, and wait until enough of them hold it.

        Args:
            version: A committed one.
            manifest: The digest of its manifest, as receipts have it. A replica whose version of
                this number is another does not hold it. Where it is not given, replicas compare
                what they hold with the store.
            wait: For all, for more than half, for one, or for none.
            deadline: Seconds after which the caller goes on in any case.

        Raises:
            ConfigError: ``wait`` is none of these.
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
            self._untold = set(self.clients)  # one that held it may have been started again since
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

    def close(self) -> None:
        """Tell nobody any more. Closing twice is allowed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for url in self.clients.keys() - self._served:
                self.clients[url].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """Start the threads that are not there yet; each ends with the fleet."""
        with self._changed:
            for url in self.clients.keys() - self._served:
                thread = Thread(target=self._run, args=(url,), name=f"deltachain-{url}")
                thread.daemon = True
                if started(thread):
                    self._served.add(url)
                    self._trouble.pop(url, None)
                else:
                    self._trouble[url] = "not told: this process could not start another thread"

    def _run(self, url: str) -> None:
        """Bring one replica to what is wanted, again and again; in a thread of its own."""
        first, most = AGAIN_S
        pause_s = 0.0
        with self.clients[url] as client:
            while (wanted := self._next(url, pause_s)) is not None:
                held, trouble = _update(client, wanted)
                behind = held is None or held < wanted.version
                if behind and not trouble:
                    trouble = f"it stays at version {held}"  # a rollback keeps it
                pause_s = min(max(first, 2 * pause_s), most) if behind else 0.0
                with self._changed:
                    if not behind:
                        self._untold.discard(url)
                    self._held[url] = held
                    self._trouble[url] = trouble
                    self._changed.notify_all()

    def _next(self, url: str, pause_s: float) -> _Wanted | None:
        """What this replica should hold and does not; waits for it; ``None`` at the end."""

        def behind() -> bool:
            held = self._held[url]
            wanted = self._wanted
            late = wanted is not None and (held is None or held < wanted.version)
            return late or url in self._untold

        with self._changed:
            self._changed.wait_for(lambda: self._closed, pause_s)
            self._changed.wait_for(lambda: self._closed or behind())
            return None if self._closed else self._wanted


def _update(client: ReplicaClient, wanted: _Wanted) -> tuple[Version | None, str]:
    """Tell a replica; the version of this history that it holds now, and what went wrong."""
    try:
        found = client.update(wanted.version, manifest=wanted.manifest)
        trouble, is_proven = "", True
    except ControlPlaneError as exc:
        trouble, is_proven = str(exc), exc.refusal == ChainError.__name__
        try:
            found = client.status()
        except ControlPlaneError:
            return None, trouble
    if wanted.is_another(found):
        return None, trouble or f"it holds another version {found.version}: {found.manifest}"
    if found.version is None or found.version < wanted.version:
        return found.version, trouble
    if found.version == wanted.version and wanted.manifest:
        return found.version, trouble
    # it lies ahead, or nobody said what the version is: its own store must have told
    return (found.version if is_proven and not found.doubt else None), trouble
