"""As ``offline_worker``, with linear layers that compute from their parameters."""

from tests.engines.vllm import offline_worker, plain

__all__ = ["WorkerExtension"]


class WorkerExtension(offline_worker.WorkerExtension):
    tests_plain = plain.WorkerExtension.__name__
