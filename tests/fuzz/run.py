"""Fuzzes one reader for a while: ``python -m tests.fuzz.run --target part --corpus DIR``.

Ends with 0 when nothing was found. What was found lies beside the corpus, and is read alone when it
is given in its place: ``--corpus FILE``.
"""

import argparse
import random
import resource
import sys
from pathlib import Path
from typing import Final

import atheris

# What is not instrumented gives the fuzzer no direction; numba cannot compile what is.
with atheris.instrument_imports(
    include=["deltachain"],
    exclude=[f"deltachain.kernels.{name}" for name in ("quantised_codes", "numba_kernels")]
    + [f"deltachain.codec.encodings.max.{name}" for name in ("classes", "coder")],
):
    from tests.fuzz.mutate import MUTATORS, TARGETS, Target, must, seeds

SECONDS_AN_INPUT: Final = 5
MEMORY: Final = 512
"""MiB that reading one input may take."""
MAX_NBYTES: Final = 1 << 16


def bounded(target: Target) -> Target:
    """The reader, as one that must not take more memory than that.

    Asked of each input: code that is instrumented leaks some bytes with each comparison, so the
    fuzzer's own limit, which is on the process, would be reached by patience alone.
    """

    def read(data: bytes) -> None:
        used, most = resident(), peak()
        target(data)
        must(peak() == most or peak() - used <= MEMORY << 20, f"more than {MEMORY} MiB")

    return read


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, required=True)
    options = parser.parse_args()
    target, mutator = TARGETS[options.target], MUTATORS[options.target]
    findings = options.corpus.parent / f"{options.corpus.name}-"
    if not options.corpus.is_file():
        options.corpus.mkdir(parents=True, exist_ok=True)
        for name, data in seeds(options.target):
            if name.startswith("sound"):
                target(data)  # what is compiled when first used is compiled before the clock runs
            if len(data) <= MAX_NBYTES:
                (options.corpus / name).write_bytes(data)

    def mutate(data: bytes, limit: int, seed: int) -> bytes:
        return mutator(data, limit, random.Random(seed), atheris.Mutate)

    arguments = [
        sys.argv[0],
        str(options.corpus),
        f"-max_total_time={options.seconds}",
        f"-timeout={SECONDS_AN_INPUT}",
        f"-rss_limit_mb={16 * MEMORY}",  # of the process: 2 KB an input are leaked
        f"-max_len={MAX_NBYTES}",
        f"-artifact_prefix={findings}",
        "-print_final_stats=1",
    ]
    atheris.Setup(arguments, bounded(target), custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
