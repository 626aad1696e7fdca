"""What the fuzzer begins with: every sound object, and every hostile one that has a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deltachain.format import keys
from tests.format.forgeries import FORGERIES, PARTS, forged
from tests.format.freeze import parts
from tests.format.test_stranger_tiles import part_of as max_part
from tests.fuzz.targets import FROZEN, MANIFEST_KEY, RECORD_KEY, TAG_KEY
from tests.hostile.corpus import CORPUS
from tests.hostile.scene import Scene

KEYS: Final = {
    "manifest": MANIFEST_KEY,
    "record": RECORD_KEY,
    "table": keys.TABLE_KEY,
    "chain": keys.CHAIN_KEY,
    "head": keys.HEAD_KEY,
    "tag": TAG_KEY,
}


def seeds(target: str) -> Iterator[tuple[str, bytes]]:
    """Objects for one target, by a name that a file can have."""
    if target == "part":
        for name, data in (*PARTS.items(), *parts()):
            yield f"sound-{name}", data
        for cuts in (1, 2, 3, 6):
            yield f"sound-max-{cuts}", max_part(cuts)
        for number, name in enumerate(FORGERIES):
            yield f"forged-{number:03}", forged(name)
        return
    yield "sound", FROZEN[KEYS[target]]
    cases = (case for case in CORPUS if case.level == target)
    for number, case in enumerate(cases):
        scene = Scene(case.scene)
        case.act(scene)
        yield f"hostile-{number:03}", scene.read(target)
