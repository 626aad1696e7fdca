"""SGLang's own way to ask for a version, and who else may ask the ranks anything."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from tests.engines.replica import Replica, error_of, replicas
from tests.engines.serving import start
from tests.engines.sglang.server import SglangServer
from tests.engines.trainer import Trainer

pytestmark = pytest.mark.engine

KEY = "the-key"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replicas(tmp_path_factory.mktemp("sglang"), 2, key=KEY) as replica:
        yield replica


def told(replica: Replica, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"model_path": path, **more}
    response = replica.server.client.post("/update_weights_from_disk", json=body)
    return response.status_code, response.json()


def test_the_stock_endpoint_brings_it_to_a_version(replica: Replica) -> None:
    server = replica.server
    names = server.client.get("/model_info").json()["model_path"]
    new = replica.trainer.step()
    code, answer = told(replica, f"deltachain:{new}")
    assert (code, answer["success"], answer["message"]) == (200, True, f"version {new}")
    assert replica.holds(new)
    assert replica.serves(new)
    info = server.client.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (names, str(new))
    models = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny"]
    head = replica.trainer.step()
    assert told(replica, "deltachain:")[0] == 200
    assert replica.holds(head)


@pytest.mark.parametrize(
    "path",
    [
        "deltachain:-1",
        "deltachain:1.5",
        "deltachain:file:///etc",
        'deltachain:{"verb": "swap", "arguments": {"ticket": 1, "version": 1, "back": false}}',
        "deltachain:99999",
    ],
)
def test_anything_but_a_version_is_refused(replica: Replica, path: str) -> None:
    head = replica.trainer.head
    code, answer = told(replica, path)
    assert (code, answer["success"]) == (400, False)
    assert replica.holds(head)


def test_a_rank_that_refuses_is_the_failure_of_all(replica: Replica) -> None:
    old = replica.trainer.head
    replica.trainer.step()
    replica.strike("stage")
    code, answer = told(replica, "deltachain:")
    assert (code, answer["success"]) == (400, False)
    assert "rank 1: RuntimeError: struck at stage" in answer["message"]
    assert replica.holds(old)
    assert replica.serves(old)


def test_a_rank_that_fails_while_writing_is_the_failure_of_all(replica: Replica) -> None:
    old = replica.trainer.head
    replica.trainer.step()
    replica.strike("write", nth=4)
    code, answer = told(replica, "deltachain:")
    assert (code, answer["success"]) == (400, False)
    assert "every rank has its old bits" in answer["message"]
    assert replica.holds(old)
    assert replica.serves(old)


@pytest.mark.parametrize("verb", ["attach", "stage", "swap", "state", "nonsense"])
def test_nobody_but_the_leader_asks_the_ranks(replica: Replica, verb: str) -> None:
    head = replica.trainer.head
    action = "deltachain:" + json.dumps({"verb": verb, "arguments": {"turn": "me:1"}})
    response = replica.server.client.post("/weights_checker", json={"action": action})
    assert (response.status_code, response.json()["success"]) == (400, False)
    assert replica.holds(head)


def test_another_checkpoint_is_replaced_as_soon_as_it_is_loaded(replica: Replica) -> None:
    head = replica.trainer.step()
    replica.server.update()
    replica.server.load(replica.trainer.base)
    status = replica.server.status()
    assert (status["version"], status["last"]["previous"]) == (head, None)
    assert replica.holds(head)


def test_a_sleeping_replica_is_not_ready_and_is_written_nothing(replica: Replica) -> None:
    server, head = replica.server, replica.trainer.head
    assert isinstance(server, SglangServer)
    server.sleep("kv_cache", "weights")
    answer = server.get("ready")
    assert (answer.status_code, answer.json()["reason"][:6]) == (503, "asleep")
    new = replica.trainer.step()
    refused = server.post("update")
    assert "released its weights" in error_of(refused, refused.status_code)["message"]
    assert server.status()["version"] == head
    server.wake("weights")
    assert server.get("ready").status_code == 503  # there is no cache to generate with
    server.wake("kv_cache")
    assert replica.serves(head)
    server.update()
    assert replica.holds(new)


def test_weights_that_were_lost_in_its_sleep_are_healed_as_it_wakes(replica: Replica) -> None:
    server, head = replica.server, replica.trainer.head
    assert isinstance(server, SglangServer)
    server.sleep()
    server.reset()  # as released memory on a GPU comes back: with anything in it
    server.wake()
    assert replica.serves(head)
    assert replica.holds(head)
    assert server.status()["last"]["previous"] is None


def schema(number: int) -> str:
    names = [f"k{number}_{each}" for each in range(40)]
    kinds = {name: {"type": "string", "pattern": f"[a-z]{{1,{len(name)}}}"} for name in names}
    return json.dumps({"type": "object", "properties": kinds, "required": names})


def test_requests_that_wait_for_a_grammar_hold_nothing_up(replica: Replica) -> None:
    """Schedulers count them as running until it is compiled, also while they are paused."""
    numbers, codes, stop = itertools.count(), [], Event()

    def ask() -> None:
        while not stop.is_set():
            sampling = {"json_schema": schema(next(numbers)), "max_new_tokens": 8}
            body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
            codes.append(replica.server.client.post("/generate", json=body).status_code)

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            replica.server.update(replica.trainer.step())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(codes) == {200}
    assert replica.holds(replica.trainer.head)


def test_somebody_who_loads_checkpoints_meanwhile_ends_nothing(replica: Replica) -> None:
    codes, stop = [], Event()

    def load() -> None:
        while not stop.is_set():
            codes.append(told(replica, str(replica.trainer.base))[0])

    thread = Thread(target=load)
    thread.start()
    try:
        for _ in range(6):
            replica.trainer.step()
            told(replica, "deltachain:")  # whose bits they find, and so whether it may, is chance
    finally:
        stop.set()
        thread.join()
    assert set(codes) == {200}
    replica.server.update()
    replica.server.post("scrub")
    assert replica.holds(replica.trainer.head)


@pytest.mark.parametrize(("headers", "code"), [({}, 401), ({"authorization": "Bearer x"}, 401)])
def test_our_routes_ask_for_the_servers_key(
    shared: Replica, headers: dict[str, str], code: int
) -> None:
    url = str(shared.server.client.base_url)
    for path in ("status", "update", "scrub"):
        method = "GET" if path == "status" else "POST"
        answer = httpx.request(method, f"{url}/deltachain/{path}", headers=headers, trust_env=False)
        assert answer.status_code == code


@pytest.mark.slow
def test_sglang_alone_cannot_generate_with_latent_attention(tmp_path: Path) -> None:
    """The bits of both ranks are compared in ``test_matrix.py`` instead."""
    with (
        Trainer(tmp_path, family="deepseek_v3_wide", steps=1) as trainer,
        pytest.raises(RuntimeError, match="Expected size for first two dimensions of batch2"),
        start(trainer.base, tmp_path / "server"),
    ):
        pass
