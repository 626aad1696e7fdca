"""A person who reads what is printed, and does what the hints say: nothing else, and no more."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from deltachain.errors import DeltaChainError
from deltachain.format import keys
from tests.accidents.scene import Scene

ROUNDS: Final = 6


_AGAIN: Final = (
    r"restart (this|the) (publisher|trainer)|start the publisher again|restarted trainer"
    r"|start again|publish an anchor"
)
_REMOVE: Final = r"remove (manifests/[0-9]{20}\.json)"
_DAMAGED: Final = r"or remove it and start the publisher again"
KEY: Final = re.compile(r"((?:manifests|edges|deltas|anchors)/[\w./-]+|(?:chain|table)\.json)")
_ANEW: Final = r"(join|joins|start) [^;]*from nothing|empty folder"


@dataclass(frozen=True, slots=True)
class Deed:
    """Something that a hint may ask for."""

    name: str
    asks: re.Pattern[str]
    do: Callable[[Scene, str, str], None]
    needs_backup: bool = False
    is_each: bool = False


def put_back(scene: Scene, who: str, hint: str) -> None:
    del who, hint
    there, backup = scene.contents(), scene.backup
    scene.put({key: data for key, data in backup.items() if there.get(key) != data})


def remove(scene: Scene, who: str, hint: str) -> None:
    del who
    found = re.search(_REMOVE, hint)
    assert found
    first = keys.version_of(found[1])
    gone = [] if first is None else [v for v in scene.shelf().leaves if v >= first]
    scene.delete({found[1], *map(keys.manifest_key, gone)})


def remove_damaged(scene: Scene, who: str, said: str) -> None:
    del who
    found = KEY.search(said)
    assert found, said
    scene.delete([found[1]])
    restart_trainer(scene, "", "")


def remove_identity(scene: Scene, who: str, said: str) -> None:
    del who, said
    scene.delete([keys.CHAIN_KEY, keys.TABLE_KEY])
    restart_trainer(scene, "", "")


def restart_trainer(scene: Scene, who: str, hint: str) -> None:
    del who, hint
    scene.trainer.close()
    with suppress(DeltaChainError):  # what it says is read in the next round
        scene.train()
        scene.publish(2)


def roll_back(scene: Scene, who: str, hint: str) -> None:
    del hint
    follower = scene.followers[who]
    held = follower.subscriber.held
    there = [v for v in scene.shelf().leaves if held is None or v < held.version]
    with suppress(DeltaChainError):
        follower.subscriber.rollback(max(there))
        follower.subscriber.release()
    if follower.ended:  # it goes on in a process of its own
        scene.restart(who)


def move_on(scene: Scene, who: str, hint: str) -> None:
    del who, hint
    scene.trainer.close()
    scene.move()
    scene.train()
    scene.publish(2)
    for name in list(scene.followers):
        scene.start_anew(name)


def start_anew(scene: Scene, who: str, hint: str) -> None:
    del hint
    scene.start_anew(who)


PUT_BACK: Final = Deed(
    "put back", re.compile(r"\bput\b[^;:]*\bback\b|\brestore\b"), put_back, needs_backup=True
)

DEEDS: Final = (
    PUT_BACK,
    Deed("remove what lies behind the gap", re.compile(_REMOVE), remove),
    Deed("remove the identity", re.compile(r"or remove both and restart"), remove_identity),
    Deed("remove what is damaged", re.compile(_DAMAGED), remove_damaged),
    Deed("restart the publisher", re.compile(_AGAIN), restart_trainer),
    Deed("roll back", re.compile(r"roll (replicas|it|this replica) back"), roll_back, is_each=True),
    Deed("join from nothing", re.compile(_ANEW), start_anew, is_each=True),
    Deed("a new chain at another URL", re.compile(r"URL of its own"), move_on),
)
"""What hints ask for: the store first, then who publishes, then who follows."""


@dataclass
class Person:
    scene: Scene
    has_backup: bool
    done: list[str]
    tried: set[tuple[str, str]] = field(default_factory=set)

    def act(self) -> str:
        for _ in range(ROUNDS):
            complaints = list(self._complaints())
            if not complaints:
                return ""
            if not self._do_one(complaints):
                return "; ".join(f"{who}: {said}" for who, said in complaints)
            self.scene.look()
        return "it goes round in circles: " + ", ".join(self.done)

    def _do_one(self, complaints: list[tuple[str, str]]) -> bool:
        """Do the first thing that any hint asks for and that was not done in vain."""
        for deed in DEEDS:
            asked = [it for it in self._asked(deed, complaints) if (it[0], it[2]) not in self.tried]
            for name, who, said in asked if deed.is_each else asked[:1]:
                deed.do(self.scene, who, said)
                self.done.append(name)
                self.tried.add((name, said))
            if asked:
                return True
        return False

    def _asked(
        self, deed: Deed, complaints: list[tuple[str, str]]
    ) -> Iterator[tuple[str, str, str]]:
        if deed.needs_backup and not self.has_backup:
            return
        for who, said in complaints:
            hint = said.partition("hint:")[2]
            if deed.asks.search(hint) and (not deed.is_each or who in self.scene.followers):
                yield f"{deed.name} ({who})" if deed.is_each else deed.name, who, said

    def _complaints(self) -> Iterator[tuple[str, str]]:
        trainer = self.scene.trainer
        if trainer.says:
            yield "publisher", trainer.says
        for follower in self.scene.followers.values():
            if follower.says:
                yield follower.who, follower.says
        for kind in ("dict", "folder"):
            if refusal := self.scene.join(kind)[1]:
                yield f"a new {kind}", refusal
