"""Calls of ``publish`` that no version covers yet."""

from __future__ import annotations

from deltachain.publish.flight import Published


class WaitingCalls:
    """Futures of the calls that no version covers yet, and the step of the newest."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._futures: list[Published] = []

    def __contains__(self, published: Published) -> bool:
        return published in self._futures

    def __bool__(self) -> bool:
        return bool(self._futures)

    def add(self, published: Published, step: int | None) -> None:
        """Add a call."""
        self._futures.append(published)
        self.step = step

    def take(self) -> list[Published]:
        """Return the futures that were not cancelled, and forget all."""
        futures, self._futures = self._futures, []
        return [future for future in futures if future.set_running_or_notify_cancel()]

    def fail(self, error: BaseException) -> None:
        """Give all calls an error: no version will cover them."""
        for future in self.take():
            future.set_exception(error)
