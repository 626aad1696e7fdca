"""Another plugin, around functions of SGLang that deltachain hooks as well."""

import logging
from collections.abc import Callable
from typing import Any

from deltachain_sglang import compat

SEEN = "another plugin saw "


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for target in (compat.LOADED, compat.PAUSED, compat.RELEASED):
        HookRegistry.register(target, _noting(target), HookType.AROUND)


def _noting(target: str) -> Callable[..., Any]:
    def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logging.getLogger(__name__).info("%s%s", SEEN, target)
        return original(*args, **kwargs)

    return noted
