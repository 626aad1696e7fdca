"""``make test-gpu`` and ``make bench-gpu``: the device kernels, and a rank, on a CUDA card.

The kernels need only torch, numpy and a card: no pytest, no other package of ours. A rank needs
what deltachain is installed with, and is left out, saying so, where that is not there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from deltachain.kernels import batched, staging
from tests.contract.arms import CrossingArm, DeviceArm
from tests.contract.batches import BATCH_CHECKS, BatchArm
from tests.contract.bits import BIT_CHECKS
from tests.contract.kernels import CHECKS
from tests.gpu.bench import bench


def main() -> int:
    """Run what the command line names."""
    if len(sys.argv) != 2 or sys.argv[1] not in ("test", "bench"):
        sys.stderr.write("usage: python -m tests.gpu.run test|bench\n")
        return 2
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: nothing was tested\n")
        return 1
    card = torch.cuda.get_device_name()
    if sys.argv[1] == "bench":
        sys.stdout.write(json.dumps({"device": card, **bench("cuda")}, indent=2) + "\n")
        return 0
    return _test(card)


def _test(card: str) -> int:
    """Every check on every arm; the last line is one that test runners are known by."""
    failed = passed = 0
    for name, check in _checks():
        start = time.perf_counter()
        try:
            check()
        except AssertionError as exc:
            failed += 1
            sys.stdout.write(f"FAILED {name}: {exc}\n")
        else:
            passed += 1
            sys.stdout.write(f"ok     {name} {time.perf_counter() - start:.2f} s\n")
    sys.stdout.write(f"on {card}\n{passed} passed, {failed} failed\n")
    return 1 if failed else 0


def _checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Those of the kernels, and those of a rank where deltachain's own packages are installed."""
    for arm in (DeviceArm("cuda"), CrossingArm("cuda")):
        for check in CHECKS:
            yield f"{type(arm).__name__}.{check.__name__}", partial(check, arm)
    for bit_check in BIT_CHECKS:
        yield f"bits.{bit_check.__name__}", partial(bit_check, torch.empty(0, device="cuda"))
    card = torch.device("cuda")
    for kernels in (batched, staging.kernels_of(card)):
        for batch_check in BATCH_CHECKS:
            arm_of_batches = BatchArm(kernels, card)
            name = f"{kernels.__name__}.{batch_check.__name__}"  # type: ignore[attr-defined]
            yield name, partial(batch_check, arm_of_batches)
    try:
        from tests.gpu.ranks import checks  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        sys.stdout.write(f"skipped ranks: {exc}\n")
    else:
        yield from checks("cuda")


if __name__ == "__main__":
    sys.exit(main())
