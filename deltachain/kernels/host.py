"""The kernels of this host: numba's where it is installed, numpy's where not.

Both are held to ``reference`` bit for bit by the same contract test, so nobody need know which ran;
``NAME`` says it for receipts.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("numba") is not None:
    from deltachain.kernels.jit import (
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
else:
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
