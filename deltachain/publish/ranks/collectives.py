"""What all ranks do together and the first concludes: whoever fails, all of them know."""

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
"""Errors of the first rank that mean the same to all; the rest are its own."""


FAILURES: Final = (DeltaChainError, OSError, MemoryError, RuntimeError)
"""What a rank's part may fail of, and tells the others: a full disk and a full GPU among it."""


class RankFailure(msgspec.Struct, frozen=True):
    """What went wrong on a rank."""

    kind: str
    message: str
    hint: str = ""


class Word(msgspec.Struct, frozen=True):
    """What a rank has to say, or why it has nothing."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    trouble: RankFailure | None = None


def all_say(ranks: Ranks, topic: str, mine: Callable[[], _T], kind: type[_T]) -> list[_T]:
    """What every rank finds, on every rank.

    Raises:
        RankError: Some rank found trouble, or said nothing in time.
        DeltaChainError: This one did.
    """
    word, error = _attempt(mine)
    words = ranks.exchange(topic, msgspec.json.encode(word))
    if error is not None:
        raise error
    return _values(words, kind)


def led(ranks: Ranks, topic: str, action: Callable[[], _T], kind: type[_T]) -> _T:
    """Do something on the first rank alone, and know everywhere what came of it.

    Raises:
        DeltaChainError: It failed.
    """
    if not ranks.leads:
        return _heard(ranks.tell(topic, None), kind)
    word, error = _attempt(action)
    ranks.tell(topic, msgspec.json.encode(word))
    if error is not None:
        raise error
    return msgspec.json.decode(word.value, type=kind)


def together(
    ranks: Ranks,
    topic: str,
    mine: Callable[[], _Mine],
    conclude: Callable[[list[_Mine]], _T],
    kinds: tuple[type[_Mine], type[_T]],
) -> _T:
    """Every rank does its part; the first concludes from all of them; all know what came of it.

    Nothing is concluded unless every rank did its part in time.

    Args:
        ranks: Who.
        topic: Names this among all that they do.
        mine: This rank's part.
        conclude: What the first rank makes of all parts, in the order of ranks.
        kinds: Types of a part and of the conclusion.

    Raises:
        DeltaChainError: This rank's part failed, or the conclusion did.
        RankError: Another rank's part did, or it said nothing in time.
    """
    word, error = _attempt(mine)
    said = msgspec.json.encode(word)

    def all_parts() -> _T:
        words = ranks.gather(f"{topic}/parts", said)
        if error is not None:
            raise error
        return conclude(_values(words, kinds[0]))

    if not ranks.leads:
        ranks.gather(f"{topic}/parts", said)
        if error is not None:
            raise error
    return led(ranks, topic, all_parts, kinds[1])


def _attempt(action: Callable[[], object]) -> tuple[Word, Exception | None]:
    try:
        value = msgspec.json.encode(action())
    except DeltaChainError as exc:
        return Word(trouble=RankFailure(type(exc).__name__, str(exc.args[0]), exc.hint)), exc
    except FAILURES as exc:
        return Word(trouble=RankFailure(type(exc).__name__, repr(exc)[:500])), exc
    return Word(value=msgspec.Raw(value)), None


def _values(words: Sequence[bytes], kind: type[_T]) -> list[_T]:
    parsed = [msgspec.json.decode(word, type=Word) for word in words]
    for number, word in enumerate(parsed):
        if word.trouble is not None:
            raise RankError(f"rank {number}: {word.trouble.message}", hint=word.trouble.hint)
    return [msgspec.json.decode(word.value, type=kind) for word in parsed]


def _heard(data: bytes, kind: type[_T]) -> _T:
    word = msgspec.json.decode(data, type=Word)
    if word.trouble is None:
        return msgspec.json.decode(word.value, type=kind)
    trouble = word.trouble
    for shared in SHARED:
        if trouble.kind == shared.__name__:
            raise shared(trouble.message, hint=trouble.hint)
    raise RankError(f"rank 0: {trouble.message}", hint=trouble.hint)
