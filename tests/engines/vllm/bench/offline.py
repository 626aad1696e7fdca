"""An offline ``LLM`` in a process of its own; it is made before anything that imports numba."""

# ruff: noqa: PLC0415 - see above; and vLLM reads its environment when it is imported
from __future__ import annotations

import os

from tests.engines.bench.figures import ENVIRONMENT, EXTENSIONS, Applied, Drawn


def measure(drawn: Drawn, *, plain: bool, warm_up: int) -> Applied:
    """See :func:`applying.follow`."""
    os.dup2(2, 1)  # vLLM's lines are no results
    # One core a candidate: two threads that wait for each other would measure who else is here.
    one = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.update({**ENVIRONMENT, **one})
    from vllm import LLM

    llm = LLM(
        model=str(drawn.base),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=2,
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        worker_extension_cls=EXTENSIONS[plain],
    )
    from tests.engines.bench.applying import follow

    return follow(llm, drawn, plain=plain, warm_up=warm_up)
