"""Messages of the server to its schedulers, in the ``action`` of weight checks, and their reply.

SGLang returns only the reply of its first scheduler, so this one contains the replies of all ranks.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from deltachain.errors import ApplyError
from deltachain.format.documents import Struct
from deltachain.replica.messages import SAME_VERSION, UNREADABLE, AnyReply, AnyRequest


class SchedulerRequest(Struct, frozen=True, kw_only=True):
    """A request to all ranks.

    Attributes:
        request: Request to the RPC service of each rank.
        flush: Whether to flush the caches once all ranks have handled it.
    """

    request: AnyRequest
    flush: bool = False


class SchedulerReply(Struct, frozen=True, kw_only=True):
    """The replies of all ranks.

    Attributes:
        status: ``busy`` if running requests prevent a flush of their cache, ``asleep`` if the
            weights are released. In both cases nothing was done.
        replies: Replies in the order of the ranks.
    """

    status: Literal["answered", "busy", "asleep"] = "answered"
    replies: tuple[AnyReply, ...] = ()


_REQUESTS: Final = msgspec.json.Decoder(SchedulerRequest)
_REPLIES: Final = msgspec.json.Decoder(SchedulerReply)


def encode_message(message: SchedulerRequest | SchedulerReply) -> str:
    """Encode a message as text."""
    return msgspec.json.encode(message).decode()


def decode_scheduler_request(text: str) -> SchedulerRequest | None:
    """Decode a request to the schedulers; return ``None`` for any other text."""
    try:
        return _REQUESTS.decode(text)
    except UNREADABLE:
        return None


def decode_scheduler_reply(text: str) -> SchedulerReply:
    """Decode the reply of the schedulers.

    Raises:
        ApplyError: ``text`` is not such a reply, but for example an error of SGLang's own.
    """
    try:
        return _REPLIES.decode(text)
    except UNREADABLE as exc:
        raise ApplyError(
            f"cannot read the schedulers' reply: {exc}: {text[:200]!r}", hint=SAME_VERSION
        ) from exc
