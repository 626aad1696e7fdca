"""Stands in for SGLang's kernels for CPUs, which no registry has.

SGLang imports some of their names as it starts. What a model of no quantisation runs on a CPU
without AMX is torch's own, attention and drafts in a chain are in ``speculative``; whatever else is
called says so.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

KNOWN: Final = import_module(".speculative", __name__)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no kernel here")

    return getattr(KNOWN, name, missing)
