"""What the processes of the benchmark hand to each other; imports nothing that is heavy.

vLLM 0.32 for CPUs looks through the attributes of every module there is when a worker starts, and
falls over those of llvmlite: nothing that imports numba may be there by then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ENVIRONMENT: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "deltachain",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
EXTENSIONS: Final[Mapping[bool, str]] = {
    True: "tests.engines.vllm.bench_plain.WorkerExtension",
    False: "deltachain_vllm.WorkerExtension",
}

FETCH: Final = "fetch"
STAGE: Final = "stage"
SWAP: Final = "swap"
PAUSE: Final = "pause"
TOTAL: Final = "total"
FLOOR: Final = "index_copy_"
LOAD: Final = "load_weights"
RELOAD: Final = "layerwise reload"
PATCHES: Final = "checkpoint patches"

ROWS: Final[Mapping[str, str]] = {
    FLOOR: "bare index_copy_, one thread",
    SWAP: "swap",
    PAUSE: "pause: swap, cache reset, calls",
    STAGE: "stage",
    FETCH: "fetch",
    TOTAL: "update: all of these",
    LOAD: "the engine's load_weights of all",
    RELOAD: "the engine's reload of all",
    PATCHES: "vLLM checkpoint patches",
}

CLEARED: Final = "dropped"
SALTED: Final = "by version"
KEPT: Final = "all kept"
WAYS: Final = (CLEARED, SALTED, KEPT)
"""What an update does with caches; with the last one, new requests read caches of old weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A chain whose versions were drawn."""

    size: str
    base: Path
    url: str
    densities: tuple[float, ...]
    nnz: tuple[int, ...]
    nbytes: tuple[int, ...]
    numel: int


@dataclass(slots=True, kw_only=True)
class Applied:
    """What following a chain took, in one model and one way of loading it."""

    plain: bool
    classes: dict[str, int] = field(default_factory=dict)
    attach_s: float = 0.0
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    peak_mb: int = 0
    threads: int = 0
    proven: bool = False


@dataclass(slots=True, kw_only=True)
class Lost:
    """Generation that a chain took from a busy engine."""

    plain: bool
    threads: int
    times: int
    staging_s: list[float] = field(default_factory=list)
    updates_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    rates: list[float] = field(default_factory=list)
    stage_s: list[float] = field(default_factory=list)
    swap_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    proven: bool = False
