"""What the fuzzer begins with: every sound object, and every hostile one that has a name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from deltachain.codec import ENCODINGS, Change, encode_part
from deltachain.codec.old_bits import OldBits
from deltachain.delta import changes
from deltachain.format import keys
from deltachain.types import StateDigest, TensorSpec
from tests.format.forgeries import FORGERIES, PARTS, forged
from tests.format.freeze import parts
from tests.format.test_stranger_tiles import part_of as max_part
from tests.fuzz.targets import FROZEN, MANIFEST_KEY, RECORD_KEY, TAG_KEY, old_of
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


LAYER: Final = {"a": "BF16", "b": "F8_E4M3", "c": "BF16", "d": "F32"}


def max_of(*specs: TensorSpec, alone: bool = False) -> bytes:
    return encode_part(_as_max(spec, alone=alone) for spec in specs).data


def _as_max(spec: TensorSpec, *, alone: bool) -> Change:
    old = old_of(spec)
    new = old.copy()
    new[::7] += np.array(1, spec.bits_dtype)
    before = None if alone else partial(OldBits, old)
    delta = changes(spec, old, new)
    return Change(delta, StateDigest(), encoding=ENCODINGS.get("max"), old=before)


def seeds(target: str) -> Iterator[tuple[str, bytes]]:
    if target == "part":
        for name, data in (*PARTS.items(), *parts()):
            yield f"sound-{name}", data
        for cuts in (1, 2, 3, 6):
            yield f"sound-max-{cuts}", max_part(cuts)
        for dtype in ("F8_E4M3", "BF16", "F32", "F64"):
            yield f"sound-max-{dtype}", max_of(TensorSpec("w", dtype, (40,)))
            yield f"sound-alone-{dtype}", max_of(TensorSpec("w", dtype, (5, 8)), alone=True)
        layer = [TensorSpec(f"h.0.{name}", dtype, (20,)) for name, dtype in LAYER.items()]
        yield "sound-max-layer", max_of(*layer)  # they share a digest
        for number, name in enumerate(FORGERIES):
            yield f"forged-{number:03}", forged(name)
        return
    yield "sound", FROZEN[KEYS[target]]
    cases = (case for case in CORPUS if case.level == target)
    for number, case in enumerate(cases):
        scene = Scene(case.scene)
        case.act(scene)
        yield f"hostile-{number:03}", scene.read(target)
