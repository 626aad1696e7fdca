"""Compile every Triton program for cards of three generations, without a card."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deltachain.kernels import staging_programs
from deltachain.kernels.staging import BLOCK, DIGEST_TURNS, WARPS
from tests.contract import compiled_diff

TOOLS = Path(nvidia.__file__).parent / "bin"
ELEMENTS = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}
OF_AN_ELEMENT = ("values", "olds", "news", "bits")
"""Arguments that point to integers of the element's width."""
OTHER_TYPES = {
    "buffer": "*u8",
    "kept": "*i1",
    "absolute": "*i1",
    "verdict": "*i32",
    "ndim": "i32",
}
OFFSETS = dict.fromkeys(staging_programs.OFFSETS, "i32")  # as Triton passes integers below 2^31

Case = tuple[Any, int, dict[str, Any]]


def cases() -> Iterator[Case]:
    """Every specialisation that :mod:`.staging` launches."""
    for width in ELEMENTS:
        for absolute in (False, True):
            constants = {"WIDTH": width, "ABSOLUTE": absolute}
            yield staging_programs.decode_segment, width, constants
        for masked, kind in ((False, 0), (False, 1), (True, 0), (True, 2)):
            constants = {"WIDTH": width, "MASKED": masked, "ABSOLUTE": kind}
            yield staging_programs.stage_block, width, constants
        yield staging_programs.write_block, width, {}
        for at in (False, True):
            constants = {"WIDTH": width, "AT": at, "TURNS": DIGEST_TURNS}
            yield staging_programs.digest_blocks, width, constants
    for masked in (False, True):
        yield staging_programs.count_block, 2, {"MASKED": masked}


def compile_for(arch: int, case: Case) -> str:
    program, width, constants = case
    if "BLOCK" in program.arg_names:
        constants = constants | {"BLOCK": BLOCK}
    types = OFFSETS | OTHER_TYPES | dict.fromkeys(OF_AN_ELEMENT, ELEMENTS[width])
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i64")
        for name in program.arg_names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(program, signature, constants, aligned)
    target = GPUTarget("cuda", arch, 32)
    cubin = triton.compile(source, target=target, options={"num_warps": WARPS}).asm["cubin"]
    registers, spills = resources(cubin)
    line = f"sm_{arch} {program.__name__} {width} B {constants}: {registers} registers"
    assert not spills, f"{line}, {spills} bytes spilled"
    return line


def resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert found, said
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def few() -> float:
    """Seconds to compile what a bf16 model needs to attach, publish and stage on sm_90."""
    kinds = ("ABSOLUTE", "MASKED", "AT")
    programs = [one for one in cases() if one[1] == 2 and not any(map(one[2].get, kinds))]
    kernels = compiled_diff.kernels([(2, {"master": False, "aligned": True})])
    with (
        mock.patch.object(sys.modules[__name__], "resources", return_value=(0, 0)),
        mock.patch.object(compiled_diff, "_resources", return_value=(0, 0)),
    ):
        start = time.perf_counter()
        for one in programs:
            compile_for(90, one)
        for kernel in kernels:
            compiled_diff.compile_for(90, *kernel)
        return time.perf_counter() - start


def main() -> int:
    if sys.argv[1:] == ["few"]:
        sys.stdout.write(f"{few():.2f}\n")
        return 0
    for arch in map(int, sys.argv[1:]):
        for case in cases():
            sys.stdout.write(compile_for(arch, case) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
