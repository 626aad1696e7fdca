"""Collectives over JSON values: gather, reduce on rank 0, broadcast; errors reach every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from deltachain import errors
from deltachain.errors import DeltaChainError, RankError
from deltachain.publish.ranks.channel import Ranks

_T = TypeVar("_T")
_Mine = TypeVar("_Mine")

SHARED: Final = (
    errors.PublisherFencedError,
    errors.ChainMismatchError,
    errors.StoreWentBackError,
    errors.ConfigError,
)
"""Errors of rank 0 that every rank raises as they are; others become a ``RankError``."""


FAILURES: Final = (DeltaChainError, OSError, MemoryError, RuntimeError)
"""Errors of a rank that are sent to the others, a full disk and a full GPU among them."""


class RankFailure(msgspec.Struct, frozen=True):
    """An error on a rank, as it is sent."""

    kind: str
    message: str
    hint: str = ""


class Message(msgspec.Struct, frozen=True):
    """The value of a rank, or its error."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: RankFailure | None = None


def all_gather(ranks: Ranks, topic: str, mine: Callable[[], _T], kind: type[_T]) -> list[_T]:
    """Compute a value on every rank; the values of all, on every rank.

    Raises:
        RankError: Another rank failed, or sent nothing in time.
        DeltaChainError: This rank failed.
    """
    message, error = _attempt(mine)
    messages = ranks.all_gather(topic, msgspec.json.encode(message))
    if error is not None:
        raise error
    return _values(messages, kind)


def broadcast(ranks: Ranks, topic: str, action: Callable[[], _T], kind: type[_T]) -> _T:
    """Compute a value on rank 0 alone; the value, on every rank.

    Raises:
        DeltaChainError: Rank 0 failed.
    """
    if not ranks.leads:
        return _received(ranks.broadcast(topic, None), kind)
    message, error = _attempt(action)
    ranks.broadcast(topic, msgspec.json.encode(message))
    if error is not None:
        raise error
    return msgspec.json.decode(message.value, type=kind)


def all_reduce(
    ranks: Ranks,
    topic: str,
    mine: Callable[[], _Mine],
    reduce: Callable[[list[_Mine]], _T],
    kinds: tuple[type[_Mine], type[_T]],
) -> _T:
    """Gather one value per rank on rank 0, reduce them there, broadcast the result.

    ``reduce`` is not called unless every rank sent its value in time.

    Args:
        ranks: All ranks.
        topic: Name of this collective, unique among those of these ranks.
        mine: Computes the value of this rank.
        reduce: On rank 0: the result of all values, in the order of ranks.
        kinds: Types of a value and of the result.

    Raises:
        DeltaChainError: This rank failed, or ``reduce`` did.
        RankError: Another rank failed, or sent nothing in time.
    """
    message, error = _attempt(mine)
    encoded = msgspec.json.encode(message)

    def reduced() -> _T:
        messages = ranks.gather(f"{topic}/parts", encoded)
        if error is not None:
            raise error
        return reduce(_values(messages, kinds[0]))

    if not ranks.leads:
        ranks.gather(f"{topic}/parts", encoded)
        if error is not None:
            raise error
    return broadcast(ranks, topic, reduced, kinds[1])


def _attempt(action: Callable[[], object]) -> tuple[Message, Exception | None]:
    try:
        value = msgspec.json.encode(action())
    except DeltaChainError as exc:
        return Message(failure=RankFailure(type(exc).__name__, str(exc.args[0]), exc.hint)), exc
    except FAILURES as exc:
        return Message(failure=RankFailure(type(exc).__name__, repr(exc)[:500])), exc
    return Message(value=msgspec.Raw(value)), None


def _values(messages: Sequence[bytes], kind: type[_T]) -> list[_T]:
    parsed = [msgspec.json.decode(message, type=Message) for message in messages]
    for number, message in enumerate(parsed):
        if (failure := message.failure) is not None:
            raise RankError(f"rank {number}: {failure.message}", hint=failure.hint)
    return [msgspec.json.decode(message.value, type=kind) for message in parsed]


def _received(data: bytes, kind: type[_T]) -> _T:
    message = msgspec.json.decode(data, type=Message)
    failure = message.failure
    if failure is None:
        return msgspec.json.decode(message.value, type=kind)
    for shared in SHARED:
        if failure.kind == shared.__name__:
            raise shared(failure.message, hint=failure.hint)
    raise RankError(f"rank 0: {failure.message}", hint=failure.hint)
