"""Choice of the fused kernels: where they can be compiled and give the bits of torch operations."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch

from deltachain.kernels.crossing import DeviceDiff
from deltachain.kernels.device import INT_DTYPES
from deltachain.kernels.lane import Compared
from deltachain.kernels.reference import Changes

logger = logging.getLogger(__name__)

NUMELS = (1, 4096, 4099, 16)
"""Elements of the tensors of the trial: whole blocks, and short ones at odd addresses."""


@cache
def fused_is_proven(where: torch.device) -> bool:
    """Return whether the fused kernels work on a device, tried there once in a process.

    Compiling them needs Triton and a C compiler, which a machine may lack; torch operations then
    take their place, which is logged.
    """
    if where.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        wrong = disagreements(where)
    except Exception as exc:  # noqa: BLE001 - compilers and drivers raise errors of any kind
        logger.warning(
            "cannot use the fused kernels on %s: %s; torch operations are used", where, exc
        )
        return False
    if wrong:
        logger.warning(
            "the fused kernels on %s are wrong for %s; torch operations are used", where, wrong
        )
    return not wrong


def disagreements(where: torch.device) -> list[str]:
    """Return the kinds of tensors for which the fused kernels differ from torch operations."""
    cases = [(str(dtype), dtype, dtype) for dtype in INT_DTYPES.values()]
    cases.append(("fp32 masters", torch.float32, torch.bfloat16))
    return [
        f"{name}, snapshot on the {'device' if resident else 'host'}"
        for name, live, wire in cases
        for resident in (True, False)
        if not _same(*(_trial(where, live, wire, resident, fused=f) for f in (True, False)))
    ]


def _trial(
    where: torch.device, live: torch.dtype, wire: torch.dtype, resident: bool, *, fused: bool
) -> dict[str, Changes]:
    """Diff tensors of few sizes twice: what changed, and then nothing."""
    rng, width = np.random.default_rng(1), wire.itemsize
    diff = DeviceDiff(where, fused=fused)
    bits = torch.from_numpy(rng.integers(0, 256, sum(NUMELS) * live.itemsize, np.uint8)).view(live)
    currents = bits.to(where).split(NUMELS)
    there = where if resident else torch.device("cpu")
    snapshot = torch.zeros(sum(NUMELS), dtype=INT_DTYPES[width], device=there)
    found: dict[str, Changes] = {}
    for turn in ("changed", "equal"):
        at = 0
        for number, current in enumerate(currents):
            diff.add(Compared(f"{turn} {number}", snapshot, at, current, wire, resident))
            at += current.numel()
        diff.settle(found)
    return found


def _same(one: dict[str, Changes], other: dict[str, Changes]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )
