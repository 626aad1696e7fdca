"""``python -m tests.contract.interpreted_diff``: the fused diff in Triton's interpreter."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from itertools import product
from unittest import mock

import torch
from torch import Tensor

from deltachain.kernels.crossing import DeviceDiff
from deltachain.kernels.factors import Quantising
from deltachain.kernels.proven import disagreements
from tests.contract.arms import CrossingArm
from tests.contract.interpreted import Guards, before_a_wall
from tests.contract.kernels import DIFF_CHECKS
from tests.contract.many_tensors import FUSED_CHECKS, MANY_CHECKS, settle
from tests.contract.quantised_diff import QUANTISED_CHECKS, ROUNDINGS, Windows


def check_walls() -> None:
    for rounding, master in product(ROUNDINGS, (False, True)):
        shapes = ((77, 130), (1, 8), (3, 4096))
        how = Quantising(rounding, (128, 128))
        windows = Windows("cpu", how, master=master, resident=True, shapes=shapes)
        windows.live = [walled(one) for one in windows.live]
        windows.factors = [
            one._replace(values=walled(one.values.contiguous())) for one in windows.factors
        ]
        diff = DeviceDiff(torch.device("cpu"), fused=True)
        windows.add_to(diff)
        windows.check(settle(diff))


def walled(tensor: Tensor) -> Tensor:
    copied = before_a_wall(tensor.view(-1).view(torch.uint8).numpy(), {})
    return torch.from_numpy(copied).view(tensor.dtype).view(tensor.shape)


def main() -> int:
    for resident in (False, True):
        for check in DIFF_CHECKS:
            check(CrossingArm("cpu", resident=resident, fused=True))
            sys.stdout.write(f"{check.__name__} resident={resident}\n")
    for many in MANY_CHECKS:
        many("cpu", True)
        sys.stdout.write(f"{many.__name__}\n")
    for fused in FUSED_CHECKS:
        fused("cpu")
        sys.stdout.write(f"{fused.__name__}\n")
    for quantised in QUANTISED_CHECKS:
        guards = Guards()
        with mock.patch.object(torch, "empty", guards.empty):
            quantised("cpu", True)
        guards.check()
        sys.stdout.write(f"{quantised.__name__}\n")
    check_walls()
    sys.stdout.write("check_walls\n")
    assert disagreements(torch.device("cpu")) == []
    return 0


if __name__ == "__main__":
    sys.exit(main())
