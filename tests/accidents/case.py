"""One accident from beginning to end: what was seen is judged, and the way out is taken."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from deltachain.errors import DeltaChainError
from deltachain.format import keys
from tests.accidents.happenings import HAPPENINGS
from tests.accidents.oracle import Shelf, alarm, converged, reused, silence, worse, wrong_bits
from tests.accidents.scene import Scene
from tests.support.models import plain_model

ROUNDS: Final = 6


_AGAIN: Final = (
    r"restart (this|the) (publisher|trainer)|start the publisher again|restarted trainer"
    r"|start again|publish an anchor"
)
_REMOVE: Final = r"remove (manifests/[0-9]{20}\.json)"
_DAMAGED: Final = r"or remove it and start the publisher again"
_FROM: Final = re.compile(r"--from (\d+)")
"""What a hint of ``verify`` says of the manifests behind one that is lost."""
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


def put_back(scene: Scene, _who: str, _hint: str) -> None:
    there, backup = scene.contents(), scene.backup
    scene.put({key: data for key, data in backup.items() if there.get(key) != data})


def remove(scene: Scene, _who: str, hint: str) -> None:
    found = re.search(_REMOVE, hint)
    assert found
    first = keys.version_of(found[1])
    gone = [] if first is None else [v for v in scene.shelf().leaves if v >= first]
    scene.delete({found[1], *map(keys.manifest_key, gone)})


def remove_damaged(scene: Scene, _who: str, said: str) -> None:
    found = KEY.search(said)
    assert found, said
    scene.delete([found[1]])
    restart_trainer(scene, "", "")


def remove_identity(scene: Scene, _who: str, _hint: str) -> None:
    scene.delete([keys.CHAIN_KEY, keys.TABLE_KEY])
    restart_trainer(scene, "", "")


def restart_trainer(scene: Scene, _who: str, _hint: str) -> None:
    scene.trainer.close()
    with suppress(DeltaChainError):  # what it says is read in the next round
        scene.train()
        scene.publish(2)


def roll_back(scene: Scene, who: str, _hint: str = "") -> None:
    follower = scene.followers[who]
    held = follower.subscriber.held
    there = [v for v in scene.shelf().leaves if held is None or v < held.version]
    with suppress(DeltaChainError):
        follower.subscriber.rollback(max(there))
        follower.subscriber.release()
    if follower.ended:  # it goes on in a process of its own
        scene.restart(who)


def move_on(scene: Scene, _who: str, _hint: str) -> None:
    scene.trainer.close()
    scene.move()
    scene.train()
    scene.publish(2)
    for name in list(scene.followers):
        scene.start_anew(name)


def start_anew(scene: Scene, who: str, _hint: str) -> None:
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


Fate = Literal["alive", "dead", "restarted", "restarted with other weights"]
FATES: Final[tuple[Fate, ...]] = get_args(Fate)

COMMITS: Final = 20
"""Versions within which a publisher must have found out what is wrong."""

HARMLESS: Final = frozenset(
    {"nothing", "all objects copied over themselves", "emptied and refilled"}
    | {"head.json gone", "head.json is old", "head.json lies forward"}
)

LASTING: Final = frozenset(
    {"first manifest gone", "a manifest in the middle gone", "the manifest before the head gone"}
    | {"a manifest replaced by an older one", "old manifests and edges gone"}
    | {"a manifest in the middle damaged", "the newest edge record damaged"}
    | {"all objects but the newest gone", "edges gone", "an anchor's record lost behind a yes"}
)
"""Accidents after which a document may stay lost where nobody has a copy of it."""


@dataclass
class Case:
    """One accident to one store."""

    url: str
    folder: Path
    accident: str
    fate: Fate
    versions: int = 24
    has_backup: bool = False
    faults: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        scene = Scene(self.url, self.folder, self.versions)
        try:
            self._begin(scene)
            HAPPENINGS[self.accident](scene)
            self._go_on(scene)
            self._take_the_way_out(scene)
        finally:
            scene.close()
        return self.faults

    def _begin(self, scene: Scene) -> None:
        scene.train()
        scene.publish(2)
        scene.hold("late folder", "folder", scene.head - 6)
        scene.hold("sleeping folder", "folder", scene.head)
        scene.follow("dict", "dict")
        scene.follow("folder", "folder")
        scene.look(20)
        scene.backup = scene.contents()
        wrong = [*converged(scene.views(), scene.shelf(), scene.history)]
        assert not wrong, wrong

    def _go_on(self, scene: Scene) -> None:
        before, first = scene.shelf(), scene.trainer
        old_head = scene.head
        if self.fate == "alive":
            scene.publish(COMMITS)
            self._add(reused(scene.known(first), before, scene.shelf()))
        else:
            first.close()
        if self.fate.startswith("restarted"):
            with suppress(DeltaChainError):  # it has said so
                scene.train(plain_model(77) if "other" in self.fate else None)
                scene.publish(max(2, old_head - scene.head))
        scene.follow("late folder", "folder")
        scene.follow("sleeping folder", "folder")
        scene.look()
        after = scene.shelf()
        self._judge(scene, before, after)
        if self.fate != "dead":
            scene.publish(COMMITS)
            scene.look()
            self._judge(scene, after, scene.shelf())

    def _judge(self, scene: Scene, before: Shelf, after: Shelf) -> None:
        self._add(worse(before, after))
        for view in scene.views():
            self._add(wrong_bits(view, scene.history))
            self._add(silence(view, after))
            if self.accident in HARMLESS:
                self._add(alarm(view))

    def _take_the_way_out(self, scene: Scene) -> None:
        left = Person(scene, self.has_backup, self.done).act()
        if left:
            self._add([f"no way out of {left}"])
        else:
            end = converged(scene.views(), scene.shelf(), scene.history)
            self._add(f"at the end: {fault}" for fault in end)
            self._add(self._verify(scene))

    def _verify(self, scene: Scene) -> Iterator[str]:
        """``deltachain verify`` proves everything, once its hints were followed."""
        done = scene.verify()
        if done.code and self.has_backup and PUT_BACK.asks.search(done.stderr):
            PUT_BACK.do(scene, "", done.stderr)
            self.done.append(PUT_BACK.name)
            done = scene.verify()
        for _ in range(ROUNDS):
            damaged = "damaged" in self.accident or "cut short" in self.accident
            stays_lost = self.accident in LASTING and not self._has_copy(scene, done.stderr)
            if done.code and stays_lost and (found := _FROM.search(done.stderr)):
                done = scene.verify("--from", found[1])
            elif done.code and damaged and "or remove it" in done.stderr:
                remove_damaged(scene, "", done.stderr)
                self.done.append("remove what is damaged")
                done = scene.verify()
        if done.code:
            yield f"verify: {done.stderr.strip()}"

    def _has_copy(self, scene: Scene, said: str) -> bool:
        found = KEY.search(said)
        return self.has_backup and (found is None or found[1] in scene.backup)

    def _add(self, faults: Iterable[str]) -> None:
        self.faults += [fault for fault in faults if fault not in self.faults]
