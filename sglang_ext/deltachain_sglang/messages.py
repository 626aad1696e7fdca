"""What the server sends to its schedulers in the ``action`` of a check of weights, and their reply.

SGLang returns the reply of its first scheduler alone, so that one carries the replies of all ranks.
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
        request: For the RPC service of each.
        flush: Whether their caches are flushed once all have handled it.
    """

    request: AnyRequest
    flush: bool = False


class SchedulerReply(Struct, frozen=True, kw_only=True):
    """The replies of all ranks.

    Attributes:
        status: ``busy``: requests are running whose cache cannot be flushed; ``asleep``: the
            weights were released. In both cases nothing was done.
        replies: In the order of the ranks.
    """

    status: Literal["answered", "busy", "asleep"] = "answered"
    replies: tuple[AnyReply, ...] = ()


_REQUESTS: Final = msgspec.json.Decoder(SchedulerRequest)
_REPLIES: Final = msgspec.json.Decoder(SchedulerReply)


def encode_message(message: SchedulerRequest | SchedulerReply) -> str:
    """A message as text."""
    return msgspec.json.encode(message).decode()


def decode_scheduler_request(text: str) -> SchedulerRequest | None:
    """Read a request to the schedulers; ``None`` for anything else."""
    try:
        return _REQUESTS.decode(text)
    except UNREADABLE:
        return None


def decode_scheduler_reply(text: str) -> SchedulerReply:
    """Read the reply of the schedulers.

    Raises:
        ApplyError: ``text`` is something else, such as an error of SGLang's own.
    """
    try:
        return _REPLIES.decode(text)
    except UNREADABLE as exc:
        raise ApplyError(
            f"cannot read the schedulers' reply: {exc}: {text[:200]!r}", hint=SAME_VERSION
        ) from exc
