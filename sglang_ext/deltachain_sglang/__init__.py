"""The SGLang side of deltachain: what SGLang's plugin entry point resolves to.

SGLang discovers the name below; it hooks nothing. This module imports nothing but the standard
library, because SGLang loads it in every process it starts.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Entry point of ``sglang.srt.plugins``; hooks nothing.

    SGLang calls it in the main process and in every scheduler. What it raises is logged and
    otherwise ignored, so a failure in here would leave a server that looks healthy.
    """
