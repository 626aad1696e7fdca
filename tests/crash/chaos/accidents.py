"""Accidents: what happens to a run, drawn from a seed, and what the dashboard must show of it."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from threading import Event
from typing import Any, Final

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError
from deltachain.store import Store
from spaces.dashboard.watcher import AlertKind
from tests.crash.chaos.scene import ALERT_LAG, MAX_SILENCE_S, Filler, Party, Scene
from tests.small_disk import may_mount

NOTICED_S: Final = 10.0
"""Seconds within which the dashboard has asked every replica again, on a busy machine too."""

AWAIT_S: Final = 60.0
"""Seconds within which the trainer must have committed another version."""

START_S: Final = 300.0
"""Seconds within which a second trainer must have taken over."""

TWICE: Final = 0.3

EVERYTHING: Final = frozenset({"store", "trainer", "maintainer", "dashboard", "vllm", "sglang"})


class VoidError(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Accident:
    """One thing that happens, and is put right again."""

    kind: str
    parties: frozenset[str]
    detail: str = ""
    seconds: float = 0.0
    begin: Callable[[], object]
    end: Callable[[], object] = lambda: None
    alerts: tuple[AlertKind, ...] = ()
    engine: str = ""
    versions: int = 0


Make = Callable[[Scene, Random], Accident]


def to_engine(kind: str, one: Party, *, detail: str = "", **more: Any) -> Accident:
    parties = frozenset({one.kind})
    return Accident(kind=kind, parties=parties, detail=detail or one.kind, engine=one.url, **more)


def kill_engine(scene: Scene, dice: Random) -> Accident:
    one = _engine(scene, dice)
    return to_engine("kill engine", one, begin=one.service.kill, alerts=(AlertKind.SILENT,))


def kill(what: str, party: str) -> Make:
    def make(scene: Scene, _: Random) -> Accident:
        begin = getattr(scene, party).kill
        return Accident(kind=f"kill {what}", parties=frozenset({party}), begin=begin)

    return make


def kill_store(scene: Scene, dice: Random) -> Accident:
    one, seconds = _engine(scene, dice), dice.uniform(1, 40)
    return Accident(
        kind="kill store",
        parties=EVERYTHING,
        seconds=seconds,
        begin=scene.store.kill,
        end=scene.store.restart,
        alerts=(AlertKind.CUT_OFF,) if seconds > MAX_SILENCE_S + NOTICED_S else (),
        engine=one.url,
    )


def cut_off(scene: Scene, dice: Random) -> Accident:
    one, seconds = _engine(scene, dice), dice.uniform(5, 60)
    noticed = seconds > MAX_SILENCE_S + NOTICED_S
    return to_engine(
        "cut off engine",
        one,
        seconds=seconds,
        begin=one.proxy.refuse,
        end=one.proxy.reset,
        alerts=(AlertKind.CUT_OFF,) if noticed else (),
    )


def cut_off_trainer(scene: Scene, dice: Random) -> Accident:
    return Accident(
        kind="cut off publisher",
        parties=frozenset({"trainer"}),
        seconds=dice.uniform(5, 40),
        begin=scene.trainer_proxy.refuse,
        end=scene.trainer_proxy.reset,
    )


def bad_network(scene: Scene, dice: Random) -> Accident:
    who = dice.choice(["trainer", *scene.engines])
    proxy = scene.trainer_proxy if who == "trainer" else scene.engines[who].proxy
    how = dice.choice(["delay", "throttle", "cut", "reset", "drop"])
    nbytes, times, late_s = dice.randrange(20_000), dice.randint(1, 20), dice.uniform(0.05, 0.6)
    begin: Callable[[], object] = {
        "delay": lambda: proxy.delay(late_s),
        "throttle": lambda: proxy.throttle(200_000),
        "cut": lambda: proxy.cut_after(nbytes, times=times),
        "reset": lambda: proxy.cut_after(nbytes, times=times, reset=True),
        "drop": lambda: proxy.drop_reply("PUT" if who == "trainer" else "GET", times=times),
    }[how]
    return Accident(
        kind="bad network",
        parties=frozenset({who}),
        detail=f"{who}: {how}",
        seconds=dice.uniform(5, 25),
        begin=begin,
        end=proxy.reset,
    )


def corrupt(scene: Scene, dice: Random) -> Accident:
    at = dice.random()

    def flip(store: Store, key: str, data: bytes) -> None:
        where = int(at * len(data))
        flipped = bytes([data[where] ^ (1 << int(at * 7919) % 8)])
        store.put(key, data[:where] + flipped + data[where + 1 :])

    return _spoil("corrupt object", scene, dice, flip)


def delete(scene: Scene, dice: Random) -> Accident:
    return _spoil("delete object", scene, dice, lambda store, key, _: store.delete(key))


def full_disk(scene: Scene, dice: Random) -> Accident:
    one = _engine(scene, dice)
    filler = Filler(lambda: one.seen_disk)

    def begin() -> None:
        if not filler.begin():
            raise VoidError("the disk cannot be reached")

    return to_engine(
        "full disk",
        one,
        seconds=dice.uniform(10, 40),
        begin=begin,
        end=filler.end,
        alerts=(AlertKind.BEHIND, AlertKind.NOT_READY),
        versions=ALERT_LAG + 8,
    )


def second_trainer(scene: Scene, dice: Random) -> Accident:
    other = scene.another_trainer()

    def begin() -> None:
        with scene.opened() as store:
            chain = Chain.open(store)
            before = epoch_of(chain)
            other.__enter__()
            deadline = time.monotonic() + START_S
            while epoch_of(chain) == before:
                if time.monotonic() > deadline:
                    raise VoidError(f"it has not taken over in {START_S:.0f} s")
                time.sleep(0.2)

    return Accident(
        kind="second publisher",
        parties=frozenset({"trainer"}),
        seconds=dice.uniform(5, 40),
        begin=begin,
        end=lambda: other.__exit__(None, None, None),
    )


def pause(scene: Scene, dice: Random) -> Accident:
    one, seconds = _engine(scene, dice), dice.uniform(2, 20)
    return to_engine(
        "pause",
        one,
        seconds=seconds,
        begin=one.client.pause,
        end=one.client.resume,
        alerts=(AlertKind.NOT_READY,) if seconds > NOTICED_S else (),
    )


def roll_back(scene: Scene, dice: Random) -> Accident:
    one, seconds, by = _engine(scene, dice), dice.uniform(2, 25), dice.randint(1, 24)

    def begin() -> None:
        held = one.client.status().version
        if held is None or held < by:
            raise VoidError("there is no such version")
        one.client.rollback(held - by)

    return to_engine(
        "roll back",
        one,
        detail=f"{one.kind} by {by}",
        seconds=seconds,
        begin=begin,
        end=one.client.release,
        alerts=(AlertKind.BEHIND,) if seconds > NOTICED_S and by > ALERT_LAG else (),
    )


def revert(scene: Scene, dice: Random) -> Accident:
    by = dice.randint(1, 20)

    def begin() -> None:
        with scene.opened() as store:
            head = Chain.open(store).newest(0)
        command = [sys.executable, "-m", "deltachain", "revert", scene.url, "--to", str(head - by)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env=scene.direct
        )
        if done.returncode:  # the publisher may have committed meanwhile
            raise VoidError(done.stderr[-500:])

    return Accident(kind="revert", parties=frozenset({"trainer"}), detail=f"by {by}", begin=begin)


DRAWN: Final[tuple[tuple[Make, int], ...]] = (
    (kill_engine, 3),
    (kill("publisher", "trainer"), 3),
    (kill("maintainer", "maintainer"), 2),
    (kill("dashboard", "dashboard"), 1),
    (kill_store, 2),
    (cut_off, 4),
    (cut_off_trainer, 2),
    (bad_network, 4),
    (corrupt, 4),
    (delete, 3),
    (full_disk, 3),
    (second_trainer, 3),
    (pause, 2),
    (roll_back, 3),
    (revert, 2),
)
"""What may happen, and how often in one pass."""


class Deck:
    """Draws accidents as from a pack of cards, so that each kind comes as often as it should."""

    def __init__(self, scene: Scene, dice: Random) -> None:
        self._scene, self._dice = scene, dice
        self._left: list[Make] = []

    def draw(self) -> list[Accident]:
        first = self._next()
        if self._dice.random() >= TWICE:
            return [first]
        second = self._next()
        return [first] if first.parties & second.parties else [first, second]

    def _next(self) -> Accident:
        if not self._left:
            self._left = [make for make, often in DRAWN for _ in range(often)]
            self._left = [make for make in self._left if make is not full_disk or may_mount()]
            self._dice.shuffle(self._left)
        return self._left.pop()(self._scene, self._dice)


def happen(one: Accident, stop: Event) -> str:
    try:
        one.begin()
    except (VoidError, DeltaChainError) as error:
        with suppress(DeltaChainError):
            one.end()
        return f"{type(error).__name__}: {error}"
    stop.wait(one.seconds)
    deadline = time.monotonic() + AWAIT_S
    while True:
        try:
            one.end()
        except DeltaChainError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
        else:
            return ""


def epoch_of(chain: Chain) -> int:
    head = chain.head()
    return -1 if head is None else head.manifest.epoch


def _engine(scene: Scene, dice: Random) -> Party:
    return scene.engines[dice.choice(sorted(scene.engines))]


def _spoil(
    kind: str, scene: Scene, dice: Random, how: Callable[[Store, str, bytes], None]
) -> Accident:
    spoiled: dict[str, bytes] = {}

    def begin() -> None:
        for one in scene.engines.values():
            one.proxy.refuse()
        try:
            with scene.opened() as store:
                chain = Chain.open(store)
                head = chain.newest(0)
                deadline = time.monotonic() + AWAIT_S
                while (newest := chain.newest(head)) == head:
                    if time.monotonic() > deadline:
                        raise VoidError("nobody has committed a version")
                    time.sleep(0.1)
                key = chain.read(newest).manifest.edge.parts[0].key
                spoiled[key] = store.get(key, limit=1 << 30)
                how(store, key, spoiled[key])
        finally:
            for one in scene.engines.values():
                one.proxy.reset()

    def end() -> None:
        with scene.opened() as store:
            for key, data in spoiled.items():
                store.put(key, data)

    return Accident(
        kind=kind, parties=EVERYTHING, seconds=dice.uniform(2, 25), begin=begin, end=end
    )
