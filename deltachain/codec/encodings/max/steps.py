"""Compiled kernel that decodes tiles and stages the steps of a box, a segment at a time.

A segment's indices and steps stay in cache, and its old bits are read again while they are there.
Elements are not put in order: weights are written at positions in any.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from deltachain.codec.encodings.max.classes import thread_scratch
from deltachain.codec.encodings.max.decoder import BROKEN, arguments, decode_segment
from deltachain.codec.encodings.max.tiles import TileStreams
from deltachain.kernels.compiling import compiled
from deltachain.kernels.reading import locate, move, run_stage
from deltachain.kernels.reference import StagedSteps, WindowPlace
from deltachain.types import Bits


@compiled
def _stage(segments: Any, given: Any, wanted: Any, room: Any, place: Any, out: Any) -> Any:  # noqa: ANN401
    """Stage all segments; return the number of elements, or -1 to -3."""
    box, weights, keys, lanes = place
    positions, old, new = out
    at, count = np.int64(0), np.int64(0)
    for s in range(segments.shape[0]):
        found = decode_segment(segments[s], at, given, wanted[s], room)
        if found < 0:
            return found
        indices, steps = room[0][:found], room[1][:found]
        held = locate(indices, steps, box, positions[count : count + found])
        mine = slice(count, count + held)
        move(weights, indices, steps, keys, (positions[mine], old[mine], new[mine]), lanes)
        count += held
        at += segments[s, 3]
    return count


def stage_tiles(
    segments: npt.NDArray[np.int64],
    streams: TileStreams,
    box: WindowPlace,
    weights: Bits,
    key: tuple[int, int],
) -> StagedSteps:
    """Decode tiles, and stage the steps of the elements of a box; see the reference."""
    held = thread_scratch(int(segments[:, 1].max(initial=0)))
    run = partial(_stage, segments, *arguments(segments, streams, held))
    return run_stage(run, segments, (), (box, weights, key), BROKEN)
