"""Roster of a fleet: who belongs to it, and what each answers, all asked at once."""

import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final, TypeAlias, TypeVar

from typing_extensions import override

from deltachain.errors import ConfigError, ControlPlaneError, DeltaChainError
from deltachain.presence.record import Presence, PresenceBoard, PresenceFound
from deltachain.redact import redacted_path, redacted_url
from deltachain.status import Status
from deltachain.store.registry import schemes
from deltachain.threads import Closeable, started

from .replica_client import ReplicaClient

DNS: Final = "dns://"
"""Scheme of a name that stands for all replicas at its addresses: ``dns://policy.default:8000``."""

_CLOUDS: Final = ("gs", "az", "abfs", "abfss")  # schemes of stores that fsspec opens
_HINT: Final = (
    "one address a line: http://HOST:PORT, dns://NAME:PORT, or the URL where replicas write their "
    "presence; # begins a comment"
)


def parse_inventory(text: str) -> tuple[str, ...]:
    """Parse a list of addresses with commas, or the path of a file with one a line."""
    if "://" in text:
        entries = tuple(part.strip() for part in text.split(",") if part.strip())
        return _checked(entries, "the list of engines")
    return read_inventory(Path(text))


def read_inventory(file: Path) -> tuple[str, ...]:
    """Read a file with one address a line; empty lines and comments after ``#`` are left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "it is no text"
        raise ConfigError(f"{redacted_path(file)}: {why}", hint=_HINT) from exc
    entries = (line.partition("#")[0].strip() for line in lines)
    return _checked(tuple(entry for entry in entries if entry), str(file))


def _checked(entries: tuple[str, ...], where: str) -> tuple[str, ...]:
    if not entries:
        raise ConfigError(f"{where} names no engine", hint=_HINT)
    for number, entry in enumerate(entries, 1):  # not shown: it may be a line of a file of keys
        if "://" not in entry or " " in entry:
            raise ConfigError(f"{where}: entry {number} is no address", hint=_HINT)
    return entries


def split_entries(entries: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split entries into addresses and DNS names, each of them once, in the given order."""
    unique = dict.fromkeys(entry.rstrip("/") for entry in entries)
    names = [entry for entry in unique if entry.startswith(DNS)]
    return [entry for entry in unique if entry not in names], names


def split_boards(entries: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split entries into those of replicas, and URLs of stores where replicas write their presence.

    An entry is the latter if its scheme is that of a store.
    """
    every = list(entries)
    boards = [entry for entry in every if _is_board(entry)]
    return [entry for entry in every if entry not in boards], boards


def _is_board(entry: str) -> bool:
    scheme = entry.partition("://")[0].lower()
    if "://" not in entry or scheme in ("http", "https", "dns"):
        return False
    return scheme in {*schemes(), *_CLOUDS}


def parse_name(entry: str) -> tuple[str, int]:
    name, _, port = entry.removeprefix(DNS).rpartition(":")
    is_port = port.isascii() and port.isdecimal() and int(port) < 1 << 16
    if not name or "@" in name or not is_port:
        what = "has a user" if "@" in name else "has no port"
        raise ConfigError(f"{redacted_url(entry)!r} {what}", hint="write dns://NAME:PORT")
    return name.strip("[]"), int(port)


def resolve(entry: str) -> Sequence[str]:
    """Look up the addresses behind ``dns://NAME:PORT``, in ascending order."""
    name, port = parse_name(entry)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise ControlPlaneError(
            f"{redacted_url(entry)} cannot be resolved: {getattr(exc, 'strerror', None) or exc}",
            hint="see whether the name has addresses from here",
        ) from exc
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host in hosts]


STATUS_S: Final = 5.0  # seconds for which the answer to a question for the status is waited for
LATE: Final = "it may hang, or be busy: its log may say more"
"""Hint for a replica that takes too long."""

ReplicaAnswer: TypeAlias = Status | PresenceFound | DeltaChainError
"""What a replica answered or wrote of itself, or why there is nothing."""

_T = TypeVar("_T")


class Roster(Closeable):
    """The replicas of a fleet, each asked in a thread of its own, so that none delays the others.

    An entry ``dns://NAME:PORT`` is looked up in each round. The URL of a store is a board, where
    the presence of replicas is read instead; ``boards`` are further ones, of any scheme. A round
    ends after ``timeout_s``: who has not answered by then has failed.
    """

    def __init__(
        self,
        entries: Iterable[str],
        *,
        boards: Iterable[str] = (),
        token: str | Path = "",
        key: str | Path = "",
        timeout_s: float = STATUS_S,
    ) -> None:
        asked, stores = split_boards(entries)
        addresses, self._names = split_entries(asked)
        for name in self._names:
            parse_name(name)
        self._connect = partial(ReplicaClient, token=token, key=key, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        clients = map(self._connect, addresses)
        self._clients = {client.url: client for client in clients}
        self._resolved: dict[str, ReplicaClient] = {}
        self._boards = _boards((*stores, *boards))
        self._busy: set[str] = set()
        self._lock = Lock()

    @property
    def engines(self) -> tuple[str, ...]:
        return (*self._clients, *self._names, *self._boards)

    @property
    def boards(self) -> tuple[str, ...]:
        return tuple(self._boards)

    def ask(
        self, question: Callable[[ReplicaClient], Status]
    ) -> Iterator[tuple[str, ReplicaAnswer]]:
        """Ask every replica a question; yield address and answer, each as soon as it is there.

        The round ends after the timeout, whatever replicas do. A replica that has not answered the
        question of an earlier round is not asked again before it did. Boards are read whatever the
        question is.
        """
        found = dict(self._clients)
        looked_up = self._at_once({name: partial(resolve, name) for name in self._names})
        for name, addresses in looked_up:
            if isinstance(addresses, DeltaChainError):
                yield name, addresses
                continue
            for url in addresses:
                if url not in found:
                    self._resolved[url] = self._resolved.get(url) or self._connect(url)
                    found[url] = self._resolved[url]
        self._forget(found.keys())
        calls: dict[str, Callable[[], Status | Mapping[str, Presence]]] = {}
        calls.update({url: partial(question, one) for url, one in found.items()})
        calls.update({url: board.look for url, board in self._boards.items()})
        for url, answer in self._at_once(calls):
            if isinstance(answer, Mapping):
                yield from answer.items()
            else:
                yield url, answer

    @override
    def close(self) -> None:
        for client in (*self._clients.values(), *self._resolved.values()):
            client.close()
        for url, board in self._boards.items():
            if url not in self._busy:  # else a thread still reads it
                board.close()

    def _forget(self, known: Collection[str]) -> None:
        for url in [url for url in self._resolved if url not in known and url not in self._busy]:
            self._resolved.pop(url).close()

    def _at_once(
        self, calls: Mapping[str, Callable[[], _T]]
    ) -> Iterator[tuple[str, _T | DeltaChainError]]:
        """Make calls in threads; yield results as they come, and errors for those that are late."""
        answers: SimpleQueue[tuple[str, _T | DeltaChainError]] = SimpleQueue()
        until = time.monotonic() + self._timeout_s
        waiting = set(calls)
        for name, call in calls.items():
            self._start(name, call, answers)
        while waiting:
            try:
                name, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            waiting.discard(name)
            yield name, answer
        for name in sorted(waiting):
            late = f"{name} did not answer in {self._timeout_s:g} s"
            yield name, ControlPlaneError(late, hint=LATE)

    def _start(
        self,
        name: str,
        call: Callable[[], _T],
        answers: SimpleQueue[tuple[str, _T | DeltaChainError]],
    ) -> None:
        def run() -> None:
            try:
                answer: _T | DeltaChainError = call()
            except DeltaChainError as exc:
                answer = exc
            except Exception as exc:  # noqa: BLE001 - a row of its own, never silence
                answer = ControlPlaneError(f"{name}: {exc!r}")
            with self._lock:
                self._busy.discard(name)
            answers.put((name, answer))

        with self._lock:
            is_late = name in self._busy
            self._busy.add(name)
        if is_late:
            said = f"{name} has not answered the round before"
            answers.put((name, ControlPlaneError(said, hint=LATE)))
        elif not started(Thread(target=run, name=f"deltachain-{name}", daemon=True)):
            with self._lock:
                self._busy.discard(name)
            said = f"{name}: not asked: no thread can be started"
            answers.put(
                (name, ControlPlaneError(said, hint="let this process have more: ulimit -u"))
            )


def _boards(urls: Iterable[str]) -> dict[str, PresenceBoard]:
    found = [PresenceBoard(url) for url in urls]
    return {board.url: board for board in found}
