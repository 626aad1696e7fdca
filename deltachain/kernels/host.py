"""The kernels of this host: numba's where it is installed, numpy's where not.

Both are held to ``reference`` bit for bit by the same contract test, so nobody need know which ran;
``NAME`` says it for receipts. They are imported when the first one is asked for: numba takes a
while, and vLLM 0.32 cannot start an engine in a process that has imported it (its scan for Triton
kernels takes llvmlite's library object for one).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltachain.kernels.twolevel import (
        NAME,
        cast_bf16,
        cast_diff_,
        decode_gaps,
        diff_,
        digest,
        digest_at,
        encode_gaps,
        gather,
        join_steps,
        scatter_,
        split_steps,
    )

__all__ = [
    "NAME",
    "cast_bf16",
    "cast_diff_",
    "decode_gaps",
    "diff_",
    "digest",
    "digest_at",
    "encode_gaps",
    "gather",
    "join_steps",
    "scatter_",
    "split_steps",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    chosen = "jit" if find_spec("numba") is not None else "twolevel"
    kernels = import_module(f"deltachain.kernels.{chosen}")
    globals().update({kernel: getattr(kernels, kernel) for kernel in __all__})
    return globals()[name]
