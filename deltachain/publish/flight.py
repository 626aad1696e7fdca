"""A version in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import SupportsIndex

from typing_extensions import override

from deltachain.errors import ConfigError
from deltachain.kinds import whole
from deltachain.publish.diff import Diff
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.session import Attempt
from deltachain.types import Version


class Published(Future[PublishReceipt]):
    """Future of the receipt of the version that covers a call of ``publish``.

    Args:
        cover: Called before a thread waits for the result: the thread that publishes must not wait
            for its own next call.
    """

    def __init__(self, cover: Callable[[Published], None]) -> None:
        super().__init__()
        self._cover = cover

    @override
    def result(self, timeout: float | None = None) -> PublishReceipt:
        """Return the receipt; see :meth:`concurrent.futures.Future.result`."""
        self._cover(self)
        return super().result(timeout)

    @override
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error; see :meth:`concurrent.futures.Future.exception`."""
        self._cover(self)
        return super().exception(timeout)


@dataclass(frozen=True, slots=True)
class Flight:
    """A version in flight: created by the caller's thread, committed by the publisher's.

    Attributes:
        version: Number of the version.
        diff: Changes on this rank; empty if the diff failed.
        attempt: The attempt to commit it.
        covered: Futures of the ``publish`` calls that it covers.
        outcome: Future of its receipt or error; done before any of ``covered``.
    """

    version: Version
    diff: Diff
    attempt: Attempt
    covered: Sequence[Published]
    outcome: Future[PublishReceipt] = field(default_factory=Future)

    def land(self, receipt: PublishReceipt) -> None:
        """Give all futures the receipt."""
        for future in (self.outcome, *self.covered):
            future.set_result(receipt)

    def fail(self, error: BaseException) -> None:
        """Give all futures an error."""
        for future in (self.outcome, *self.covered):
            future.set_exception(error)


def whole_step(step: SupportsIndex | None) -> int | None:
    """Return the trainer's step as an ``int``: a reader would refuse any other in a manifest.

    Raises:
        ConfigError: It is no integer of Python, NumPy or torch.
    """
    hint = "give an int, such as the number of optimizer steps, or leave step out"
    return None if step is None else whole("step", step, hint=hint)


def check_every_steps(every_steps: object) -> None:
    """Check the number of optimizer steps for each version.

    Raises:
        ConfigError: It is no ``int``, or below 1.
    """
    if isinstance(every_steps, bool) or not isinstance(every_steps, int) or every_steps < 1:
        raise ConfigError(
            f"every_steps={every_steps!r}: expected 1 or more",
            hint="give the number of optimizer steps for each version; 1 publishes every step",
        )
