import gc
import json
import logging
import time
import typing
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import nn

from deltachain import errors
from deltachain.checkpoint import Checkpoint
from deltachain.errors import (
    ApplyError,
    ConfigError,
    EngineDamagedError,
    EngineVersionError,
    PoisonedError,
    TensorMismatchError,
)
from deltachain.format.documents import ObjectRef
from deltachain.replica.engine import EngineModel
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
    name_of,
    status_row,
)
from deltachain.replica.rank import REMEMBERED, Handler, RankService, RankServices
from deltachain.replica.settings import RankSettings
from deltachain.replica.spool import SpooledObject, SpoolIndex
from deltachain.replica.target import error_of, raise_refusal
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest, TensorSpec
from tests.support.engine import FakeModel, Sharding, save, trained

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


EVERY = pytest.mark.parametrize("message", [*MESSAGES, *REPLIES], ids=kind_of)


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
def test_what_is_no_message_is_a_typed_error(text: Any, tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match="cannot read a rank's reply") as caught:
        decode_reply(text)
    assert "same version of deltachain" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot read the leader's request"):
        decode_request(text)
    rank = RankService(lambda: pytest.fail("no model"), 0, RankSettings(spool=tmp_path))
    refusal = refused(decode_reply(rank.answer(text)), "ConfigError")
    assert "cannot read the leader's request" in refusal.message
    assert "same version of deltachain" in refusal.hint
    assert call_id(text) == CallId()


@EVERY
def test_a_request_is_no_reply_and_a_reply_no_request(message: RankRequest | RankReply) -> None:
    with pytest.raises((ConfigError, ApplyError)):
        (decode_reply if isinstance(message, RankRequest) else decode_request)(encode(message))


@EVERY
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


URL = "s3://bucket/run"

REQUESTS = [
    request
    for request in MESSAGES
    if not isinstance(request, AttachRequest | FetchRequest | PollRequest | LastSwapRequest)
]
"""What only a rank that is attached can do."""


@pytest.fixture
def model(tmp_path: Path) -> FakeModel:
    shape = Sharding(layers=1)
    return FakeModel(shape, 0, save(trained(shape), tmp_path / "model"))


@pytest.fixture
def bare(model: FakeModel, tmp_path: Path) -> RankService:
    """A rank that nobody has attached yet."""
    return RankService(lambda: model, 0, RankSettings(spool=tmp_path / "spool", url=URL))


def attach(model: FakeModel, leader: str = "") -> AttachRequest:
    specs = tuple(Checkpoint(model.checkpoint).specs.values())
    return AttachRequest(leader=leader, sequence=1, url=URL, specs=specs, aliases={})


@pytest.fixture
def rank(bare: RankService, model: FakeModel) -> RankService:
    """A rank that is attached, and agreed with itself."""
    found = bare.handle(attach(model))
    assert isinstance(found, AttachReply), found
    classes = {name: one.kind for name, one in found.tensors.items()}
    labels = {name: ("0",) * len(one.windows) for name, one in found.tensors.items()}
    assert bare.handle(
        AgreeRequest(classes=classes, holders=(labels,), compared=frozenset())
    ) == AgreeReply(rank=0)
    return bare


def settled(rank: RankService, ticket: int) -> RankReply:
    """What a rank answers in the end."""
    for _ in range(1000):
        reply = rank.handle(PollRequest(ticket=ticket))
        if not isinstance(reply, PendingReply):
            return reply
        time.sleep(0.005)
    raise AssertionError("it is never done")


def refused(reply: RankReply, error: str) -> Refusal:
    """A reply that refuses with this error."""
    assert isinstance(reply, Refusal)
    assert (reply.rank, reply.error) == (0, error)
    return reply


@pytest.mark.parametrize("call", ["", "no such", "_swap", "do", "__init__", "rank", "Attach"])
def test_unknown_calls_are_refused_and_told_to_who_asked(rank: RankService, call: str) -> None:
    text = json.dumps({"call": call, "leader": "one", "sequence": 7})
    reply = refused(decode_reply(rank.answer(text)), "ConfigError")
    assert "cannot read the leader's request" in reply.message
    assert "same version of deltachain" in reply.hint
    assert (reply.leader, reply.sequence) == ("one", 7)


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
def test_nothing_is_done_before_it_is_attached(bare: RankService, request_: RankRequest) -> None:
    assert refused(bare.handle(request_), "ApplyError").message == "rank 0 is not attached"


def test_every_request_has_a_handler(rank: RankService) -> None:
    assert set(rank._handlers) == set(typing.get_args(AnyRequest))


def test_an_agreement_about_fewer_ranks_is_refused(rank: RankService) -> None:
    refused(rank.handle(AgreeRequest(classes={}, holders=(), compared=frozenset())), "ApplyError")


def stage(rank: RankService, name: str) -> RankReply:
    """Let a rank stage a spool of this name."""
    return rank.handle(
        StageRequest(ticket=1, spools=(name,), ranks_on_host=(1,), budget=0, keep=())
    )


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a/", ".hidden", "./a"])
def test_plans_are_read_from_the_one_folder_alone(rank: RankService, name: str) -> None:
    assert refused(stage(rank, name), "ConfigError").message == f"{name!r} is not a spool"


@pytest.mark.parametrize("name", ["gone", "nul\0", "x" * 300, "~", "*"])
def test_a_spool_that_is_not_there_is_answered_when_asked(rank: RankService, name: str) -> None:
    assert stage(rank, name) == StartedReply(rank=0)
    refused(settled(rank, 1), "ApplyError")


@pytest.mark.parametrize("index", [b"", b"{", b"[]", b'{"from_nothing":1,"tensors":[]}'])
def test_a_spool_that_is_none_is_answered_when_asked(
    rank: RankService, tmp_path: Path, index: bytes
) -> None:
    folder = tmp_path / "spool" / "a"
    folder.mkdir(parents=True)
    (folder / "index.json").write_bytes(index)
    (folder / "data").write_bytes(b"")
    assert stage(rank, "a") == StartedReply(rank=0)
    assert isinstance(settled(rank, 1), Refusal)


def test_a_ticket_that_nobody_began_is_answered(rank: RankService) -> None:
    reply = rank.handle(PollRequest(ticket=7))
    assert refused(reply, "ApplyError").message == "rank 0 knows nothing of ticket 7"


def test_answers_are_remembered_for_a_while(rank: RankService) -> None:
    for ticket in range(1, REMEMBERED + 3):
        rank.handle(StateRequest(ticket=ticket))
        assert isinstance(settled(rank, ticket), StateReply)
    refused(rank.handle(PollRequest(ticket=1)), "ApplyError")
    again = [rank.handle(PollRequest(ticket=REMEMBERED)) for _ in range(2)]
    assert again[0] == again[1]
    assert isinstance(again[0], StateReply)


@pytest.mark.full
def test_a_swap_of_nothing_writes_nothing_and_is_told_once(
    rank: RankService, model: FakeModel
) -> None:
    before = {name: tensor.clone() for name, tensor in model.tensors().items()}
    reply = rank.handle(SwapRequest(sequence=5, ticket=3, version=9))
    refused(reply, "PartialApplyError")
    assert all((tensor == before[name]).all() for name, tensor in model.tensors().items())
    told = [rank.handle(LastSwapRequest(sequence=6)) for _ in range(2)]
    assert told[0] == reply, "it replies to the swap, so that another swap's is not believed"
    assert told[1] == Refusal(rank=0, sequence=6, error="ApplyError", message="no swap")


class Strange(Exception):  # noqa: N818
    """Has no words, and is of nobody's tree."""


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (Strange(), "ApplyError", "Strange: "),
        (ZeroDivisionError("by zero"), "ApplyError", "ZeroDivisionError: by zero"),
        (MemoryError(), "ApplyError", "MemoryError: "),
        (OSError("\udcff"), "ApplyError", "OSError: \\udcff"),
        (EngineVersionError("vllm 9"), "EngineVersionError", "vllm 9"),
        (PoisonedError("gone", hint="see /data/\udcff"), "PoisonedError", "gone"),
    ],
)
def test_whatever_an_engine_raises_is_a_reply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raised: Exception, error: str, message: str
) -> None:
    def fail() -> EngineModel:
        raise raised

    caplog.set_level(logging.CRITICAL)  # a lone surrogate in a captured log ends a worker of pytest

    rank = RankService(fail, 2, RankSettings(spool=tmp_path))
    reply = decode_reply(rank.answer(encode(AttachRequest(url=URL, specs=(), aliases={}))))
    hint = "see /data/\\udcff" if isinstance(raised, PoisonedError) else ""
    assert reply == Refusal(rank=2, error=error, message=message, hint=hint)


KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.DeltaChainError)
}


@pytest.mark.parametrize("name", [*KINDS, "KeyError", "TypeVar", "Any", ""])
def test_a_refusal_becomes_the_error_that_it_stands_for(name: str) -> None:
    expected = KINDS.get(name, ApplyError)
    if issubclass(expected, errors.DigestMismatchError):
        expected = ApplyError  # a refusal has no digests
    error = error_of(Refusal(rank=3, error=name, message="no"), version=5)
    assert type(error) is expected
    assert error.args == ("rank 3: no",)
    if isinstance(error, ApplyError):
        assert error.version == 5


def test_a_damaged_rank_speaks_before_others() -> None:
    kinds = ["TensorMismatchError", "EngineDamagedError", "PoisonedError"]
    refusals = [Refusal(rank=rank, error=kind, message="no") for rank, kind in enumerate(kinds, 1)]
    with pytest.raises(EngineDamagedError, match="rank 2"):
        raise_refusal([AgreeReply(rank=0), *refusals])
    with pytest.raises(TensorMismatchError, match="rank 1"):
        raise_refusal([refusals[0], refusals[2]])
    raise_refusal([AgreeReply(rank=0)])


def test_only_the_leader_that_attached_last_is_obeyed(rank: RankService, model: FakeModel) -> None:
    for leader in ("one", "two"):
        assert isinstance(rank.handle(attach(model, leader)), AttachReply)
    for request in [*REQUESTS, PollRequest(ticket=1), LastSwapRequest()]:
        asked = msgspec.structs.replace(request, leader="one", sequence=2)
        reply = refused(rank.handle(asked), "LeaderReplacedError")
        assert "another leader has attached this rank since" in reply.message
        assert (reply.leader, reply.sequence) == ("one", 2)
    assert isinstance(rank.handle(StatusRequest(leader="two", sequence=2)), StatusReply)


def test_every_reply_repeats_its_request(rank: RankService, model: FakeModel) -> None:
    assert isinstance(rank.handle(attach(model, "one")), AttachReply)
    for number, request in enumerate([*REQUESTS, PollRequest(ticket=1), PollRequest(ticket=1)]):
        asked = msgspec.structs.replace(request, leader="one", sequence=number)
        reply = rank.handle(asked)
        assert (reply.rank, reply.leader, reply.sequence) == (0, "one", number)
        assert not isinstance(reply, StagedReply), "there is no such spool"


@pytest.mark.full
def test_a_model_has_one_service_for_as_long_as_it_lives(tmp_path: Path, model: FakeModel) -> None:
    services, here, there = RankServices(), nn.Linear(1, 1), nn.Linear(1, 1)
    settings = RankSettings(spool=tmp_path)
    first = services.of(here, lambda: model, 0, settings)
    assert services.of(here, lambda: model, 0, settings) is first
    assert services.of(there, lambda: model, 1, settings) is not first
    services.settle(here)
    gone = weakref.ref(first)
    del first, here
    gc.collect()
    assert gone() is None
    services.settle(nn.Linear(1, 1))


@pytest.mark.parametrize(
    "reply",
    [
        Refusal(error="ConfigError", message="m", hint="see /data/\udcff"),
        AttachReply(tensors={"w": Classified(kind="refused", reason="in /data/\udcff")}),
    ],
)
def test_a_lone_surrogate_in_a_reply_becomes_a_question_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: RankReply
) -> None:
    rank = RankService(lambda: pytest.fail("no model"), 2, RankSettings(spool=tmp_path))
    handlers: dict[type[RankRequest], Handler] = {AttachRequest: lambda _: reply}
    monkeypatch.setattr(rank, "_handlers", handlers)
    text = rank.answer(encode(AttachRequest(url=URL, specs=(), aliases={})))
    assert "/data/?" in str(decode_reply(text))
