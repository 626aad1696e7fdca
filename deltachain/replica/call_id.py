"""Leader and number of a call: read from a request, and repeated in the reply."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from deltachain.format.documents import Count
from deltachain.replica.messages import UNREADABLE, RankReply, RankRequest

_R = TypeVar("_R", bound=RankReply)


class CallId(msgspec.Struct, frozen=True):
    """Leader and sequence number of a request, without its other fields.

    Attributes:
        leader: Leader that sent it.
        sequence: Number of the request.
        request: The same of a request inside a message of an engine's own.
    """

    leader: str = ""
    sequence: Count = 0
    request: CallId | None = None


_CALL_IDS: Final = msgspec.json.Decoder(CallId)


def call_id(text: str | bytes) -> CallId:
    """Return leader and sequence number of a request that may be unreadable otherwise."""
    try:
        found = _CALL_IDS.decode(text)
    except UNREADABLE:
        return CallId()
    return found.request or found


def addressed(reply: _R, rank: int, request: RankRequest | RankReply | CallId) -> _R:
    """Return a reply with its address: this rank, and leader and number of this request.

    Given another reply, use its leader and number.
    """
    return msgspec.structs.replace(
        reply, rank=rank, leader=request.leader, sequence=request.sequence
    )
