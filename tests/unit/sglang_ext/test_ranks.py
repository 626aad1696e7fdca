import asyncio
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from fastapi import FastAPI
from starlette.requests import Request
from torch import Tensor, nn

from deltachain.control.server import Control
from deltachain.errors import ApplyError, ConfigError
from deltachain.replica.engine import pause_mode
from deltachain.replica.leader import Leader
from deltachain.replica.messages import (
    AnyRequest,
    Refusal,
    StatusRequest,
    SwapReply,
    SwapRequest,
    decode_reply,
    encode,
)
from deltachain.replica.settings import ReplicaSettings
from deltachain.subscribe import SubscribeConfig
from deltachain_sglang import compat, loading, ranks, routes
from deltachain_sglang import engine as engines
from deltachain_sglang.model import SglangModel, Shadow
from deltachain_sglang.ranks import SchedulerReply, SchedulerRequest, decode_scheduler_reply
from deltachain_sglang.start_check import PAUSES
from deltachain_sglang.table import MOVING
from tests.unit.control.replicas import followed, leader_of
from tests.unit.replica.replicas import Followed

TOKEN = "one that nobody guesses"  # noqa: S105


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Followed]:
    yield from followed(tmp_path)


@pytest.fixture
def leader(here: Followed) -> Iterator[Leader]:
    yield from leader_of(here)


async def _never(*_: object) -> Any:
    raise NotImplementedError


async def _nothing_more() -> Any:
    await asyncio.sleep(60)


def asked_of(path: str, headers: dict[str, str]) -> tuple[bool, str]:
    given = {"host": "a", **headers}  # as every client of HTTP 1.1 sends it
    pairs = [(name.encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": pairs, "server": ("a", 1)}
    request = Request({**scope, "query_string": b"", "scheme": "http"}, _nothing_more)
    told = routes.on_update(_never, None, SimpleNamespace(model_path=path), request)
    done, message, _ = asyncio.run(told)
    return done, message


@pytest.mark.parametrize(
    ("is_guarded", "headers", "done"),
    [
        (False, {}, False),
        (False, {"authorization": "Bearer wrong"}, False),
        (False, {"authorization": f"Bearer {TOKEN}"}, True),
        (False, {"x-deltachain-token": TOKEN}, True),
        (True, {}, True),  # SGLang has asked for its key before
    ],
)
def test_a_version_needs_the_token_where_no_key_guards_the_route(
    leader: Leader,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_guarded: bool,
    headers: dict[str, str],
    done: bool,
) -> None:
    app = FastAPI()
    control = Control(leader, "", token=TOKEN, is_open=False, is_guarded=is_guarded)
    app.state.deltachain = control
    monkeypatch.setattr(compat, "app", lambda: app)
    found, message = asked_of("deltachain:1", headers)
    assert found is done
    assert leader.subscriber.version == (1 if done else None)
    assert TOKEN not in message


@pytest.mark.parametrize("named", ["-1", "1.5", "file:///etc", "9" * 5000, "\u0661", " 1"])
def test_what_is_no_version_is_refused(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    app = FastAPI()
    app.state.deltachain = Control(leader, "", token="", is_open=True, is_guarded=True)
    monkeypatch.setattr(compat, "app", lambda: app)
    found, message = asked_of(f"deltachain:{named}", {})
    assert not found
    assert "is no version" in message
    assert len(message) < 200


SHAPE = (4, 6)


class Fp8Method:
    """Quantises a layer after loading, as SGLang's method for online quantisation does."""

    def process_weights_after_loading(self, layer: Any) -> None:
        raw = layer.weight.data.float()
        scale = raw.abs().amax(1, keepdim=True) / 448
        layer.weight = nn.Parameter((raw / scale).to(torch.float8_e4m3fn), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        layer.largest = float(raw.abs().max())


class UnquantizedMethod:
    def process_weights_after_loading(self, layer: Any) -> None:
        del layer


class Model(nn.Module):
    """Two layers, one of which is quantised."""

    def __init__(self) -> None:
        super().__init__()
        for name, method in (("coded", Fp8Method()), ("plain", UnquantizedMethod())):
            layer: Any = nn.Module()
            layer.weight = nn.Parameter(torch.zeros(SHAPE).bfloat16(), requires_grad=False)
            layer.quant_method = method
            self.add_module(name, layer)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SglangModel:
    """A model that SGLang loaded, as far as nothing of SGLang is needed."""

    def load(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], _: object) -> None:
        for name, tensor in tensors:
            model.get_parameter(name).data.copy_(tensor)

    def acting(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Any]]:
        return [(m, m.quant_method) for m in modules if hasattr(m, "quant_method")]

    def process(modules: Iterable[nn.Module], _: object) -> None:
        for module, method in acting(modules):
            method.process_weights_after_loading(module)

    monkeypatch.setattr(loading, "in_dtype", lambda _: nullcontext())
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(loading, "acting", acting)
    monkeypatch.setattr(loading, "process", process)
    live = Model()
    load(live, weights(0), None)
    process(live.modules(), None)
    with torch.device("meta"):
        raw = Model()
    made = object.__new__(SglangModel)
    device = torch.device("cpu")
    vars(made).update(
        model=live,
        _config=SimpleNamespace(dtype=torch.bfloat16),
        _device=device,
        _known={},
        _shadow=Shadow(raw, live, torch.bfloat16, device),
    )
    return made


def weights(seed: int) -> list[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    return [(f"{n}.weight", torch.randn(SHAPE).bfloat16()) for n in ("coded", "plain")]


def test_a_quantised_layer_is_loaded_apart(engine: SglangModel) -> None:
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    with engine.loaded_apart(frozenset({"coded"}), weights(1)[:1]) as found:
        assert set(found) == {"coded"}
        fresh: Any = found["coded"]
        live: Any = engine.modules()["coded"]
        other: Any = Model().get_submodule("coded")
        other.weight.data.copy_(weights(1)[0][1])
        Fp8Method().process_weights_after_loading(other)
        assert torch.equal(fresh.weight.data.view(torch.uint8), other.weight.data.view(torch.uint8))
        assert torch.equal(fresh.weight_scale, other.weight_scale)
        assert fresh.largest == other.largest != live.largest
    now = engine.tensors()
    assert now.keys() == before.keys()
    assert all(torch.equal(now[n].view(torch.uint8), before[n].view(torch.uint8)) for n in before)
    with engine.loaded_apart(frozenset({"coded"}), weights(2)[:1]) as again:
        assert again["coded"].get_parameter("weight_scale").numel()


def test_layers_that_are_not_quantised_are_not_loaded(
    engine: SglangModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(loading, "load")
    with engine.loaded_apart(frozenset({"plain"}), weights(1)[1:]) as found:
        assert found == {}


def question(request: AnyRequest | None = None, *, flush: bool = False) -> str:
    asked = SchedulerRequest(request=request or StatusRequest(leader="a"), flush=flush)
    return "deltachain:" + encode(asked)


def swap(*, flush: bool = False) -> str:
    return question(SwapRequest(leader="a", ticket=1, version=1), flush=flush)


class Scheduler:
    """What of SGLang's is asked whether it may flush, and to."""

    def __init__(self) -> None:
        self._engine_paused = True
        self.grammar_manager = SimpleNamespace(grammar_queue=["compiling"])
        self.running = 0
        self.chunked_req = None
        self.flushed: list[bool] = []

    def is_fully_idle(self, *, ignore_waiting: bool) -> bool:
        return ignore_waiting and not self.running and not self.grammar_manager.grammar_queue

    def collect_inflight_reqs(self) -> set[object]:
        return set()

    def flush_cache(self, *, empty_cache: bool) -> bool:
        done = self.is_fully_idle(ignore_waiting=self._engine_paused)
        if done:
            self.flushed.append(empty_cache)
        return done


def of_rank_one(mine: object) -> object:
    """What the other rank has, where this one has that."""
    if not isinstance(mine, str):
        return mine
    return encode(msgspec.structs.replace(decode_reply(mine), rank=1))


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """SGLang's, of one of two ranks; the other one answers as it does."""
    monkeypatch.setenv("DELTACHAIN_SPOOL", str(tmp_path))
    monkeypatch.setattr(compat, "gather", lambda mine: [mine, of_rank_one(mine)])
    monkeypatch.setattr(compat, "rank_of", lambda: 0)
    monkeypatch.setattr(compat, "named", lambda: "0")
    monkeypatch.setattr(compat, "stages", lambda: 1)
    monkeypatch.setattr(ranks, "_STAGES", ranks._Stages())
    monkeypatch.setattr(compat, "check_reply", lambda text: text)
    forgotten: list[bool] = []
    monkeypatch.setattr(compat, "forget_embeddings", lambda: forgotten.append(True))
    model = nn.Linear(2, 2)
    updater = SimpleNamespace(model_config=None, device="cpu")
    loaded = SimpleNamespace(model_path="base")
    runner = SimpleNamespace(model=model, weight_updater=updater, model_config=loaded)
    scheduler = Scheduler()
    return SimpleNamespace(
        offload_tags=set(),
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=None,
        scheduler=scheduler,
        is_fully_idle=scheduler.is_fully_idle,
        flush_cache=scheduler.flush_cache,
        forgotten=forgotten,
    )


def asked(manager: Any, action: str) -> SchedulerReply:
    request = SimpleNamespace(action=action)
    return decode_scheduler_reply(ranks.on_request(mock.Mock(), manager, request))


def test_a_request_is_answered_for_all_ranks(manager: Any) -> None:
    found = asked(manager, question())
    assert (found.status, [reply.rank for reply in found.replies]) == ("answered", [0, 1])
    assert isinstance(found.replies[0], Refusal)
    assert "another leader" in found.replies[0].message  # nobody has attached
    assert found.replies[0].draft == ""


@pytest.mark.parametrize(
    ("draft", "path", "chosen", "does"),
    [
        (nn.Identity(), "base", None, "Identity follows the chain"),
        (nn.Identity(), "base", "tokens.pt", "Identity keeps its weights"),
        (nn.Identity(), "another", None, "Identity keeps its weights"),
        (nn.Linear(2, 2), "base", None, "Linear keeps its weights"),  # a whole model
    ],
)
def test_a_reply_says_what_a_draft_follows(
    manager: Any,
    monkeypatch: pytest.MonkeyPatch,
    draft: nn.Module,
    path: str,
    chosen: str | None,
    does: str,
) -> None:
    spec = SimpleNamespace(speculative_token_map=chosen)
    moe = SimpleNamespace(**MOVING)
    context = SimpleNamespace(get_spec=lambda: spec, get_exec=lambda: SimpleNamespace(moe=moe))
    monkeypatch.setattr(compat, "context", lambda: context)
    runner = SimpleNamespace(model=draft, model_config=SimpleNamespace(model_path=path))
    runners = [("draft", runner)]
    manager.draft_worker = SimpleNamespace(weight_update_runners=lambda: runners)
    assert {reply.draft for reply in asked(manager, question()).replies} == {does}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1",
        '{"request": 1}',
        '{"request": {"call": "no such"}}',
        '{"request": {"call": "status"}, "flush": 3}',
        '{"request": {"call": "status"}, "more": 3}',
        '"\\ud800"',
        "\ud800",
    ],
)
def test_no_request_raises(manager: Any, text: str) -> None:
    found = asked(manager, f"deltachain:{text}")
    assert len(found.replies) == 2
    for reply in found.replies:
        assert isinstance(reply, Refusal)
        assert "cannot read the leader's request" in reply.message


def test_every_truncated_request_is_refused(manager: Any) -> None:
    action = question()
    for end in range(len("deltachain:"), len(action)):
        assert all(isinstance(reply, Refusal) for reply in asked(manager, action[:end]).replies)


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last)", "{", "[]", '{"x": 1}'])
def test_what_is_no_reply_of_the_schedulers_is_a_typed_error(text: str) -> None:
    with pytest.raises(ApplyError, match="cannot read the schedulers' reply"):
        decode_scheduler_reply(text)


def test_released_weights_are_neither_read_nor_written(manager: Any) -> None:
    manager.offload_tags.add(compat.WEIGHTS)
    assert asked(manager, question()) == SchedulerReply(status="asleep")


@pytest.mark.parametrize("busy", [False, True])
def test_replies_of_later_stages_are_returned_to_the_next_request(
    manager: Any, writes: mock.Mock, monkeypatch: pytest.MonkeyPatch, *, busy: bool
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(compat, "stages", lambda: 2)
    monkeypatch.setattr(compat, "send_back", sent.append)
    monkeypatch.setattr(compat, "receive_back", lambda count: [sent[count - 1]])
    for number in (1, 0):
        manager.scheduler.running = busy and number
        monkeypatch.setattr(compat, "stage", lambda number=number: number)
        asked(manager, question())  # of a leader that ended before it collected
        assert len(asked(manager, swap(flush=True)).replies) == 2
    found = asked(manager, f"deltachain:{ranks.COLLECT}")
    assert (found.status, len(found.replies)) == (("busy", 2) if busy else ("answered", 4))
    assert asked(manager, f"deltachain:{ranks.COLLECT}") == SchedulerReply()
    writes.reset_mock()
    ask = encode(SchedulerRequest(request=StatusRequest(leader="a"), flush=True, ask=True))
    assert asked(manager, f"deltachain:{ask}") == SchedulerReply()
    writes.assert_not_called()


def test_other_checks_are_sglangs_own(manager: Any) -> None:
    original = mock.Mock(return_value="checked")
    request = SimpleNamespace(action="checksum")
    assert ranks.on_request(original, manager, request) == "checked"
    original.assert_called_once_with(manager, request)


def busy(rank: int, why: str = ranks.BUSY) -> Refusal:
    return Refusal(rank=rank, error="PartialApplyError", message=why)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    handle = mock.Mock(return_value=SwapReply(rank=0, seconds=0, version=1, pid=1))
    service = SimpleNamespace(handle=handle, refuse=lambda _, exc: busy(0, exc.args[0]))
    monkeypatch.setattr(ranks, "_SERVICES", SimpleNamespace(of=lambda *_: service))
    return handle


@pytest.mark.parametrize("flush", [True, False])
def test_a_swap_forgets_what_older_weights_made_of_images(manager: Any, *, flush: bool) -> None:
    asked(manager, question())
    assert not manager.forgotten
    asked(manager, swap(flush=flush))
    assert manager.forgotten


def test_caches_go_with_a_swap_and_requests_that_wait_for_a_grammar_stay(
    manager: Any, writes: mock.Mock
) -> None:
    replies = asked(manager, swap(flush=True)).replies
    assert [type(reply) for reply in replies] == [SwapReply, SwapReply]
    assert manager.scheduler.flushed == [False]
    assert manager.scheduler.grammar_manager.grammar_queue == ["compiling"]
    asked(manager, swap())
    assert manager.scheduler.flushed == [False], "it was not asked for"
    assert writes.call_count == 2


def test_nothing_is_written_while_a_request_keeps_the_cache(
    manager: Any, writes: mock.Mock
) -> None:
    manager.scheduler.running = 1
    assert asked(manager, swap(flush=True)).replies == (busy(0), busy(1))
    writes.assert_not_called()


def test_nothing_is_written_while_a_request_keeps_another_ranks_cache(
    manager: Any, writes: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = compat.gather
    monkeypatch.setattr(compat, "gather", lambda mine: gather(mine) if mine is not True else [0, 1])
    assert asked(manager, swap(flush=True)).replies == (busy(0), busy(1))
    writes.assert_not_called()


def test_no_rank_flushes_unless_all_have_written(
    manager: Any, writes: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = encode(Refusal(rank=1, error="PartialApplyError", message="no"))
    monkeypatch.setattr(
        compat, "gather", lambda mine: [mine, other if isinstance(mine, str) else mine]
    )
    asked(manager, swap(flush=True))
    assert manager.scheduler.flushed == []
    writes.assert_called_once()


def request_of(tokens: int, *events: tuple[str, int], done: bool = False) -> Any:
    return SimpleNamespace(
        output_ids=[0] * tokens,
        weight_version_events=[Event(*event) for event in events],
        finished=lambda: done,
    )


class Event(NamedTuple):
    """SGLang's: until which token the version before counts."""

    old_version: str
    num_output_tokens: int


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A scheduler that goes from version 6 to another, with a step that is not handed out yet."""
    module = SimpleNamespace(WeightVersionEvent=Event)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.weight_versions", module)
    monkeypatch.setattr(compat, "named", lambda: "6")

    def rename(
        *requests: Any,
        chunked: Any = None,
        version: str | None = "7",
        accepted: list[int] | None = None,
    ) -> None:
        def record(scheduler: Any, new_version: str | None) -> None:
            del scheduler, new_version
            for request in requests:
                if request.output_ids:
                    event = Event("6", len(request.output_ids))
                    request.weight_version_events.append(event)

        event = mock.Mock()
        lens = None if accepted is None else mock.Mock(tolist=lambda: accepted)
        step = SimpleNamespace(accept_lens=lens, copy_done=event)
        queue = [(SimpleNamespace(reqs=list(requests)), step)]
        scheduler = SimpleNamespace(result_queue=queue, chunked_req=chunked)
        ranks.on_name(record, scheduler, version)
        assert event.synchronize.called == (lens is not None and version == "7")

    return rename


def test_a_step_that_is_not_handed_out_keeps_its_label(renamed: Callable[..., None]) -> None:
    running, first = request_of(4), request_of(0)
    renamed(running, first)
    assert running.weight_version_events == [("6", 5)]
    assert first.weight_version_events == [("6", 1)], "its prompt was computed by version 6"


def test_a_step_with_drafts_labels_each_accepted_token(renamed: Callable[..., None]) -> None:
    running, others = request_of(4), request_of(2)
    renamed(running, others, accepted=[3, 1])
    assert running.weight_version_events == [("6", 7)]
    assert others.weight_version_events == [("6", 3)]


def test_a_request_without_a_token_is_labelled_with_the_version_of_its_prompt(
    renamed: Callable[..., None],
) -> None:
    ended, part = request_of(4, done=True), request_of(0)
    renamed(ended, part, chunked=part)
    assert ended.weight_version_events == [("6", 4)]
    assert part.weight_version_events == [("6", 0)], "it has made no token yet"


def test_a_step_between_two_updates_keeps_its_first_label(renamed: Callable[..., None]) -> None:
    waiting = request_of(4, ("5", 5))
    renamed(waiting)
    assert waiting.weight_version_events == [("5", 5), ("6", 5)]


def test_a_name_that_does_not_change_labels_nothing(renamed: Callable[..., None]) -> None:
    running = request_of(0)
    for version in ("6", None):
        renamed(running, version=version)
    assert running.weight_version_events == []


def test_a_paused_scheduler_is_not_taken_for_one_that_hangs() -> None:
    scheduler = SimpleNamespace(cur_batch_for_debug="running")
    original = mock.Mock(return_value="paused")
    assert ranks.on_pause(original, scheduler, "in_place") == "paused"
    assert scheduler.cur_batch_for_debug is None


@pytest.mark.parametrize("path", ["deltachain:x", "deltachain:-1", "deltachain:s3://elsewhere"])
def test_a_path_of_ours_names_a_version_or_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = SimpleNamespace(leader=object(), refusal="", run=mock.AsyncMock())
    app = SimpleNamespace(state=SimpleNamespace(deltachain=control))
    monkeypatch.setattr(compat, "app", lambda: app)
    request = SimpleNamespace(model_path=path)
    done, message, _ = asyncio.run(routes.on_update(mock.AsyncMock(), None, request))
    assert not done
    assert "is no version" in message
    control.run.assert_not_called()


def test_a_server_that_follows_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    control = SimpleNamespace(leader=None, refusal="DELTACHAIN_URL is not set")
    app = SimpleNamespace(state=SimpleNamespace(deltachain=control))
    monkeypatch.setattr(compat, "app", lambda: app)
    request = SimpleNamespace(model_path="deltachain:")
    assert asyncio.run(routes.on_update(mock.AsyncMock(), None, request)) == (
        False,
        "DELTACHAIN_URL is not set",
        0,
    )


@pytest.mark.parametrize("done", [True, False])
def test_a_checkpoint_that_was_loaded_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    control = SimpleNamespace(leader=object(), run=mock.AsyncMock(side_effect=ApplyError("no")))
    app = SimpleNamespace(state=SimpleNamespace(deltachain=control))
    monkeypatch.setattr(compat, "app", lambda: app)
    original = mock.AsyncMock(return_value=(done, "loaded", 0))
    request = SimpleNamespace(model_path="/elsewhere")
    assert asyncio.run(routes.on_update(original, None, request)) == (done, "loaded", 0)
    assert control.run.await_count == int(done)


def test_only_the_leader_asks_the_ranks() -> None:
    original = mock.AsyncMock(return_value="checked")
    done, message, *_ = asyncio.run(
        routes.on_check(original, None, SimpleNamespace(action=question()))
    )
    assert (done, message) == (False, "only this server's leader asks that")
    original.assert_not_called()
    assert asyncio.run(routes.on_check(original, None, SimpleNamespace(action="checksum")))


def test_pause_modes() -> None:
    assert pause_mode("", PAUSES) == "retract"
    assert pause_mode("in_place", PAUSES) == "in_place"
    with pytest.raises(ConfigError, match="none of retract, in_place, abort"):
        pause_mode("keep", PAUSES)


@pytest.mark.parametrize(
    ("dp_rank", "attention", "number"), [(None, False, 1), (1, False, 3), (1, True, 1)]
)
def test_ranks_are_numbered_over_engines_and_attention_has_one(
    monkeypatch: pytest.MonkeyPatch, *, dp_rank: int | None, attention: bool, number: int
) -> None:
    group = SimpleNamespace(world_size=2, rank_in_group=1)
    parallel = SimpleNamespace(
        tp_group=group, dp_rank=dp_rank, attn_dp_enabled=attention, pp_size=1, pp_rank=0
    )
    context = SimpleNamespace(get_parallel=lambda: parallel)
    monkeypatch.setattr(compat, "context", lambda: context)
    assert compat.rank_of() == number


@pytest.mark.parametrize("ends", [True, False])
def test_engines_are_asked_again_while_one_is_busy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, ends: bool
) -> None:
    """What it refuses in the end is taken back on the others: none moves."""
    free = encode(SchedulerReply(replies=(SwapReply(rank=1, seconds=0, version=1, pid=1),)))
    waits = encode(SchedulerReply(status="busy", replies=(busy(0),)))
    wrote = encode(SchedulerReply(replies=(SwapReply(rank=0, seconds=0, version=1, pid=2),)))
    asked = itertools.chain([[free, waits]] * 2, itertools.repeat([free, wrote if ends else waits]))

    class Server:
        def __init__(self, _: object) -> None: ...

        async def check_weights(self, action: str) -> list[str]:
            assert '"flush":true' in action
            return next(asked)

    monkeypatch.setattr(compat, "check_version", lambda mode: mode)
    monkeypatch.setattr(compat, "check_layout", lambda _: None)
    monkeypatch.setattr(compat, "stages", lambda: 1)
    monkeypatch.setattr(compat, "Server", Server)
    monkeypatch.setattr(engines, "BUSY_S", 0.1)
    loop = asyncio.new_event_loop()
    settings = ReplicaSettings(subscribe=SubscribeConfig(url=str(tmp_path)))
    engine = engines.InProcessEngine(None, loop, settings)
    found = engine.call(SwapRequest(leader="a", ticket=1, version=1))
    assert [type(reply) for reply in found] == [SwapReply if ends else Refusal, SwapReply]
    loop.close()
