import asyncio
import gc
import sys
import weakref
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import pytest
import torch
from fastapi import Body, FastAPI, HTTPException, Query, Request
from fastapi.testclient import TestClient
from torch import nn

from deltachain.control.server import Control
from deltachain.errors import ConfigError, EngineVersionError, TensorMismatchError
from deltachain.replica.leader import Leader
from deltachain_vllm.compat import (
    call_workers,
    check_experts,
    check_layout,
    rank_of,
    shares_experts,
)
from deltachain_vllm.routes import EndpointPlugin, attach_own
from deltachain_vllm.scales import CREATE, OPS, owned, uncaptured
from deltachain_vllm.start_check import check_front, check_listed, check_start, is_server
from tests.unit.control.replicas import followed, leader_of
from tests.unit.replica.replicas import Followed


def parallel_of(**fields: Any) -> Any:
    usual = {
        "world_size": 2,
        "data_parallel_size": 4,
        "data_parallel_index": 3,
        "data_parallel_rank_local": 1,
        "data_parallel_hybrid_lb": False,
        "data_parallel_external_lb": False,
        "local_engines_only": False,
    }
    return SimpleNamespace(**{**usual, **fields})


@pytest.mark.parametrize(
    ("fields", "environment", "number"),
    [
        ({}, {}, 7),  # engine 3 of 4
        ({"data_parallel_hybrid_lb": True}, {}, 3),  # the second engine of this server
        ({"data_parallel_external_lb": True, "data_parallel_size": 1}, {}, 1),
        ({"data_parallel_external_lb": True, "local_engines_only": True}, {}, 7),  # shares experts
        ({}, {"VLLM_DP_SIZE": "4"}, 1),  # a program for each engine
        ({"data_parallel_index": 0, "data_parallel_rank_local": None}, {}, 1),
    ],
)
def test_ranks_are_numbered_over_the_engines_of_one_server(
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    environment: dict[str, str],
    number: int,
) -> None:
    monkeypatch.delenv("VLLM_DP_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rank_of(parallel_of(**fields), 1) == number


@pytest.mark.parametrize(
    ("engines", "moe", "shared"), [(2, True, True), (1, True, False), (2, False, False)]
)
def test_engines_that_share_experts_may_not_release_their_weights(
    *, engines: int, moe: bool, shared: bool
) -> None:
    parallel = parallel_of(local_engines_only=True, data_parallel_size=engines)
    model = SimpleNamespace(is_moe=moe, enable_sleep_mode=False)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    assert shares_experts(config) is shared
    check_layout(config)
    if shared:
        with pytest.raises(ConfigError, match="is no server"):
            check_layout(config, in_process=True)
        model.enable_sleep_mode = True
        with pytest.raises(ConfigError, match="--enable-sleep-mode"):
            check_layout(config)


def test_an_engine_that_starts_with_random_weights_is_refused() -> None:
    """Proving the layout of one takes minutes, in which it stands still, and fails."""
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    with pytest.raises(ConfigError, match="not with a checkpoint"):
        check_layout(config)
    config.load_config.load_format = "auto"
    check_layout(config)


def test_replies_of_all_engines_are_asked_for() -> None:
    async def call_all(*asked: object) -> list[list[str]]:
        assert asked == ("collective_rpc", "handle", None, ("text",), None)
        return [["0", "1"], ["2", "3"]]

    async def call_first(method: str, limit_s: float | None, args: tuple[str, ...]) -> list[str]:
        assert limit_s is None
        return [method, *args]

    async def called(core: object, engines: int) -> list[str]:
        config = SimpleNamespace(parallel_config=parallel_of(data_parallel_size=engines))
        client = SimpleNamespace(engine_core=core, vllm_config=config, collective_rpc=call_first)
        return await call_workers(client, "handle", "text")

    known = SimpleNamespace(call_utility_all_async=call_all)
    assert asyncio.run(called(known, 2)) == ["0", "1", "2", "3"]
    assert asyncio.run(called(None, 1)) == ["handle", "text"]
    with pytest.raises(EngineVersionError, match="its first data-parallel engine only"):
        asyncio.run(called(None, 2))


def test_ranks_that_come_and_go_are_refused_by_the_option() -> None:
    parallel = SimpleNamespace(enable_expert_parallel=True, tensor_parallel_size=2)
    check_experts(SimpleNamespace(parallel_config=parallel))
    parallel.enable_elastic_ep = True
    with pytest.raises(ConfigError, match="--enable-elastic-ep"):
        check_experts(SimpleNamespace(parallel_config=parallel))


@pytest.mark.parametrize(
    ("command", "serves"),
    [
        (["/venv/bin/vllm", "serve", "model"], True),
        (["/x/vllm/entrypoints/cli/main.py", "serve", "model"], True),
        (["/x/vllm/entrypoints/openai/api_server.py", "--model", "model"], True),
        (["/venv/bin/vllm", "serve", "model", "--headless"], False),
        (["/venv/bin/vllm", "bench", "throughput"], False),
        (["train.py", "serve"], False),
        (["-c"], False),
        ([], False),
    ],
)
def test_a_server_is_known_by_its_command(command: list[str], serves: bool) -> None:
    assert is_server(command) is serves


@pytest.mark.parametrize(
    ("command", "environment", "named"),
    [
        (["vllm", "serve", "model", "--grpc"], {}, "--grpc"),
        (["vllm", "serve", "model"], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND"),
    ],
)
def test_a_front_end_without_plugins_is_refused_by_name(
    command: list[str], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check_front(command, environment)
    check_front(command[:3], {"VLLM_USE_RUST_FRONTEND": "0"})


def test_a_program_with_an_engine_is_told_that_it_follows_nothing_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    check_start()
    assert "call deltachain_vllm.follow(engine, url)" in caplog.text


@pytest.mark.parametrize("named", ["", "deltachain", "deltachain_http_x", "other,deltachain"])
def test_a_server_without_our_routes_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="loads no routes") as caught:
        check_listed(named)
    assert "VLLM_PLUGINS=deltachain,deltachain_http" in caught.value.hint


class TakesTensors:
    """A backend such as FlashAttention: its kernel reads scales from memory."""

    def forward(self, layer: Any) -> object:
        return layer._k_scale


class TakesNumbers:
    """A backend such as that of MiniMax M3: its kernel is called with numbers."""

    def forward(self, layer: Any) -> object:
        return layer._k_scale_float


class OfAKind(TakesNumbers):
    """Another that inherits from it."""


class Either:
    def get_impl_variants(self) -> tuple[object, ...]:
        return TakesTensors(), TakesNumbers()


def model(impl: object) -> nn.Module:
    made = nn.Module()
    made.attn = nn.Module()
    vars(made.attn).update(impl=impl, _k_scale_float=1.0)
    return made


def config(*, full: bool) -> Any:
    mode = SimpleNamespace(has_full_cudagraphs=lambda: full)
    return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))


def load(into: nn.Module, scale: float, *, full: bool = True) -> None:
    with uncaptured(into, config(full=full)):
        vars(into.attn)["_k_scale_float"] = scale


@pytest.mark.parametrize("impl", [TakesNumbers(), OfAKind(), Either()])
def test_numbers_in_captured_graphs_may_not_change(impl: object) -> None:
    load(model(impl), 1.0)
    with pytest.raises(TensorMismatchError, match="have the scales of attn as numbers"):
        load(model(impl), 2.0)


def test_numbers_may_change_where_no_graph_has_them() -> None:
    load(model(TakesTensors()), 2.0)
    load(model(TakesNumbers()), 2.0, full=False)
    with uncaptured(
        model(TakesNumbers()),
        SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=None)),
    ):
        pass


def test_what_cannot_be_read_is_taken_for_one_that_takes_numbers() -> None:
    unread: Any = type("Unread", (), {"__module__": "builtins"})
    with pytest.raises(TensorMismatchError, match="captured graphs"):
        load(model(unread()), 2.0)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Followed]:
    yield from followed(tmp_path)


@pytest.fixture
def leader(here: Followed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    engine: Any = here.engine
    monkeypatch.setattr(
        engine, "fall_asleep", lambda: setattr(engine, "asleep", True), raising=False
    )
    yield from leader_of(here)


@pytest.fixture(params=["0.31", "0.32"])
def server(leader: Leader, request: pytest.FixtureRequest) -> TestClient:
    """With routes as the development mode of a vLLM has them."""
    app = FastAPI()

    async def sleep(raw_request: Request, level: Annotated[int, Query(ge=0, le=2)] = 1) -> int:
        del raw_request
        if level == 2:
            raise HTTPException(500, "cannot")
        return level

    async def unparsed(raw_request: Request) -> int:
        level = int(raw_request.query_params.get("level", "1"))
        if level > 2:
            raise HTTPException(422)
        return await sleep(raw_request, level)

    app.post("/sleep")(sleep if request.param == "0.32" else unparsed)

    @app.post("/wake_up")
    async def wake_up(raw_request: Request) -> list[str]:
        return raw_request.query_params.getlist("tags")

    @app.post("/update_weights")
    async def update_weights(
        raw_request: Request, update_info: Annotated[dict[str, Any], Body(embed=True)]
    ) -> list[str]:
        del raw_request
        return [*update_info]

    paths = [getattr(route, "path", "") for route in app.routes]
    attach_own(app)
    assert [getattr(route, "path", "") for route in app.routes] == paths
    app.state.deltachain = Control(leader, "", token="", is_open=True)
    leader.update()
    assert leader.status().ready
    return TestClient(app)


def test_a_sleeping_replica_is_not_ready_until_all_of_it_is_awake(
    server: TestClient, leader: Leader, here: Followed
) -> None:
    assert server.post("/sleep").json() == 1
    assert leader.status().reason == "asleep: the engine has released its kv_cache, weights"
    assert getattr(here.engine, "asleep")  # noqa: B009 - set by the fixture
    assert server.post("/wake_up?tags=weights").json() == ["weights"]
    assert not getattr(here.engine, "asleep")  # noqa: B009
    assert not leader.status().ready
    server.post("/wake_up?tags=kv_cache")
    assert leader.status().ready


def test_weights_that_were_lost_in_its_sleep_are_healed_as_it_wakes(
    server: TestClient, leader: Leader, here: Followed
) -> None:
    here.anchor()
    server.post("/sleep?level=1")
    here.scribble(0, "layers.0.norm.weight")
    server.post("/wake_up")
    assert leader.status().ready
    assert here.holds(2)


def test_a_server_that_only_stops_generating_is_not_ready_either(
    server: TestClient, leader: Leader
) -> None:
    server.post("/sleep?level=0")
    assert not leader.status().ready
    server.post("/wake_up")
    assert leader.status().ready


def test_a_trainer_names_a_version_of_the_same_history(
    server: TestClient, leader: Leader, here: Followed
) -> None:
    def named(version: int, manifest: str) -> Any:
        info = {"version": version, "manifest": manifest}
        return server.post("/update_weights", json={"update_info": info})

    here.publish(3)
    digest = leader.subscriber.chain.read(3).digest
    assert named(3, digest).json()["version"] == 3
    assert here.holds(3)
    here.publish(4)
    answer = named(4, digest)  # as a trainer of another chain does
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "ChainError")
    assert digest in answer.json()["error"]["message"]
    others = {"update_info": {"names": ["a"], "ticket": 1}}
    assert server.post("/update_weights", json=others).json() == ["names", "ticket"]


def test_a_sleep_that_fails_leaves_it_ready(server: TestClient, leader: Leader) -> None:
    assert server.post("/sleep?level=2").status_code == 500
    assert leader.status().ready


def test_what_the_route_refuses_changes_nothing(server: TestClient, leader: Leader) -> None:
    assert server.post("/sleep?level=9").status_code == 422
    assert leader.status().ready


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's kernels, of which one keeps an address."""
    made: Any = ModuleType(OPS)
    setattr(made, CREATE, lambda _, scales, *__: SimpleNamespace(at=scales.data_ptr()))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, OPS, made)
    return made


def test_what_is_packed_in_a_reload_keeps_its_scales(ops: Any) -> None:
    create = getattr(ops, CREATE)
    scales = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    gone = weakref.ref(scales)
    with owned():
        handler = getattr(ops, CREATE)(torch.zeros(2, 4), scales, torch.bfloat16)
    scales.data = torch.zeros(4)  # where the engine has them from now on
    del scales
    gc.collect()
    assert gone() is None
    assert handler.scales.data_ptr() == handler.at
    assert handler.scales.tolist() == [1.0] * 4
    assert getattr(ops, CREATE) is create


def test_a_vllm_without_such_kernels_is_left_alone(ops: Any) -> None:
    delattr(ops, CREATE)
    with owned():
        assert not hasattr(ops, CREATE)


async def _started(environment: dict[str, str], mode: str = "", **arguments: Any) -> Control:
    app = FastAPI()
    parallel = SimpleNamespace(**({mode: True} if mode else {}))
    client = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    with mock.patch.dict("os.environ", environment):
        await EndpointPlugin().init_state(client, app.state, Namespace(**arguments))
    control: Control = app.state.deltachain
    return control


@pytest.mark.parametrize(
    ("environment", "arguments", "refusal"),
    [
        ({"DELTACHAIN_MAX_LAG": "y"}, {}, "expected a number"),
        ({}, {"mode": "enable_elastic_ep"}, "start it without --enable-elastic-ep"),
    ],
)
def test_what_can_not_be_led_ends_or_says_why_where_it_was_told_to_serve(
    environment: dict[str, str], arguments: dict[str, Any], refusal: str
) -> None:
    named = {"DELTACHAIN_URL": "x", **environment}
    with pytest.raises(SystemExit) as ended:
        asyncio.run(_started(named, **arguments))
    assert ended.value.code == 2
    control = asyncio.run(_started({**named, "DELTACHAIN_STRICT": "0"}, **arguments))
    assert control.leader is None
    assert refusal in control.refusal


def test_a_server_that_was_told_of_no_chain_starts() -> None:
    control = asyncio.run(_started({}))
    assert control.leader is None
    assert "DELTACHAIN_URL is not set" in control.refusal


@pytest.mark.parametrize(
    ("key", "is_guarded"),
    [(None, False), ("", False), ([""], False), ([], False), ("k", True), (["", "k"], True)],
)
def test_an_empty_key_guards_nothing(key: object, is_guarded: bool) -> None:
    """vLLM drops empty keys; so does ``--api-key "$UNSET"``."""
    control = asyncio.run(_started({}, api_key=key, host="0.0.0.0"))  # noqa: S104
    assert control.access.is_guarded is is_guarded
    assert not control.access.is_open


def test_the_end_of_the_server_ends_its_presence() -> None:
    app, presence = FastAPI(), mock.Mock()
    EndpointPlugin().attach_router(app)
    app.state.deltachain = SimpleNamespace(leader=None, presence=presence)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            presence.close.assert_not_called()

    asyncio.run(live())
    presence.close.assert_called_once_with()
