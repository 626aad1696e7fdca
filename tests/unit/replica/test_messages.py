"""What leader and ranks say to each other, and what each makes of bytes that say nothing."""

from __future__ import annotations

import json
import typing
from typing import Any

import msgspec
import pytest

from deltachain.errors import ApplyError, ConfigError
from deltachain.format.documents import ObjectRef
from deltachain.replica.layout.classes import Classified
from deltachain.replica.messages import (
    AgreeReply,
    AgreeRequest,
    AnyReply,
    AnyRequest,
    AttachReply,
    AttachRequest,
    CallId,
    CheckLoadsReply,
    CheckLoadsRequest,
    FetchedReply,
    FetchRequest,
    FindUnusedReply,
    FindUnusedRequest,
    LastSwapRequest,
    PendingReply,
    PollRequest,
    RankReply,
    RankRequest,
    Refusal,
    StagedReply,
    StageRequest,
    StartedReply,
    StateReply,
    StateRequest,
    StatusReply,
    StatusRequest,
    SwapReply,
    SwapRequest,
    call_id,
    decode_reply,
    decode_request,
    encode,
    status_row,
)
from deltachain.replica.spool import SpooledObject, SpoolIndex
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest, TensorSpec

DIGEST = StateDigest(2**64 - 1, 1)
FOUND = {"a": Classified(kind="in_place", windows=((0, (2, 3), (3, 1)),))}

INDEX = SpoolIndex(
    base="/base",
    objects=(SpooledObject(ref=ObjectRef(key="deltas/a", nbytes=9, blake3="b", pin="c"), edge=1),),
)

MESSAGES: list[RankRequest] = [
    AttachRequest(
        leader="one",
        sequence=1,
        url="s3://bucket/run",
        specs=(TensorSpec("a", "BF16", (2, 3)),),
        aliases={"b": "a"},
        probe=("name", "word"),
    ),
    FindUnusedRequest(names=("a",)),
    AgreeRequest(
        classes={"a": "in_place"},
        holders=({"a": ("0,1",)}, {"a": ("0,1",)}),
        compared=frozenset(["a"]),
    ),
    CheckLoadsRequest(),
    StateRequest(ticket=1),
    FetchRequest(ticket=1, spools=("", "x"), index=INDEX),
    StageRequest(ticket=1, spools=("x", "y"), ranks_on_host=(1, 1), budget=1 << 40, keep=(1, 2)),
    PollRequest(ticket=1),
    SwapRequest(ticket=1, version=7, back=True),
    LastSwapRequest(),
    StatusRequest(),
]

REPLIES: list[RankReply] = [
    Refusal(rank=3, leader="one", sequence=9, error="PoisonedError", message="no", hint="heal it"),
    AttachReply(tensors=FOUND, host="node", folder="boot:1:2"),
    FindUnusedReply(tensors=FOUND, digests={"a": DIGEST}),
    AgreeReply(),
    CheckLoadsReply(same=True),
    StartedReply(),
    PendingReply(),
    StateReply(digests=(("0,1", DIGEST),)),
    FetchedReply(nbytes=5),
    StagedReply(effects=(("0", Effect(DIGEST, StateDigest(), 3)),), nbytes=5, can_undo=False),
    SwapReply(seconds=0.25, version=7, pid=11),
    StatusReply(pid=11, version=None, staged=2),
]

NONE_AT_ALL: list[Any] = [
    "",
    "{",
    "[]",
    "1",
    "null",
    "{}",
    '"swap"',
    '{"call":null,"reply":null}',
    '{"call":"no such","reply":"no such"}',
    '{"call":"status","reply":"agreed","sequence":100000000000000000000}',
    '{"call":"status","reply":"agreed","sequence":-1}',
    '{"call":["swap"],"reply":["swapped"]}',
    '{"call":"_swap","reply":"RankReply"}',
    '{"call":"request","reply":"reply"}',
    "[" * 100_000,
    "\ud800",
    b"\xff\xfe",
    b"\x80\x04\x95",
    None,
    7,
    {"call": "status"},
]


def kind_of(message: object) -> str:
    return type(message).__name__


def test_every_message_is_tried_here() -> None:
    assert {type(one) for one in MESSAGES} == set(typing.get_args(AnyRequest))
    assert {type(one) for one in REPLIES} == set(typing.get_args(AnyReply))


@pytest.mark.parametrize("request_", MESSAGES, ids=kind_of)
def test_requests_arrive_as_they_were_sent(request_: RankRequest) -> None:
    assert decode_request(encode(request_)) == request_
    assert decode_request(encode(request_).encode()) == request_
    called = CallId(request_.leader, request_.sequence)
    assert call_id(encode(request_)) == called
    assert call_id(f'{{"request": {encode(request_)}, "flush": true}}') == called


@pytest.mark.parametrize("reply", REPLIES, ids=kind_of)
def test_replies_arrive_as_they_were_sent(reply: RankReply) -> None:
    assert decode_reply(encode(reply)) == reply
    assert json.loads(json.dumps(status_row(reply)))["ok"] is not isinstance(reply, Refusal)


@pytest.mark.parametrize("text", NONE_AT_ALL, ids=lambda text: ascii(text)[:70])
def test_what_is_no_message_is_a_typed_error(text: Any) -> None:
    with pytest.raises(ConfigError, match="cannot read the leader's request") as request:
        decode_request(text)
    with pytest.raises(ApplyError, match="cannot read a rank's reply") as reply:
        decode_reply(text)
    assert "same version of deltachain" in request.value.hint
    assert "same version of deltachain" in reply.value.hint


@pytest.mark.parametrize("message", [*MESSAGES, *REPLIES], ids=kind_of)
def test_truncated_messages_are_typed_errors(message: RankRequest | RankReply) -> None:
    text = encode(message)
    for end in range(len(text)):
        with pytest.raises(ConfigError):
            decode_request(text[:end])
        with pytest.raises(ApplyError):
            decode_reply(text[:end])


@pytest.mark.parametrize("message", [*MESSAGES, *REPLIES], ids=kind_of)
def test_a_request_is_no_reply_and_a_reply_no_request(message: RankRequest | RankReply) -> None:
    with pytest.raises((ConfigError, ApplyError)):
        (decode_reply if isinstance(message, RankRequest) else decode_request)(encode(message))


@pytest.mark.parametrize("message", [*MESSAGES, *REPLIES], ids=kind_of)
def test_no_field_is_of_another_type_more_or_missing(message: RankRequest | RankReply) -> None:
    decode = decode_request if isinstance(message, RankRequest) else decode_reply
    fields: dict[str, Any] = msgspec.to_builtins(message)
    kinds = {field.name: field for field in msgspec.structs.fields(message)}
    for name in fields.keys() & kinds.keys():
        with pytest.raises((ConfigError, ApplyError)):
            decode(json.dumps({**fields, name: {"what": 1}}))
        if kinds[name].required:
            with pytest.raises((ConfigError, ApplyError)):
                decode(json.dumps({k: v for k, v in fields.items() if k != name}))
    with pytest.raises((ConfigError, ApplyError)):
        decode(json.dumps({**fields, "more": 1}))


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "a", "dtype": "no such", "shape": [1]},
        {"name": "a", "dtype": "BF16", "shape": [-1]},
        {"name": "a", "dtype": "BF16", "shape": [1 << 62, 4]},
        {"name": "a", "dtype": "BF16", "shape": "x"},
    ],
)
def test_a_tensor_that_cannot_be_is_refused_with_its_request(spec: dict[str, Any]) -> None:
    body = {"call": "attach", "url": "", "specs": [spec], "aliases": {}}
    with pytest.raises(ConfigError):
        decode_request(json.dumps(body))


def test_who_asked_is_known_of_a_request_that_a_newer_leader_sends() -> None:
    text = '{"call":"defragment","leader":"one","sequence":7,"how":"well"}'
    assert call_id(text) == CallId("one", 7)
    for nothing in NONE_AT_ALL:
        assert call_id(nothing) == CallId()
