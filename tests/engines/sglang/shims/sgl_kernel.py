"""Stands in for SGLang's kernels for CPUs, which no registry has.

SGLang imports some of their names as it starts. What a model of no quantisation runs on a CPU
without AMX is torch's own; whatever else is called says so.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no kernel here")

    return missing
