"""A worker with plain linear layers, for as long as its process lives; nothing else is changed."""

from contextlib import ExitStack
from typing import Final

import deltachain_vllm.extension
from deltachain_vllm.cache_salts import Salts
from tests.engines.vllm.fresh import unpacked

_KEPT: Final = ExitStack()
_KEPT.enter_context(unpacked())
_RENEW: Final = Salts.renew


class WorkerExtension(deltachain_vllm.extension.WorkerExtension):
    def tests_salt(self, on: bool) -> None:
        """Let pauses renew salts or not; the scheduler is in the process of its only worker."""
        Salts.renew = _RENEW if on else lambda *_: None  # type: ignore[method-assign]
