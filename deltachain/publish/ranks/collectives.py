"""Collectives over JSON values of a trainer's ranks; errors are raised on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar, cast

import msgspec

from deltachain import errors
from deltachain.errors import DeltaChainError, RankError
from deltachain.format.documents import decode
from deltachain.publish.ranks.channel import Ranks
from deltachain.types import Version

_T = TypeVar("_T")

SHARED: Final = (
    errors.PublisherFencedError,
    errors.ChainMismatchError,
    errors.StoreWentBackError,
    errors.ConfigError,
)
"""Errors of rank 0 raised unchanged on every rank; others become a ``RankError``."""


FAILURES: Final = (DeltaChainError, OSError, MemoryError, RuntimeError)
"""Errors of a rank that are sent to the others, such as a full disk or GPU."""


class RankFailure(msgspec.Struct, frozen=True):
    """Serialised error of a rank."""

    kind: str
    message: str
    hint: str = ""


class Message(msgspec.Struct, frozen=True):
    """Value or error of a rank."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: RankFailure | None = None


class Collective:
    """One collective of all ranks, as a ``with`` block: gather and broadcast, or all-gather.

    An error in the block is sent instead of the value awaited by the other ranks, so that it is
    raised on all of them. A single rank gets its own values back, without encoding.

    ::

        with Collective(ranks, "sizes") as collective:
            sizes = collective.gather(measure(), int)
            total = collective.broadcast(sum(sizes) if ranks.leads else None, int)

    Args:
        ranks: All ranks.
        topic: Name of this collective, unique for these ranks.
    """

    def __init__(self, ranks: Ranks, topic: str) -> None:
        self._ranks, self._topic = ranks, topic
        self._has_sent = self._has_answered = False

    def gather(self, value: _T, kind: type[_T]) -> list[_T]:
        """Send a value to rank 0.

        Returns:
            The values of all ranks in their order, on rank 0; an empty list on the others.

        Raises:
            RankError: Another rank failed, or sent nothing in time.
        """
        if self._ranks.count == 1:
            return [value]
        message = _encode(value)
        self._has_sent = True
        return _values(self._ranks.gather(self._parts, message), kind)

    def broadcast(self, value: _T | None, kind: type[_T]) -> _T:
        """Send a value of rank 0 to all ranks.

        Args:
            value: On rank 0; ignored on the others.
            kind: Type of the value.

        Raises:
            DeltaChainError: Rank 0 failed, or sent nothing in time.
        """
        if self._ranks.count == 1:
            return cast("_T", value)
        if self._ranks.leads:
            message = _encode(value)
            self._has_answered = True
            self._ranks.broadcast(self._topic, message)
            return cast("_T", value)
        return _received(self._ranks.broadcast(self._topic, None), kind)

    def all_gather(self, value: _T, kind: type[_T]) -> list[_T]:
        """Send a value to every rank.

        Returns:
            The values of all ranks in their order.

        Raises:
            RankError: Another rank failed, or sent nothing in time.
        """
        if self._ranks.count == 1:
            return [value]
        message = _encode(value)
        self._has_sent = self._has_answered = True
        return _values(self._ranks.all_gather(self._parts, message), kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ranks.count == 1 or not isinstance(error, FAILURES):
            return
        message = msgspec.json.encode(Message(failure=_failure(error)))
        try:
            if not self._has_sent:
                # Correct for gather and all-gather: rank 0 waits for all ranks, and leaves its
                # message for them to read.
                send = self._ranks.all_gather if self._ranks.leads else self._ranks.gather
                send(self._parts, message)
        finally:
            if self._ranks.leads and not self._has_answered:
                self._ranks.broadcast(self._topic, message)

    @property
    def _parts(self) -> str:
        return f"{self._topic}/parts"


def _encode(value: object) -> bytes:
    return msgspec.json.encode(Message(value=msgspec.Raw(msgspec.json.encode(value))))


def _failure(error: Exception) -> RankFailure:
    if isinstance(error, DeltaChainError):
        return RankFailure(type(error).__name__, str(error.args[0]), error.hint)
    return RankFailure(type(error).__name__, repr(error)[:500])


def _values(messages: Sequence[bytes], kind: type[_T]) -> list[_T]:
    parsed = [decode(message, Message) for message in messages]
    for number, message in enumerate(parsed):
        if (failure := message.failure) is not None:
            raise RankError(f"rank {number}: {failure.message}", hint=failure.hint)
    return [decode(message.value, kind) for message in parsed]


def _received(data: bytes, kind: type[_T]) -> _T:
    message = decode(data, Message)
    failure = message.failure
    if failure is None:
        return decode(message.value, kind)
    for shared in SHARED:
        if failure.kind == shared.__name__:
            raise shared(failure.message, hint=failure.hint)
    raise RankError(f"rank 0: {failure.message}", hint=failure.hint)


class Decision(msgspec.Struct, frozen=True):
    """Decision for all ranks: whether to take a diff now, and the newest committed version."""

    go: bool
    head: Version = -1


class PublishBarrier:
    """Barrier for each call of ``publish``; a rank that misses one can join the next.

    A call is identified by the trainer's step, so only ranks at the same step meet. Without step
    numbers, calls are counted: a rank that misses one then never meets the others again.

    Args:
        ranks: All publishing ranks.

    Attributes:
        topic: Unique topic of the last barrier.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._call = ""
        self._again = 0
        self._seen: Counter[int | None] = Counter()
        self.topic = ""

    def call(self, step: int | None) -> None:
        """Begin another call of ``publish``, after a step of the trainer."""
        self._call, self._again = f"{step}.{self._seen[step]}", 0
        self._seen[step] += 1

    @contextmanager
    def meet(self) -> Iterator[Collective]:
        """Yield the collective in which the ranks decide at this call.

        Raises:
            RankError: A rank did not arrive in time.
        """
        # Named after the call: a rank that missed a flush can join the next one.
        self.topic = f"{self._call}.{self._again}"
        self._again += 1
        try:
            with Collective(self._ranks, f"{self.topic}/barrier") as collective:
                yield collective
        except RankError as exc:
            exc.hint = f"{exc.hint}; every rank calls publish after the same steps"
            raise
