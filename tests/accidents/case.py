"""One accident from beginning to end: what was seen is judged, and the way out is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from deltachain.errors import DeltaChainError
from tests.accidents import oracle
from tests.accidents.happenings import HAPPENINGS
from tests.accidents.oracle import Shelf
from tests.accidents.person import KEY, PUT_BACK, ROUNDS, Person, remove_damaged
from tests.accidents.scene import Scene
from tests.support.models import plain_model

Fate = Literal["alive", "dead", "restarted", "restarted with other weights"]
FATES: Final[tuple[Fate, ...]] = ("alive", "dead", "restarted", "restarted with other weights")

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


_FROM: Final = re.compile(r"--from (\d+)")
"""What a hint of ``verify`` says of the manifests behind one that is lost."""


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
    outcome: dict[str, set[str]] = field(default_factory=dict)
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
        wrong = [*oracle.converged(scene.views(), scene.shelf(), scene.history)]
        assert not wrong, wrong

    def _go_on(self, scene: Scene) -> None:
        before, first = scene.shelf(), scene.trainer
        old_head = scene.head
        if self.fate == "alive":
            scene.publish(COMMITS)
            self._add(oracle.reused(scene.known(first), before, scene.shelf()))
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
        self._add(oracle.worse(before, after))
        for view in scene.views():
            self._add(oracle.wrong_bits(view, scene.history))
            self._add(oracle.silence(view, after))
            if self.accident in HARMLESS:
                self._add(oracle.alarm(view))
            self._note("followers", view.says)
        self._note("publisher", "; ".join(scene.trainer.said))
        self._note("newcomers", after.refusal)

    def _take_the_way_out(self, scene: Scene) -> None:
        left = Person(scene, self.has_backup, self.done).act()
        if left:
            self._add([f"no way out of {left}"])
        else:
            end = oracle.converged(scene.views(), scene.shelf(), scene.history)
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

    def _note(self, who: str, said: str) -> None:
        found = re.findall(r"(?:^|; )(\w+Error): ", said)
        self.outcome.setdefault(who, set()).update(found or {"fine"})
