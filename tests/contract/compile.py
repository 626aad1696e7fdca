"""Compilation of Triton kernels to machine code for cards that are not here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int = 4,
) -> Compiled:
    import triton  # noqa: PLC0415 - by those who compile alone
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    source = ASTSource(kernel, dict(signature), constexprs=dict(constants))
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
