"""What happens to a store: each a function that does it to a scene, by name."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeAlias

from deltachain.format import keys
from tests.accidents.scene import Scene
from tests.support.faults import clock_jump

Happening: TypeAlias = Callable[[Scene], None]

KEPT: Final = 3
"""Versions that are too young for a rule by age."""


def nothing(scene: Scene) -> None: ...


def restored(scene: Scene, *, back: int) -> None:
    scene.restore(scene.journal.at(scene.head - back))


def restored_twice(scene: Scene) -> None:
    restored(scene, back=3)
    scene.look(1)
    restored(scene, back=8)


def rewritten(scene: Scene) -> None:
    now = scene.contents()
    scene.delete(now)
    scene.put(now)


def emptied(scene: Scene) -> None:
    scene.delete(scene.find())


def refilled(scene: Scene) -> None:
    now = scene.contents()
    scene.delete(now)
    scene.look(20)
    scene.put(now)


def refilled_older(scene: Scene) -> None:
    scene.delete(scene.find())
    scene.look(20)
    scene.put(scene.journal.at(scene.head - 4))


def gone(scene: Scene, *, pattern: str) -> None:
    found = scene.find(pattern)
    assert found
    scene.delete(found)


def manifest_gone(scene: Scene, *, back: int | None) -> None:
    scene.delete([keys.manifest_key(0 if back is None else scene.head - back)])


def aged(scene: Scene, *, prefixes: tuple[str, ...]) -> None:
    """A rule by age took all objects of some kinds but those of the newest versions."""
    youngest = scene.head - KEPT + 1
    found = [key for key in scene.find() if key.startswith(prefixes)]
    scene.delete(key for key in found if (keys.version_of(key) or 0) < youngest)


def damaged(scene: Scene, *, pattern: str) -> None:
    key = max(scene.find(pattern))
    data = bytearray(scene.contents()[key])
    data[len(data) // 2] ^= 1
    scene.put({key: bytes(data)})


def manifest_damaged(scene: Scene, *, back: int) -> None:
    damaged(scene, pattern=keys.manifest_key(scene.head - back))


def cut_short(scene: Scene, *, pattern: str) -> None:
    key = max(scene.find(pattern))
    data = scene.contents()[key]
    scene.put({key: data[: len(data) // 2]})


def table_digest_damaged(scene: Scene) -> None:
    data = bytearray(scene.contents()[keys.CHAIN_KEY])
    at = data.index(b'"table":"') + 20
    data[at] = ord("1") if data[at] != ord("1") else ord("2")
    scene.put({keys.CHAIN_KEY: bytes(data)})


def emptied_files(scene: Scene, *, names: tuple[str, ...]) -> None:
    scene.put(dict.fromkeys(names, b""))


def payload_gone(scene: Scene, *, back: int) -> None:
    scene.delete(scene.find(f"deltas/{scene.head - back:020d}"))


def newest_anchor_gone(scene: Scene) -> None:
    newest = max(scene.find("anchors/")).rpartition("/")[0]
    scene.delete(scene.find(newest))


def head_lies(scene: Scene) -> None:
    """The hint names a version that there never was."""
    scene.put(
        {keys.HEAD_KEY: b'{"format":1,"requires":[],"ext":{},"version":1000000,"anchors":[]}'}
    )


def head_is_old(scene: Scene) -> None:
    scene.put({keys.HEAD_KEY: scene.journal.at(3)[keys.HEAD_KEY]})


def manifest_replaced(scene: Scene, *, back: int) -> None:
    now, version = scene.contents(), scene.head - back
    scene.put({keys.manifest_key(version): now[keys.manifest_key(version - 1)]})


def lost_put(scene: Scene, *, prefix: str) -> None:
    """The store says yes to a put of the trainer's next version, and does not do it."""
    store = scene.trainer.store
    store.loses = (prefix,)
    while not store.lost:
        scene.publish()
    store.loses = ()


def in_flight(scene: Scene, *, before: str) -> None:
    scene.trainer.store.interrupted = before, partial(restored, scene, back=5)
    scene.publish()


def step_by_step(scene: Scene) -> None:
    old, now = scene.journal.at(scene.head - 3), scene.contents()
    for key in sorted(now.keys() - old.keys()):
        scene.delete([key])
        scene.look(1)
    for key in old:
        if now.get(key) != old[key]:
            scene.put({key: old[key]})
            scene.look(1)


def killed_between(scene: Scene) -> None:
    restored(scene, back=2)
    scene.followers.pop("folder").close()
    restored(scene, back=4)
    scene.follow("folder", "folder").look(3)


def clock_jumps(scene: Scene, *, seconds: float) -> None:
    scene.stack.enter_context(clock_jump(seconds))
    restored(scene, back=2)


HAPPENINGS: Final[Mapping[str, Happening]] = {
    "nothing": nothing,
    "all objects copied over themselves": rewritten,
    "restored 1 version back": partial(restored, back=1),
    "restored 10 versions back": partial(restored, back=10),
    "restored 1,000 versions back": partial(restored, back=1000),
    "restored twice": restored_twice,
    "emptied": emptied,
    "emptied and refilled": refilled,
    "emptied and refilled with an older copy": refilled_older,
    "chain.json gone": partial(gone, pattern="chain.json"),
    "table.json gone": partial(gone, pattern="table.json"),
    "chain.json and table.json gone": partial(gone, pattern="(chain|table).json"),
    "head.json gone": partial(gone, pattern="head.json"),
    "head.json lies forward": head_lies,
    "head.json is old": head_is_old,
    "first manifest gone": partial(manifest_gone, back=None),
    "a manifest in the middle gone": partial(manifest_gone, back=5),
    "the manifest before the head gone": partial(manifest_gone, back=1),
    "the head's manifest gone": partial(manifest_gone, back=0),
    "a manifest replaced by an older one": partial(manifest_replaced, back=2),
    "the head's manifest replaced by an older one": partial(manifest_replaced, back=0),
    "all objects but the newest gone": partial(aged, prefixes=("",)),
    "old manifests and edges gone": partial(aged, prefixes=("manifests/", "edges/")),
    "old deltas and anchors gone": partial(aged, prefixes=("deltas/", "anchors/")),
    "edges gone": partial(gone, pattern="edges/"),
    "the newest anchor gone": newest_anchor_gone,
    "all anchors gone": partial(gone, pattern="anchors/"),
    "the head's delta gone": partial(payload_gone, back=0),
    "a delta in the middle gone": partial(payload_gone, back=4),
    "a manifest lost behind a yes": partial(lost_put, prefix="manifests/"),
    "a delta lost behind a yes": partial(lost_put, prefix="deltas/"),
    "an anchor lost behind a yes": partial(lost_put, prefix="anchors/"),
    "an anchor's record lost behind a yes": partial(lost_put, prefix="edges/"),
    "the hint lost behind a yes": partial(lost_put, prefix="head.json"),
    "chain.json damaged": partial(damaged, pattern="chain.json"),
    "chain.json damaged in its digest": table_digest_damaged,
    "chain.json cut short": partial(cut_short, pattern="chain.json"),
    "table.json cut short": partial(cut_short, pattern="table.json"),
    "chain.json and table.json cut short": partial(
        emptied_files, names=(keys.CHAIN_KEY, keys.TABLE_KEY)
    ),
    "table.json damaged": partial(damaged, pattern="table.json"),
    "head.json damaged": partial(damaged, pattern="head.json"),
    "the head's manifest damaged": partial(manifest_damaged, back=0),
    "a manifest in the middle damaged": partial(manifest_damaged, back=5),
    "the head's delta damaged": partial(damaged, pattern="deltas/"),
    "the newest anchor damaged": partial(damaged, pattern="anchors/"),
    "the newest edge record damaged": partial(damaged, pattern="edges/"),
    "the head's manifest cut short": partial(cut_short, pattern="manifests/"),
    "the head's delta cut short": partial(cut_short, pattern="deltas/"),
    "the newest anchor cut short": partial(cut_short, pattern="anchors/"),
    "restored before a delta's put": partial(in_flight, before="deltas/"),
    "restored before a manifest's put": partial(in_flight, before="manifests/"),
    "restored object by object": step_by_step,
    "restored twice, a follower killed": killed_between,
    "restored, the clock ahead": partial(clock_jumps, seconds=1e9),
    "restored, the clock behind": partial(clock_jumps, seconds=-1e9),
}

FAR: Final = ("restored 1,000 versions back",)

LIKELY: Final = frozenset(
    {"restored 1 version back", "restored 10 versions back", "chain.json gone", "table.json gone"}
    | {"first manifest gone", "a manifest in the middle gone", "the manifest before the head gone"}
    | {"the head's manifest gone", "all objects but the newest gone"}
    | {"old manifests and edges gone", "old deltas and anchors gone"}
    | {"a manifest lost behind a yes"}
)
