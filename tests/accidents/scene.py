"""A store with a chain in it, those who live with it, and what a person can do about both."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError
from deltachain.format import keys
from deltachain.format.keys import object_digest
from deltachain.store import MemoryStore, ObjectInfo, Store, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import Version
from tests.accidents.bulk import delete_all, put_all
from tests.accidents.copies import Journal, Kept, Objects
from tests.accidents.oracle import Leaf, Shelf, View, wrong_bits
from tests.accidents.parties import Follower, Trainer, words
from tests.support.models import (
    Replica,
    State,
    bits_of,
    plain_model,
    replica_of,
    state_digest,
)
from tests.unit.cli.support import Done, invoke

LOOKS: int = 40
"""Looks within which a follower must have found out what is wrong."""

EVERY = 8
"""An anchor comes every few versions: some are older than what an accident takes, some not."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A chain as its trainer left it."""

    journal: Journal
    history: dict[str, State]
    model: nn.Module
    head: Version


@cache
def recording(versions: int) -> Recording:
    history: dict[str, State] = {}
    journal, store, model = Journal(), MemoryStore(), plain_model()
    trainer = Trainer(model, Kept(store, journal), lambda _: None, anchor_every=EVERY).attach()
    chain = Chain.open(store)
    while trainer.publisher.version < versions:
        history[str(state_digest(chain, bits_of(model)))] = bits_of(model)
        journal.mark(trainer.publisher.version)
        trainer.publish()
    history[str(state_digest(chain, bits_of(model)))] = bits_of(model)
    journal.mark(versions)
    assert not trainer.said
    return Recording(journal, history, copy.deepcopy(model), versions)


@dataclass
class Scene:
    url: str
    folder: Path
    versions: int = 12
    followers: dict[str, Follower] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)
    backup: Objects = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        made = recording(self.versions)
        self.journal, self.history = made.journal.copy(), dict(made.history)
        self.model = copy.deepcopy(made.model)
        self._replicas: dict[str, Replica] = {}
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
        trainer = Trainer(self.model, kept, self._note, anchor_every=EVERY)
        trainer.step = 10_000 * (len(self.trainers) + 1)
        self.trainers.append(trainer)
        trainer.attach()
        self.journal.mark(trainer.publisher.version)
        return trainer

    def publish(self, times: int = 1) -> None:
        for _ in range(times):
            self.trainer.publish()
            self.journal.mark(self.trainer.publisher.version)

    def older_model(self, seed: int = 77) -> nn.Module:
        return plain_model(seed)

    def _note(self, bits: State) -> None:
        self.history[str(state_digest(self.chain, bits))] = bits

    @property
    def head(self) -> Version:
        return self.trainer.publisher.version

    def known(self, trainer: Trainer) -> dict[Version, str]:
        made = recording(self.versions).journal.now.items()
        found = {keys.version_of(key) or 0: data for key, data in made if "manifests/" in key}
        digests = {version: object_digest(data) for version, data in found.items()}
        return digests | trainer.known

    # The followers

    def replica(self, name: str, kind: str) -> Replica:
        if name not in self._replicas:
            self._replicas[name] = replica_of(self.model, kind, self.folder / name)
        return self._replicas[name]

    def follow(self, name: str, kind: str, **settings: Any) -> Follower:
        replica = self.replica(name, kind)
        follower = Follower(name, replica, self.store(), **settings)
        self.followers[name] = follower
        return follower

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
        self._replicas[name] = replica_of(self.model, kind, self.folder / f"{name}-{count}")
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
        replica = replica_of(self.model, kind, self.folder / f"newcomer-{count}")
        config = SubscribeConfig(url=self.url)
        with Subscriber(config, replica.target, store=self.store()) as subscriber:
            try:
                subscriber.update()
            except DeltaChainError as exc:
                self.printed.append(words(exc))
                return None, words(exc)
            held = subscriber.held
            view = View(who=f"a new {kind}", held=held, bits=replica.bits(), says="")
        wrong = [*wrong_bits(view, self.history)]
        assert not wrong, wrong
        return held.version if held else None, ""

    def verify(self, *options: object) -> Done:
        done = invoke("verify", self.url, *options)
        if done.code:
            self.printed.append(done.stderr)
        return done

    def said(self) -> list[str]:
        found = [*self.printed]
        for trainer in self.trainers:
            found += trainer.said
        for follower in self.followers.values():
            found += follower.said
        return found

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
