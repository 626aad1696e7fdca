"""A vLLM worker whose ranks fail when a test says so; see :mod:`tests.engines.strikes`."""

import deltachain_vllm.extension
import tests.engines.strikes  # noqa: F401 - makes it so, in this process


class WorkerExtension(deltachain_vllm.extension.WorkerExtension):
    def own_answer(self) -> int:
        """A method of a user's own extension, which is a subclass of ours."""
        return 42
