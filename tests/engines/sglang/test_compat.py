"""What of SGLang's own is asked, and what it answers, without a server."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers import mm_schedule
from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult
from sglang.srt.utils.auth import add_api_key_middleware
from torch import nn

from deltachain.control.routes import probes, router
from deltachain.control.server import Control
from deltachain.errors import ConfigError
from deltachain.replica.capabilities import Capability
from deltachain.replica.layout.runtime_tables import made_by_running
from deltachain_sglang import PREFIX, compat, loading, ranks
from deltachain_sglang.table import BALANCED, MOVING, REPLACING, TABLE
from tests.engines.serving import run_program
from tests.engines.trainer import train

TOLD = "DELTACHAIN_URL is set"
OFFLINE = "tests.engines.sglang.offline"


@pytest.mark.parametrize("told", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_engine_follows_between_its_calls(tmp_path: Path, told: bool) -> None:
    chain = train("qwen3", tmp_path, 3, rate=1e-2)
    variables = {"DELTACHAIN_URL": chain.url, "DELTACHAIN_STRICT": "0"} if told else {}
    done = run_program(OFFLINE, chain.url, str(chain.base), **variables)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["labels"][1:] == ["2", "1"]
    assert (seen["scrubbed"], seen["version"]) == ([True, True], 1)
    assert seen["followed"] == [3, True]
    assert "running event loop" in seen["refused"]
    assert "deltachain: " in done.stderr
    assert (f"deltachain follows nothing: {TOLD}" in done.stderr) == told


def test_an_engine_that_was_told_of_a_chain_says_that_it_does_not_follow(tmp_path: Path) -> None:
    chain = train("qwen3", tmp_path, 1)
    done = run_program(OFFLINE, chain.url, str(chain.base), DELTACHAIN_URL=chain.url)
    assert done.returncode != 0
    refusal = f"UnsupportedEngineError: {TOLD}, but an Engine in process follows"
    assert refusal in done.stderr
    assert "deltachain_sglang.subscribe(engine, url)" in done.stderr


pytestmark = pytest.mark.engine

API, ADMIN = "the-api-key", "the-admin-key"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch, *, api: str, admin: str) -> Iterator[TestClient]:
    app = FastAPI()
    monkeypatch.setattr(compat, "app", lambda: app)
    compat.serve(router, PREFIX)
    compat.serve(probes, "")
    app.state.deltachain = Control(None, "nothing", token="", is_open=False, is_guarded=True)
    add_api_key_middleware(app, api_key=api or None, admin_api_key=admin or None)
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"api": API, "admin": ""}, API),
        ({"api": "", "admin": ADMIN}, ADMIN),
        ({"api": API, "admin": ADMIN}, ADMIN),
    ],
)
def test_sglang_asks_for_the_key_of_routes_that_write(
    monkeypatch: pytest.MonkeyPatch, keys: Mapping[str, str], wanted: str
) -> None:
    with served(monkeypatch, api=keys["api"], admin=keys["admin"]) as client:
        for route in router.routes:
            path, (method,) = PREFIX + route.path, route.methods  # type: ignore[attr-defined]
            for key in ("", "wrong", API, ADMIN):
                answer = client.request(method, path, headers=bearer(key))
                # 503: let in, and told that this server follows nothing.
                told = 200 if path.endswith("/healthz") else 503
                assert answer.status_code == (told if key == wanted else 401), (path, key)
        assert client.get("/healthz/deltachain").status_code == 200
        assert client.get("/readyz/deltachain").status_code == 503


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from sglang.kernels.ops.gemm import bf16_fp32  # noqa: F401, PLC0415
    from sglang.srt import runtime_context  # noqa: PLC0415
    from sglang.srt.model_executor.model_runner_components import (  # noqa: F401, PLC0415
        weight_updater,  # which must not import, and keep, what is put in place of these
    )

    options: dict[str, Any] = {
        "enable_dp_attention_local_control_broadcast": False,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "enable_hierarchical_cache": False,
        "enable_lmcache": False,
        "enable_streaming_session": False,
        "weight_cache_mode": "off",
        **MOVING,
        **REPLACING,
    }

    class Bag:
        def __getattr__(self, name: str) -> Any:
            return options[name]

    options["moe"] = Bag()
    for getter in (
        "get_parallel", "get_disagg", "get_memory", "get_model", "get_exec",
        "get_serving",
    ):  # fmt: skip
        assert callable(getattr(runtime_context, getter))
        monkeypatch.setattr(runtime_context, getter, Bag)
    return options


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("enable_dp_attention_local_control_broadcast", True, "would wait for others"),
        ("pp_size", 2, "pp_size 2"),
        ("disaggregation_mode", "prefill", "other servers fill its caches"),
        ("enable_hierarchical_cache", True, "outlive the weights"),
        ("enable_lmcache", True, "outlive the weights"),
        ("elastic_ep_backend", "mooncake", r"\(--elastic-ep-backend mooncake\)"),
        ("enable_elastic_expert_backup", True, "--enable-elastic-expert-backup"),
    ],
)
def test_servers_that_are_refused(
    context: dict[str, Any], option: str, value: object, message: str
) -> None:
    compat.check_layout("retract")
    context[option] = value
    with pytest.raises(ConfigError, match=message):
        compat.check_layout("retract")


@pytest.mark.parametrize(
    ("option", "value"),
    [("ep_num_redundant_experts", 2), ("init_expert_location", "x.json"), ("enable_eplb", True)],
)
def test_experts_that_move_are_followed_by_a_map(
    context: dict[str, Any], option: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    context[option] = value
    compat.check_layout("retract")
    assert compat.moves_experts()
    row = Capability("finds experts that move", ("sglang:no_map",), needed_by=BALANCED)
    monkeypatch.setattr(compat, "TABLE", replace(TABLE, rows=(row,)))
    with pytest.raises(ConfigError, match="sglang:no_map"):
        compat.check_layout("retract")


def test_stages_are_followed_in_the_pause_that_they_obey(context: dict[str, Any]) -> None:
    context["pp_size"] = 2
    compat.check_layout("abort")


def test_caches_by_version_may_outlive_weights_but_sessions_may_not(
    context: dict[str, Any],
) -> None:
    context["enable_hierarchical_cache"] = True
    compat.check_layout("in_place")
    context["enable_streaming_session"] = True
    with pytest.raises(ConfigError, match="keys and values of earlier weights"):
        compat.check_layout("in_place")


@pytest.mark.usefixtures("context")
def test_weights_that_sglang_derives_others_from_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    loading.guard(model)
    setattr(model[0], "_derived_weight_cache_error", "it has a split copy")  # noqa: B010
    with pytest.raises(ConfigError, match="refuses to update these weights: it has a split copy"):
        loading.guard(model)


def test_weights_that_engines_share_are_refused(context: dict[str, Any]) -> None:
    context["weight_cache_mode"] = "shared"
    with pytest.raises(ConfigError, match="weight cache"):
        loading.guard(nn.Linear(2, 2))


def test_embeddings_of_images_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_schedule, "embedding_cache", None)
    compat.forget_embeddings()  # a model without eyes has none
    mm_schedule.init_mm_embedding_cache(1 << 20)
    mm_schedule.embedding_cache.set(7, EmbeddingResult(embedding=torch.ones(4)))
    compat.forget_embeddings()
    assert mm_schedule.embedding_cache.get_single(7) is None


def test_what_a_model_holds_before_it_runs_is_recorded() -> None:
    module, _, method = compat.LOADED.rpartition(".")
    assert callable(getattr(resolve_name(module), method))
    model = nn.Sequential(nn.Linear(2, 2))
    runner = SimpleNamespace(model=model)
    assert ranks.on_load(lambda one: f"{one is runner}", runner) == "True"
    assert made_by_running(model) == frozenset()
    vars(model[0])["table"] = torch.ones(3)
    assert made_by_running(model) == {"0.table"}


def test_a_server_is_dead_with_the_first_process_that_ended() -> None:
    processes = [SimpleNamespace(is_alive=lambda: True, pid=os.getpid()) for _ in range(2)]
    watchdog = SimpleNamespace(_processes=processes)
    manager = SimpleNamespace(_subprocess_watchdog=watchdog, gracefully_exit=False)
    server = compat.Server(manager)
    assert not server.is_dead()
    processes[1].is_alive = lambda: False
    assert server.is_dead()
    manager._subprocess_watchdog = None
    assert not server.is_dead()
    manager.gracefully_exit = True
    assert server.is_dead()
