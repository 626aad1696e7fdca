"""A worker with plain linear layers, for as long as its process lives; nothing else is changed."""

from contextlib import ExitStack
from typing import Final

import deltachain_vllm.extension
from tests.engines.vllm.fresh import unpacked

_KEPT: Final = ExitStack()
_KEPT.enter_context(unpacked())


class WorkerExtension(deltachain_vllm.extension.WorkerExtension):
    pass
