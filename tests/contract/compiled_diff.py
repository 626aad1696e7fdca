"""``python -m tests.contract.compiled_diff 90``: registers and spills of the fused diff."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltachain.kernels import fused_diff
from deltachain.kernels.device_diff import BLOCK

ARCHITECTURES = (80, 90, 100)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel in machine code."""

    registers: int
    spilled_nbytes: int
    ptx: str


def compile_for(
    arch: int,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int = 4,
) -> Compiled:
    import triton  # noqa: PLC0415 - by those who compile alone
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    # In the order of the arguments, as a launch names them.
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=dict(constants))
    target = GPUTarget("cuda", arch, 32)
    done: Any = triton.compile(source, target=target, options={"num_warps": warps})
    ptx = done.asm["ptx"]
    assert done.asm["cubin"]
    return Compiled(*_resources(arch, ptx), ptx)


def _resources(arch: int, ptx: str) -> tuple[int, int]:
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}"]
        command += [str(file), "-o", str(file.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    registers = re.search(r"Used (\d+) registers", said)
    assert spilled, said
    assert registers, said
    return int(registers[1]), sum(spilled)


BITS = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}


def variants() -> Iterator[tuple[int, dict[str, Any]]]:
    for width in BITS:
        for master in (False, True) if width == 2 else (False,):
            for aligned in (True, False) if width == 2 else (True,):
                yield width, {"master": master, "aligned": aligned}


def kernels(
    some: Iterable[tuple[int, dict[str, Any]]],
) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Each kernel with types, constants and warps."""
    place = {"counts": "*i16", "blocks": "i32", "before": "*i64", "after": "*i64"}
    place |= {"starts": "*i64", "capacity": "i64"}
    yield fused_diff.place_kernel, place, {"step": fused_diff.STEP}, 4
    for width, constants in some:
        kind = BITS[width]
        same = constants | {"bits": fused_diff.TYPES[width], "size": BLOCK}
        count = {"table": "*i64", "blocks": "i32", "counts": "*i16"}
        yield fused_diff.count_kernel, count, same, fused_diff.WARPS
        write = count | {"starts": "*i64", "offsets": "*i16", "new": kind, "old": kind}
        for resident in (False, True):
            yield fused_diff.write_kernel, write, same | {"resident": resident}, fused_diff.WARPS


def main() -> int:
    for kernel in kernels(variants()):
        _say(int(sys.argv[1]), *kernel)
    return 0


def _say(
    arch: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int
) -> None:
    done = compile_for(arch, kernel, types, constants, warps)
    if constants.get("aligned"):
        assert "ld.global.v" in done.ptx, "aligned memory is read 16 bytes at a time"
    assert ".ftz" not in done.ptx, "subnormal numbers are numbers"
    assert "div.full" not in done.ptx, "a quotient is the nearest number"
    assert "fma." not in done.ptx, "every operation rounds"
    sys.stdout.write(
        f"{kernel.__name__} {constants}: {done.registers} registers, "
        f"{done.spilled_nbytes} bytes spilled\n"
    )


if __name__ == "__main__":
    sys.exit(main())
