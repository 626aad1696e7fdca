"""Requests from the leader of a replica to its ranks, and their replies: a pair of structs a call.

A message crosses processes as JSON text, which vLLM's ``collective_rpc`` (from a client of its HTTP
route as well) and SGLang's ``check_weights`` both carry unchanged.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from deltachain.errors import ApplyError, ConfigError
from deltachain.format.documents import Count, Struct
from deltachain.replica.layout.update_path import Classified, TensorClass
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest, TensorSpec

SAME_VERSION: Final = "the leader and the engine must have the same version of deltachain"


class RankRequest(Struct, frozen=True, kw_only=True, tag_field="call"):
    """A call that the leader makes on every rank.

    Attributes:
        leader: Id of the leader.
        sequence: Number of the call, counted by the leader. A reply repeats both.
    """

    leader: str = ""
    sequence: Count = 0


class AttachRequest(RankRequest, frozen=True, kw_only=True, tag="attach"):
    """Find the ways into this rank's weights. Blocks the engine.

    Attributes:
        url: The chain.
        specs: Its tensors.
        aliases: Other names of tied tensors.
        probe: Name and content of a file that the leader put into the spool folder.
    """

    url: str
    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    probe: tuple[str, str] | None = None


class FindUnusedRequest(RankRequest, frozen=True, kw_only=True, tag="unused"):
    """Find out which tensors, held by no rank, the engine does not use. Blocks the engine."""

    names: tuple[str, ...]


class AgreeRequest(RankRequest, frozen=True, kw_only=True, tag="agree"):
    """Take what the leader decided from the reports of all ranks.

    Attributes:
        classes: Of every tensor.
        holders: For each rank, the ranks that hold each window of each tensor.
    """

    classes: dict[str, TensorClass]
    holders: tuple[dict[str, tuple[str, ...]], ...]


class UnusedStateRequest(RankRequest, frozen=True, kw_only=True, tag="unused_state"):
    """Digest unused tensors from the files that the engine loaded."""

    names: tuple[str, ...]


class CheckLoadsRequest(RankRequest, frozen=True, kw_only=True, tag="check"):
    """Load the host copies again, and compare. Blocks the engine."""


class StateRequest(RankRequest, frozen=True, kw_only=True, tag="state"):
    """Begin to recompute the state digest of the live weights."""

    ticket: Count


class StageRequest(RankRequest, frozen=True, kw_only=True, tag="stage"):
    """Begin to stage a spooled plan.

    Attributes:
        ticket: Number under which the result is kept.
        spool: Name of the spool's folder.
        budget: Bytes of old and new bits to keep.
        keep: Tickets that may still be used; all others are forgotten.
    """

    ticket: Count
    spool: str
    budget: Count
    keep: tuple[Count, ...]


class PollRequest(RankRequest, frozen=True, kw_only=True, tag="poll"):
    """Ask for the result of a ticket."""

    ticket: Count


class SwapRequest(RankRequest, frozen=True, kw_only=True, tag="swap"):
    """Write what was staged, or take it back. The engine must be paused.

    Attributes:
        ticket: Under which it was staged.
        version: The version that it leads to.
        back: Whether it is taken back.
    """

    ticket: Count
    version: Count
    back: bool = False


class LastSwapRequest(RankRequest, frozen=True, kw_only=True, tag="last_swap"):
    """Fetch the reply to the last swap, once: vLLM's update session returns none itself."""


class StatusRequest(RankRequest, frozen=True, kw_only=True, tag="status"):
    """Ask what this rank holds, and whether it obeys this leader."""


class RankReply(Struct, frozen=True, kw_only=True, tag_field="reply"):
    """A rank's answer to a request.

    Attributes:
        rank: Number of the rank.
        leader: As in the request.
        sequence: As in the request.
    """

    rank: int = -1
    leader: str = ""
    sequence: Count = 0


class Refusal(RankReply, frozen=True, kw_only=True, tag="refused", omit_defaults=True):
    """An error in place of what was asked for.

    Attributes:
        error: Name of a class of :mod:`deltachain.errors`.
        message: Its message.
        hint: Its hint.
    """

    error: str
    message: str
    hint: str = ""


class AttachReply(RankReply, frozen=True, kw_only=True, tag="attached"):
    """What the rank found of every tensor."""

    tensors: dict[str, Classified]


class FindUnusedReply(RankReply, frozen=True, kw_only=True, tag="unused"):
    """What the rank found of the tensors that were asked about."""

    tensors: dict[str, Classified]


class AgreeReply(RankReply, frozen=True, kw_only=True, tag="agreed"):
    """The rank took the agreement."""


class UnusedStateReply(RankReply, frozen=True, kw_only=True, tag="unused_state"):
    """State digests of those tensors that the engine's checkpoint has."""

    digests: dict[str, StateDigest]


class CheckLoadsReply(RankReply, frozen=True, kw_only=True, tag="checked"):
    """Whether the engine held just what was loaded again."""

    same: bool


class StartedReply(RankReply, frozen=True, kw_only=True, tag="started"):
    """The work runs; ``poll`` its ticket."""


class PendingReply(RankReply, frozen=True, kw_only=True, tag="pending"):
    """The work of a ticket is not done yet."""


class StateReply(RankReply, frozen=True, kw_only=True, tag="state"):
    """State digests of the live weights, by the ranks that hold them."""

    digests: tuple[tuple[str, StateDigest], ...]


class StagedReply(RankReply, frozen=True, kw_only=True, tag="staged"):
    """What a swap of this ticket would do.

    Attributes:
        effects: By the ranks that hold the same elements.
        nbytes: Bytes that the rank keeps.
        can_undo: Whether it keeps every old bit.
    """

    effects: tuple[tuple[str, Effect], ...]
    nbytes: Count
    can_undo: bool


class SwapReply(RankReply, frozen=True, kw_only=True, tag="swapped"):
    """The rank has written.

    Attributes:
        seconds: How long that took.
        version: The version that it now holds.
        pid: Its process.
    """

    seconds: float
    version: Count
    pid: int


class StatusReply(RankReply, frozen=True, kw_only=True, tag="status"):
    """What a rank holds.

    Attributes:
        pid: Its process.
        version: The version of the last swap; ``None`` before the first.
        staged: How many tickets it keeps.
        in_update_session: Whether a weight-update session of the engine's own is open.
    """

    pid: int
    version: Count | None
    staged: int
    in_update_session: bool = False


_R = TypeVar("_R", bound=RankReply)

AnyRequest: TypeAlias = (
    AttachRequest
    | FindUnusedRequest
    | AgreeRequest
    | UnusedStateRequest
    | CheckLoadsRequest
    | StateRequest
    | StageRequest
    | PollRequest
    | SwapRequest
    | LastSwapRequest
    | StatusRequest
)

AnyReply: TypeAlias = (
    Refusal
    | AttachReply
    | FindUnusedReply
    | AgreeReply
    | UnusedStateReply
    | CheckLoadsReply
    | StartedReply
    | PendingReply
    | StateReply
    | StagedReply
    | SwapReply
    | StatusReply
)

_REQUESTS: Final[msgspec.json.Decoder[AnyRequest]] = msgspec.json.Decoder(AnyRequest)
_REPLIES: Final[msgspec.json.Decoder[AnyReply]] = msgspec.json.Decoder(AnyReply)

UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""Errors of a decoder: bad JSON, a lone surrogate, an object that is no text, deep nesting."""


class CallId(msgspec.Struct, frozen=True):
    """Leader and sequence number of a request, whatever else it says."""

    leader: str = ""
    sequence: Count = 0


_CALL_IDS: Final = msgspec.json.Decoder(CallId)


def encode(message: RankRequest | RankReply) -> str:
    """A message as text."""
    return msgspec.json.encode(message).decode()


def decode_request(text: str | bytes) -> AnyRequest:
    """Read a request.

    Raises:
        ConfigError: ``text`` is none that this version of deltachain knows.
    """
    try:
        return _REQUESTS.decode(text)
    except UNREADABLE as exc:
        raise ConfigError(f"cannot read the leader's request: {exc}", hint=SAME_VERSION) from exc


def decode_reply(text: str | bytes) -> AnyReply:
    """Read a reply.

    Raises:
        ApplyError: ``text`` is none that this version of deltachain knows.
    """
    try:
        return _REPLIES.decode(text)
    except UNREADABLE as exc:
        raise ApplyError(f"cannot read a rank's reply: {exc}", hint=SAME_VERSION) from exc


def call_id(text: str | bytes) -> CallId:
    """Leader and sequence number of a request that may be unreadable otherwise."""
    try:
        return _CALL_IDS.decode(text)
    except UNREADABLE:
        return CallId()


def addressed(reply: _R, rank: int, request: RankRequest | RankReply | CallId) -> _R:
    """A reply of this rank to this request, or to the one that another reply is to."""
    return msgspec.structs.replace(
        reply, rank=rank, leader=request.leader, sequence=request.sequence
    )


def name_of(message: RankRequest | RankReply) -> str:
    """Name of a call, or of a kind of reply."""
    return str(message.__struct_config__.tag)


def status_row(reply: RankReply) -> dict[str, Any]:
    """A reply as the status of a replica lists it."""
    fields: dict[str, Any] = msgspec.to_builtins(reply)
    for name in ("reply", "leader", "sequence"):
        fields.pop(name, None)
    return {"ok": not isinstance(reply, Refusal), **fields}
