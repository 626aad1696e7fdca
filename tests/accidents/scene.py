"""A store with a chain in it, those who live with it, and what a person can do about both."""

import copy
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event, Semaphore, Thread
from typing import Any, Final, Self

from torch import nn

from deltachain.chain.chain import Chain
from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.errors import DeltaChainError
from deltachain.format import keys
from deltachain.format.keys import object_digest
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, ObjectInfo, Store, open_store
from deltachain.store.hf.store import HfStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import Buffer, Version
from tests.accidents.oracle import Leaf, Shelf, View, wrong_bits
from tests.support import models
from tests.support.faults import FaultyStore
from tests.unit.cli.support import Done, invoke

Objects = dict[str, bytes]


class Journal:
    """Every write that was done to a chain, and how far they had come at each version."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, bytes]] = []
        self.marks: dict[Version, int] = {}

    def copy(self) -> "Journal":
        other = Journal()
        other.writes, other.marks = list(self.writes), dict(self.marks)
        return other

    def mark(self, version: Version) -> None:
        """So far at this version; nothing where that was marked already."""
        self.marks.setdefault(version, len(self.writes))

    def at(self, version: Version) -> Objects:
        """What was in the store when this was the newest version, or the one before it."""
        known = max((mark for mark in self.marks if mark <= version), default=-1)
        return dict(self.writes[: self.marks.get(known, 0)])

    @property
    def now(self) -> Objects:
        return dict(self.writes)


class Kept(FaultyStore):
    """Another store, whose writes go into a journal; some are lost behind a yes."""

    def __init__(self, inner: Store, journal: Journal) -> None:
        super().__init__(inner)
        self.journal = journal
        self.loses: tuple[str, ...] = ()
        self.lost: list[str] = []
        self.interrupted: tuple[str, Callable[[], None]] | None = None

    def put(self, key: str, data: Buffer) -> str:
        if self._loses(key):
            return ""
        named = self.inner.put(key, data)
        self.journal.writes.append((key, bytes(data)))
        return named

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if not self._loses(key):
            self.inner.put_if_absent(key, data)
            self.journal.writes.append((key, bytes(data)))

    def close(self) -> None:
        self.inner.close()

    def _loses(self, key: str) -> bool:
        if self.interrupted is not None and key.startswith(self.interrupted[0]):
            (_, happens), self.interrupted = self.interrupted, None
            happens()
        lost = any(key.startswith(prefix) for prefix in self.loses)
        if lost:
            self.lost.append(key)
        return lost


_AT_ONCE: Final = 1000

_THREADS: Final = 8


def put_all(store: Store, objects: Mapping[str, bytes]) -> None:
    if isinstance(store, HfStore):
        for some in _cut(list(objects)):
            _put_at_once(store, {key: objects[key] for key in some})
    elif _is_far(store):
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda item: store.put(*item), objects.items()))
    else:
        for key, data in objects.items():
            store.put(key, data)


def delete_all(store: Store, keys: Iterable[str]) -> None:
    if isinstance(store, HfStore):
        for some in _cut(list(keys)):
            _batch(store, [{"type": "deleteFile", "path": store._path(key)} for key in some])
    else:
        with ThreadPoolExecutor(_THREADS if _is_far(store) else 1) as pool:
            list(pool.map(store.delete, keys))


def _is_far(store: Store) -> bool:
    return store.url.startswith("s3://")


def _cut(keys: list[str]) -> Iterator[list[str]]:
    return (keys[first : first + _AT_ONCE] for first in range(0, len(keys), _AT_ONCE))


def _put_at_once(store: HfStore, objects: Mapping[str, bytes]) -> None:
    xet = store._xet
    with xet._session().new_upload_commit(**xet._access("write").arguments()) as commit:
        skip = xet._lib.SKIP_SHA256
        handles = [commit.start_upload_bytes(data, sha256=skip) for data in objects.values()]
    now = int(time.time() * 1000)
    contents = [str(handle.result().xet_info.hash) for handle in handles]
    _batch(
        store,
        [
            {"type": "addFile", "path": store._path(key), "xetHash": content, "mtime": now}
            for key, content in zip(objects, contents, strict=True)
        ],
    )


def _batch(store: HfStore, operations: Sequence[Mapping[str, Any]]) -> None:
    body = b"".join(json.dumps(operation).encode() + b"\n" for operation in operations)
    reply = store._hub.call("POST", "batch", dict, body=body, media="application/x-ndjson")
    assert not reply.document().get("failed"), reply.words


TURN_S: Final = 120.0
"""Longest time that one look may take before the test fails."""

LOOKS: Final = 40
"""Looks within which a follower must have found out what is wrong."""

EVERY: Final = 8
"""An anchor comes every few versions: some are older than what an accident takes, some not."""


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Turns(Event):
    """Stands for what a following loop waits on: each wait ends when the test gives a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.done = Semaphore(0), Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        self.done.release()
        self.go.acquire()
        return False


class Follower:
    """One process that follows a chain; it looks when the test lets it."""

    def __init__(self, who: str, replica: models.Replica, store: Store) -> None:
        self.who, self.replica = who, replica
        config = SubscribeConfig(url=store.url, poll_s=0.001)
        self.subscriber = Subscriber(config, replica.target, store=store)
        self.turns = self.subscriber.told = Turns()
        self.ended: BaseException | None = None
        self._now = ""
        self._stop, self._over = Event(), Event()
        self._thread = Thread(target=self._run, name=who, daemon=True)
        self._thread.start()

    def look(self, times: int = 1) -> Self:
        for _ in range(times):
            if self._over.is_set():  # the thread is alive for a moment longer
                break
            self.turns.go.release()
            assert self.turns.done.acquire(timeout=TURN_S), f"{self.who} hangs"
        return self

    @property
    def says(self) -> str:
        return words(self.ended) if self.ended is not None else self._now

    def view(self) -> View:
        lag = None
        with suppress(DeltaChainError):
            lag = self.subscriber.status().lag_versions
        held = self.subscriber.held
        return View(who=self.who, held=held, bits=self.bits(), says=self.says, lag=lag)

    def bits(self) -> models.State | None:
        target = self.replica.target
        empty = isinstance(target, Path) and not (target / WEIGHTS_FILE).exists()
        return None if empty else self.replica.bits()

    def close(self) -> None:
        self._stop.set()
        for _ in range(8):
            self.turns.go.release()
        self._thread.join(TURN_S)
        assert not self._thread.is_alive(), f"{self.who} hangs"
        self.subscriber.close()

    def _run(self) -> None:
        self.turns.go.acquire()
        try:
            for _ in self.subscriber.follow(stop=self._stop, looked=self._looked):
                pass
        except DeltaChainError as exc:
            self.ended = exc
        finally:
            self._over.set()
            self.turns.done.release()

    def _looked(self, exc: DeltaChainError | None) -> None:
        self._now = words(exc) if exc else ""


class Trainer:
    """One process that trains a model and publishes it."""

    def __init__(self, model: nn.Module, store: Kept, note: Callable[[models.State], None]) -> None:
        self.model, self.store, self._note = model, store, note
        self.says = ""
        self.known: dict[Version, str] = {}
        self.step = 0
        config = PublishConfig(url=store.url, on_error="warn", anchor_every=EVERY)
        self.publisher = Publisher(config, store=store)

    def attach(self) -> Self:
        self._note(models.bits_of(self.model))
        try:
            self.publisher.attach(self.model)
        except DeltaChainError as exc:
            self.says = words(exc)
            raise
        self._remember()
        return self

    def publish(self) -> None:
        if self.publisher.epoch < 0:
            return
        self.step += 1
        models.train_(self.model, self.step, share=0.02)
        self._note(models.bits_of(self.model))
        try:
            future = self.publisher.publish(step=self.step)
            self.publisher.flush()
            error = future.exception(0) if future.done() else self.publisher._failure
        except DeltaChainError as exc:
            error = exc
        self.says = words(error) if error else ""
        if error is None:
            self._remember()

    def close(self) -> None:
        self.says = ""
        with suppress(DeltaChainError):
            self.publisher.close()

    def _remember(self) -> None:
        session = self.publisher._session
        assert session is not None
        parent = session.writer.parent
        if parent is not None:
            self.known[parent.version] = parent.digest


@dataclass(frozen=True, slots=True)
class Recording:
    """A chain as its trainer left it."""

    journal: Journal
    history: dict[str, models.State]
    model: nn.Module
    head: Version


@cache
def recording(versions: int) -> Recording:
    history: dict[str, models.State] = {}
    journal, store, model = Journal(), MemoryStore(), models.plain_model()
    trainer = Trainer(model, Kept(store, journal), lambda _: None).attach()
    chain = Chain.open(store)
    while trainer.publisher.version < versions:
        history[str(models.state_digest(chain, models.bits_of(model)))] = models.bits_of(model)
        journal.mark(trainer.publisher.version)
        trainer.publish()
        assert not trainer.says
    history[str(models.state_digest(chain, models.bits_of(model)))] = models.bits_of(model)
    journal.mark(versions)
    return Recording(journal, history, copy.deepcopy(model), versions)


@dataclass
class Scene:
    url: str
    folder: Path
    versions: int = 12
    followers: dict[str, Follower] = field(default_factory=dict)
    trainers: list[Trainer] = field(default_factory=list)
    backup: Objects = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        made = recording(self.versions)
        self.journal, self.history = made.journal.copy(), dict(made.history)
        self.model = copy.deepcopy(made.model)
        self._replicas: dict[str, models.Replica] = {}
        self._contents: dict[str, bytes] = {}
        self.put(self.journal.now)
        self.chain = Chain.open(self.store())

    def store(self) -> Store:
        return open_store(self.url)

    # The trainer

    @property
    def trainer(self) -> Trainer:
        return self.trainers[-1]

    def train(self, model: nn.Module | None = None) -> Trainer:
        self.model = model or self.model
        kept = Kept(open_store(self.url, writer=True), self.journal)
        trainer = Trainer(self.model, kept, self._note)
        trainer.step = 10_000 * (len(self.trainers) + 1)
        self.trainers.append(trainer)
        trainer.attach()
        self.journal.mark(trainer.publisher.version)
        return trainer

    def publish(self, times: int = 1) -> None:
        for _ in range(times):
            self.trainer.publish()
            self.journal.mark(self.trainer.publisher.version)

    def _note(self, bits: models.State) -> None:
        self.history[str(models.state_digest(self.chain, bits))] = bits

    @property
    def head(self) -> Version:
        return self.trainer.publisher.version

    def known(self, trainer: Trainer) -> dict[Version, str]:
        made = recording(self.versions).journal.now.items()
        found = {keys.version_of(key) or 0: data for key, data in made if "manifests/" in key}
        digests = {version: object_digest(data) for version, data in found.items()}
        return digests | trainer.known

    # The followers

    def replica(self, name: str, kind: str) -> models.Replica:
        if name not in self._replicas:
            self._replicas[name] = models.replica_of(self.model, kind, self.folder / name)
        return self._replicas[name]

    def follow(self, name: str, kind: str) -> Follower:
        self.followers[name] = Follower(name, self.replica(name, kind), self.store())
        return self.followers[name]

    def hold(self, name: str, kind: str, version: Version) -> None:
        config = SubscribeConfig(url=self.url)
        target = self.replica(name, kind).target
        with Subscriber(config, target, store=self.store()) as subscriber:
            subscriber.update(version)
            assert subscriber.version == version

    def restart(self, name: str) -> Follower:
        kind = self._replicas[name].kind
        self.followers.pop(name).close()
        return self.follow(name, kind)

    def start_anew(self, name: str) -> Follower:
        if name in self.followers:
            self.followers.pop(name).close()
        old = self._replicas.pop(name)
        kind = "folder" if isinstance(old.target, Path) else old.kind
        count = len(list(self.folder.iterdir()))
        self._replicas[name] = models.replica_of(self.model, kind, self.folder / f"{name}-{count}")
        return self.follow(name, kind)

    def look(self, times: int = LOOKS) -> None:
        for follower in self.followers.values():
            follower.look(times)

    def views(self) -> list[View]:
        return [follower.view() for follower in self.followers.values()]

    # The store

    def move(self) -> None:
        self.url += "-anew"

    def put(self, objects: Objects) -> None:
        with closing(self.store()) as store:
            put_all(store, {key: objects[key] for key in sorted(objects, key=_late)})

    def delete(self, gone: Iterable[str]) -> None:
        with closing(self.store()) as store:
            delete_all(store, gone)

    def find(self, pattern: str = "") -> list[str]:
        with closing(self.store()) as store:
            found = [info.key for info in store.list()]
        return [key for key in found if re.match(pattern, key)]

    def contents(self) -> Objects:
        with closing(self.store()) as store:
            return {info.key: self._read(store, info) for info in store.list()}

    def restore(self, objects: Objects) -> None:
        now = self.contents()
        self.delete(sorted(now.keys() - objects.keys(), reverse=True))
        self.put({key: data for key, data in objects.items() if now.get(key) != data})

    # What is seen from outside

    def shelf(self) -> Shelf:
        with closing(self.store()) as store:
            identity = store.get(keys.CHAIN_KEY) if store.find(keys.CHAIN_KEY) else b"{}"
            hint = store.get(keys.HEAD_KEY) if store.find(keys.HEAD_KEY) else b"{}"
            leaves = {}
            for info in store.list("manifests/"):
                data = self._read(store, info)
                payload = _parsed(data).get("payload")
                if payload is None:
                    continue
                leaves[int(info.key[10:30])] = Leaf(
                    digest=object_digest(data),
                    parent=payload["parent"],
                    chain=payload["chain"],
                    state=payload["state"],
                )
        reaches, refusals = zip(*(self.join(kind) for kind in ("dict", "folder")), strict=True)
        known = [reach for reach in reaches if reach is not None]
        return Shelf(
            chain=_parsed(identity).get("chain", ""),
            leaves=leaves,
            reach=min(known) if len(known) == len(reaches) else None,
            refusal="; ".join(filter(None, refusals)),
            hinted=_parsed(hint).get("version", -1),
        )

    def _read(self, store: Store, info: ObjectInfo) -> bytes:
        if not info.pin:
            return store.get(info.key)
        if info.pin not in self._contents:
            data = store.read(info.key, nbytes=info.nbytes, pin=info.pin)
            self._contents[info.pin] = bytes(data)
        return self._contents[info.pin]

    def join(self, kind: str) -> tuple[Version | None, str]:
        count = len(list(self.folder.iterdir()))
        replica = models.replica_of(self.model, kind, self.folder / f"newcomer-{count}")
        config = SubscribeConfig(url=self.url)
        with Subscriber(config, replica.target, store=self.store()) as subscriber:
            try:
                subscriber.update()
            except DeltaChainError as exc:
                return None, words(exc)
            held = subscriber.held
            view = View(who=f"a new {kind}", held=held, bits=replica.bits(), says="")
        wrong = [*wrong_bits(view, self.history)]
        assert not wrong, wrong
        return held.version if held else None, ""

    def verify(self, *options: object) -> Done:
        return invoke("verify", self.url, *options)

    def close(self) -> None:
        self.stack.close()
        for follower in self.followers.values():
            follower.close()
        for trainer in self.trainers:
            trainer.close()
        with suppress(DeltaChainError):
            self.chain.store.close()


def _late(key: str) -> tuple[bool, bool, str]:
    return key == keys.HEAD_KEY, key.startswith("manifests/"), key


def _parsed(data: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found: dict[str, Any] = json.loads(data)
        return found
    return {}
