"""``make test-gpu`` and ``make bench-gpu``: kernels, snapshots and a rank on a CUDA card.

The kernels need only torch, numpy and a card: no pytest, no other package of ours. Snapshots and a
rank need what deltachain is installed with, and are left out, saying so, where that is not there.

To add checks, extend ``kernel_checks``; to add a benchmark, extend ``BENCHES``: a function of a
torch device that yields figures by name.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from tests.contract.batches import BATCH_CHECKS, BatchArm
from tests.contract.kernels import BIT_CHECKS, DIFF_CHECKS, LIVE_CHECKS, CrossingArm, DeviceArm
from tests.gpu.diff import bench_diff, bench_kernels, diff_checks


def main() -> int:
    command, *arguments = sys.argv[1:] or ("",)
    if command not in ("test", "bench"):
        sys.stderr.write(
            f"usage: python -m tests.gpu.run test [cpu] | bench [{'|'.join(BENCHES)}] [DIVISOR]\n"
        )
        return 2
    if command == "test" and arguments:  # by Triton's interpreter, if it is told to
        return _test(arguments[0], kernel_checks(arguments[0]))
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: nothing was tested\n")
        return 1
    card = torch.cuda.get_device_name()
    if command == "bench":
        return _bench(card, arguments)
    return _test(card, chain(kernel_checks("cuda"), _others("cuda")))


def _bench_update(where: str, divisor: int | None) -> Iterator[tuple[str, Any]]:
    from tests.gpu.update import bench_update  # noqa: PLC0415

    yield from bench_update(where, divisor)


def _bench_end_to_end(where: str, divisor: int | None) -> Iterator[tuple[str, Any]]:
    from tests.gpu.end_to_end import bench_end_to_end  # noqa: PLC0415

    yield from bench_end_to_end(where, divisor)


BENCHES: dict[str, Callable[[str, int | None], Iterable[tuple[str, Any]]]] = {
    "kernels": lambda where, _: bench_kernels(where).items(),
    "diff": bench_diff,
    "update": _bench_update,
    "end-to-end": _bench_end_to_end,
}


def _bench(card: str, arguments: list[str]) -> int:
    """Print each figure as soon as it is known, as a line of JSON."""
    divisor = next((int(one) for one in arguments if one.isdecimal()), None)
    for name in [one for one in arguments if one in BENCHES] or BENCHES:
        start = time.perf_counter()
        try:
            for figure, value in BENCHES[name]("cuda", divisor):
                line = {"device": card, "bench": name, "figure": figure, "value": value}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
        except ModuleNotFoundError as exc:
            sys.stdout.write(f"{name} is skipped: {exc}\n")
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.0f} s\n")
    return 0


def _test(card: str, checks: Iterable[tuple[str, Callable[[], None]]]) -> int:
    """Every check on every arm; the last line is one that test runners are known by."""
    failed = passed = 0
    for name, check in checks:
        start = time.perf_counter()
        try:
            check()
        except Exception as exc:  # noqa: BLE001 - a driver raises errors of any kind: go on
            failed += 1
            sys.stdout.write(f"FAILED {name}: {type(exc).__name__}: {exc}\n")
        else:
            passed += 1
            sys.stdout.write(f"ok     {name} {time.perf_counter() - start:.2f} s\n")
    sys.stdout.write(f"on {card}\n{passed} passed, {failed} failed\n")
    return 1 if failed else 0


def kernel_checks(where: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Those of the kernels; Triton's interpreter runs them on ``cpu``."""
    for live_check in LIVE_CHECKS:
        yield f"device.{live_check.__name__}", partial(live_check, DeviceArm(where))
    for resident in (False, True):
        arm = CrossingArm(where, resident=resident)
        for check in DIFF_CHECKS:
            yield f"diff.{'device' if resident else 'host'}.{check.__name__}", partial(check, arm)
    for bit_check in BIT_CHECKS:
        yield f"bits.{bit_check.__name__}", partial(bit_check, torch.empty(0, device=where))
    for batch_check in BATCH_CHECKS:
        on_card = BatchArm(torch.device(where))
        yield f"staging.{batch_check.__name__}", partial(batch_check, on_card)
    yield from diff_checks(where)


def _others(where: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Those that need deltachain's own packages, where they are."""
    try:
        from tests.gpu.ranks import checks, snapshot_checks  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        sys.stdout.write(f"skipped snapshots and ranks: {exc}\n")
    else:
        yield from snapshot_checks(where)
        yield from checks(where)


if __name__ == "__main__":
    sys.exit(main())
