"""Requests from the leader of a replica to its ranks, and replies: one pair of structs per call.

Messages cross processes as JSON text, which vLLM's ``collective_rpc`` (its HTTP route included) and
SGLang's ``check_weights`` both pass on unchanged.
"""

import json
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from deltachain.errors import ApplyError, ConfigError
from deltachain.format.documents import Count, Struct
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest, TensorSpec

from .layout.classes import Classified, TensorClass
from .spool import SpoolIndex

SAME_VERSION: Final = "the leader and the engine must have the same version of deltachain"


class RankRequest(Struct, frozen=True, kw_only=True, tag_field="call"):
    """A request of the leader to every rank; its id and the number of the call are echoed."""

    leader: str = ""
    sequence: Count = 0
    of_draft: bool = False  # whether it is about the draft, which follows a chain of its own


class AttachRequest(RankRequest, frozen=True, kw_only=True, tag="attach"):
    """Request to discover how tensors reach this rank's weights; blocks the engine.

    ``probe`` is name and content of a file that the leader put into the spool folder.
    """

    url: str
    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    probe: tuple[str, str] | None = None


class FindUnusedRequest(RankRequest, frozen=True, kw_only=True, tag="unused"):
    """Request to test whether tensors held by no rank are unused; blocks the engine."""

    names: tuple[str, ...]


class AgreeRequest(RankRequest, frozen=True, kw_only=True, tag="agree"):
    """Decisions of the leader, from the reports of all ranks.

    ``holders`` has for each rank the ranks that hold each window of each tensor, and ``wanted`` the
    range of flat indices of each tensor that its host reads; empty if it fetches whole objects.
    Every rank compares the layers of the tensors ``compared`` with a fresh load after a swap.
    """

    classes: dict[str, TensorClass]
    holders: tuple[dict[str, tuple[str, ...]], ...]
    compared: frozenset[str]
    wanted: tuple[dict[str, tuple[Count, Count]], ...] = ()


class CheckLoadsRequest(RankRequest, frozen=True, kw_only=True, tag="check"):
    """Request to load the host copies again, and to compare; blocks the engine."""


class StateRequest(RankRequest, frozen=True, kw_only=True, tag="state"):
    ticket: Count


class FetchRequest(RankRequest, frozen=True, kw_only=True, tag="fetch"):
    """Request to start fetching a plan into the spools of hosts that the leader does not share.

    ``spools`` names the spool that each rank writes; empty for ranks that do not fetch.
    """

    ticket: Count
    spools: tuple[str, ...]
    index: SpoolIndex


class StageRequest(RankRequest, frozen=True, kw_only=True, tag="stage"):
    """Request to start staging a spooled plan, whose objects may still be on their way."""

    ticket: Count  # number under which the result is kept
    spools: tuple[str, ...]  # name of the spool's folder, for each rank
    ranks_on_host: tuple[Count, ...]
    budget: Count  # bytes of old and new bits to keep
    keep: tuple[Count, ...]  # tickets that may still be used; all others are dropped


class PollRequest(RankRequest, frozen=True, kw_only=True, tag="poll"):
    ticket: Count


class SwapRequest(RankRequest, frozen=True, kw_only=True, tag="swap"):
    """Request to write staged bits, or to undo that (``back``); the engine must be paused."""

    ticket: Count
    version: Count
    back: bool = False


class LastSwapRequest(RankRequest, frozen=True, kw_only=True, tag="last_swap"):
    """Request for the reply to the last swap, once: vLLM's update session returns none itself."""


class StatusRequest(RankRequest, frozen=True, kw_only=True, tag="status"):
    """Request for the status of a rank; refused if another leader has attached since."""


class RankReply(Struct, frozen=True, kw_only=True, tag_field="reply"):
    rank: int = -1
    leader: str = ""
    sequence: Count = 0
    draft: str = ""  # what a draft model of the engine follows; empty without one


class Refusal(RankReply, frozen=True, kw_only=True, tag="refused", omit_defaults=True):
    """An error of :mod:`deltachain.errors` in place of the requested reply."""

    error: str
    message: str
    hint: str = ""


class AttachReply(RankReply, frozen=True, kw_only=True, tag="attached"):
    tensors: dict[str, Classified]
    host: str = ""
    folder: str = ""  # id of its folder of spools; empty if the leader's probe is in it


class FindUnusedReply(RankReply, frozen=True, kw_only=True, tag="unused"):
    tensors: dict[str, Classified]
    digests: dict[str, StateDigest]  # state digests of those that are in the engine's checkpoint


class AgreeReply(RankReply, frozen=True, kw_only=True, tag="agreed"):
    ties: tuple[tuple[str, str], ...] = ()  # see `LateTie`


class CheckLoadsReply(RankReply, frozen=True, kw_only=True, tag="checked"):
    same: bool


class StartedReply(RankReply, frozen=True, kw_only=True, tag="started"): ...


class PendingReply(RankReply, frozen=True, kw_only=True, tag="pending"): ...


class StateReply(RankReply, frozen=True, kw_only=True, tag="state"):
    digests: tuple[tuple[str, StateDigest], ...]  # each with the ranks that hold these elements


class FetchedReply(RankReply, frozen=True, kw_only=True, tag="fetched"):
    nbytes: Count


class StagedReply(RankReply, frozen=True, kw_only=True, tag="staged"):
    effects: tuple[tuple[str, Effect], ...]  # effects on the state digest, each with its holders
    nbytes: Count  # bytes that the rank keeps
    can_undo: bool  # whether every old bit is among them


class SwapReply(RankReply, frozen=True, kw_only=True, tag="swapped"):
    seconds: float
    version: Count
    pid: int


class StatusReply(RankReply, frozen=True, kw_only=True, tag="status"):
    pid: int
    version: Count | None
    staged: int
    in_update_session: bool = False  # whether a session of the engine's own is open


_R = TypeVar("_R", bound=RankReply)

AnyRequest: TypeAlias = (
    AttachRequest
    | FindUnusedRequest
    | AgreeRequest
    | CheckLoadsRequest
    | StateRequest
    | FetchRequest
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
    | CheckLoadsReply
    | StartedReply
    | PendingReply
    | StateReply
    | FetchedReply
    | StagedReply
    | SwapReply
    | StatusReply
)

_REQUESTS: Final[msgspec.json.Decoder[AnyRequest]] = msgspec.json.Decoder(AnyRequest)
_REPLIES: Final[msgspec.json.Decoder[AnyReply]] = msgspec.json.Decoder(AnyReply)

UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""Errors of a decoder: bad JSON, a lone surrogate, an object that is no text, deep nesting."""


def encode(message: Struct) -> str:
    return msgspec.json.encode(message).decode()


def encode_reply(reply: RankReply) -> str:
    """Encode a reply as JSON text; never raises.

    A lone surrogate, as a file name may have, becomes a question mark: JSON cannot carry it.
    """
    try:
        return encode(reply)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(reply), ensure_ascii=False)
        return text.encode(errors="replace").decode()


def decode_request(text: str | bytes) -> AnyRequest:
    try:
        return _REQUESTS.decode(text)
    except UNREADABLE as exc:
        raise ConfigError(f"cannot read the leader's request: {exc}", hint=SAME_VERSION) from exc


def decode_reply(text: str | bytes) -> AnyReply:
    try:
        return _REPLIES.decode(text)
    except UNREADABLE as exc:
        raise ApplyError(f"cannot read a rank's reply: {exc}", hint=SAME_VERSION) from exc


def name_of(message: RankRequest | RankReply) -> str:
    return str(message.__struct_config__.tag)


def status_row(reply: RankReply) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(reply)
    for name in ("reply", "leader", "sequence"):
        fields.pop(name, None)
    return {"ok": not isinstance(reply, Refusal), **fields}


class CallId(msgspec.Struct, frozen=True):
    """Leader and number of a request, which may be inside a message of an engine's own."""

    leader: str = ""
    sequence: Count = 0
    of_draft: bool = False
    request: "CallId | None" = None


_CALL_IDS: Final = msgspec.json.Decoder(CallId)


def call_id(text: str | bytes) -> CallId:
    """Return leader and sequence number of a request that may be unreadable otherwise."""
    try:
        found = _CALL_IDS.decode(text)
    except UNREADABLE:
        return CallId()
    return found.request or found


def addressed(reply: _R, rank: int, request: RankRequest | RankReply | CallId) -> _R:
    """Return a reply with its address: this rank, and leader and number of this request."""
    return msgspec.structs.replace(
        reply, rank=rank, leader=request.leader, sequence=request.sequence
    )
