"""``python -m tests.contract.interpreted_diff``: the fused diff in Triton's interpreter."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"


import torch

from deltachain.kernels.device_diff import disagreements
from tests.contract.kernels import DIFF_CHECKS, CrossingArm
from tests.contract.many_tensors import MANY_CHECKS


def main() -> int:
    for resident in (False, True):
        for check in DIFF_CHECKS:
            check(CrossingArm("cpu", resident=resident))
            sys.stdout.write(f"{check.__name__} resident={resident}\n")
    for many in MANY_CHECKS:
        many("cpu")
        sys.stdout.write(f"{many.__name__}\n")
    assert disagreements(torch.device("cpu")) == []
    return 0


if __name__ == "__main__":
    sys.exit(main())
