"""The leader's side of the RPC: requests to all ranks, and replies checked against them."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import Final, TypeVar, cast

import msgspec

from deltachain.errors import ApplyError, PoisonedError
from deltachain.replica.engine import Engine
from deltachain.replica.messages import (
    AnyRequest,
    PendingReply,
    PollRequest,
    RankReply,
    Refusal,
    name_of,
)
from deltachain.replica.rpc import raise_refusal
from deltachain.types import Version

POLL_S: Final = (0.002, 0.05)
"""Shortest and longest wait between two polls of the ranks, in seconds."""

POLL_SHARE: Final = 0.1
"""Wait until the next poll, as a share of the time waited so far.

The end is seen at most this share late, and an engine, which answers between two of its steps, is
asked rarely.
"""

STAGE_S: Final = 900.0
"""Timeout of staging in seconds; a rank that takes longer is considered dead."""

_R = TypeVar("_R", bound=RankReply)


class RankClient:
    """The connection of one leader to every rank of an engine.

    Args:
        engine: The replica.

    Attributes:
        engine: The replica.
        count: Number of its ranks; 0 until known.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.count = 0
        self._leader = uuid.uuid4().hex
        self._sequence = itertools.count(1)

    def ask(self, request: AnyRequest, kind: type[_R]) -> list[_R]:
        """Return the replies of all ranks, of the given type; raise a refusal as its error."""
        replies = self.call(request, kind)
        raise_refusal(replies)
        return [reply for reply in replies if isinstance(reply, kind)]

    def call(self, request: AnyRequest, *kinds: type[_R]) -> list[_R | Refusal]:
        """Return the replies of all ranks: refusals, or replies of the given types.

        Raises:
            PoisonedError: A reply has another type, or belongs to another request or rank.
        """
        asked = msgspec.structs.replace(request, leader=self._leader, sequence=next(self._sequence))
        replies = self.engine.call(asked)
        found = [(reply.rank, reply.leader, reply.sequence) for reply in replies]
        ranks = range(self.count or len(replies))
        expected = [(rank, asked.leader, asked.sequence) for rank in ranks]
        if found != expected or not all(isinstance(reply, (*kinds, Refusal)) for reply in replies):
            raise PoisonedError(
                f"the engine mixed up its ranks' answers to {name_of(request)!r}",
                hint="a worker raised in some other call; restart the engine",
            )
        return cast("list[_R | Refusal]", list(replies))

    def wait(self, ticket: int, kind: type[_R], version: Version | None = None) -> list[_R]:
        """Wait until every rank is done with a ticket; raise the first refusal as its error."""
        found = self.settle(ticket, kind, version)
        raise_refusal(found, version=version)
        return [reply for reply in found if isinstance(reply, kind)]

    def settle(
        self, ticket: int, kind: type[_R], version: Version | None = None
    ) -> list[_R | Refusal]:
        """Wait until every rank is done with a ticket; return replies and refusals by rank.

        Raises:
            ApplyError: A rank is not done within ``STAGE_S``.
        """
        least, longest = POLL_S
        start = time.monotonic()
        done: dict[int, _R | Refusal] = {}
        while True:
            replies = self.call(PollRequest(ticket=ticket), kind, PendingReply)
            for reply in replies:
                if isinstance(reply, (kind, Refusal)):
                    done.setdefault(reply.rank, reply)
            if len(done) == len(replies):
                break
            taken = time.monotonic() - start
            if taken > STAGE_S:
                raise ApplyError(f"some rank did not stage within {STAGE_S:.0f} s", version=version)
            time.sleep(min(max(POLL_SHARE * taken, least), longest))
        return [reply for _, reply in sorted(done.items())]
