import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount

from deltachain.checkpoint import Checkpoint
from deltachain.control.agent import AdapterServer, Agent, ReloadServer
from deltachain.control.replica_client import KEEPALIVE_S, make_client
from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig
from tests.unit.cli.support import invoke, ok
from tests.unit.control.replicas import served

UVICORN_S = 5.0
"""Seconds after which uvicorn closes an idle connection, by default."""

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def serve(connection: socket.socket) -> None:
    """Answer, except to a request on a connection that was idle too long: close it instead.

    uvicorn does so if its timer ends before the request is read.
    """
    with connection:
        last = time.monotonic()
        while b"\r\n\r\n" in connection.recv(65536):
            if time.monotonic() - last > KEEPALIVE_S:
                return
            connection.sendall(ANSWER)
            last = time.monotonic()


@pytest.fixture
def port() -> Iterator[int]:
    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=[connection], daemon=True).start()

    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104 - of all loopback addresses
        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.full
def test_no_request_is_sent_on_a_connection_that_the_server_may_close(port: int) -> None:
    assert KEEPALIVE_S < UVICORN_S / 2
    # The first is never asked for through a proxy, which is another transport.
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port}"]
    with make_client() as client:
        for pause in (0.0, KEEPALIVE_S + 0.2):
            time.sleep(pause)
            assert [client.get(url).text for url in urls] == ["ok", "ok"]


class Served:
    """A server that is down as often as it is told to be."""

    def __init__(self, down: int = 0) -> None:
        self.down = down
        self.brought: list[tuple[int, float]] = []

    def has(self, folder: Path, version: int) -> bool:
        del folder
        return [number for number, _ in self.brought[-1:]] == [version]

    def load(self, folder: Path, version: int) -> None:
        if self.down:
            self.down -= 1
            raise ControlPlaneError("down")
        found = Checkpoint(folder).bits("weight").view("float32")
        self.brought.append((version, float(found[0])))

    def close(self) -> None:
        pass


def versions_of(model: Any, weight: torch.Tensor, *values: float) -> MemoryStore:
    """A chain that begins with a model as it is; then a version for each value of a weight."""
    made = MemoryStore()
    with Publisher(PublishConfig(url=made.url), store=made).attach(model) as publisher:
        for step, value in enumerate(values, 1):
            torch.nn.init.constant_(weight, value)
            publisher.publish(step=step).result(60)
    return made


@pytest.fixture
def store() -> MemoryStore:
    model = torch.nn.Linear(3, 2, bias=False)
    return versions_of(model, model.weight, 1.0, 2.0)


def config(store: MemoryStore) -> SubscribeConfig:
    return SubscribeConfig(url=store.url, poll_s=0.01)


AgentOf = Callable[[Any], Agent]


@pytest.fixture
def agent_of(store: MemoryStore, tmp_path: Path) -> Iterator[AgentOf]:
    """Makes the agent of a server."""
    with ExitStack() as stack:

        def build(server: Any) -> Agent:
            agent = Agent(config(store), tmp_path / "head", server, store=store)
            return stack.enter_context(agent)

        yield build


def test_the_server_reads_what_is_proven(agent_of: AgentOf) -> None:
    server = Served()
    agent = agent_of(server)
    agent.update(1)
    agent.update()
    assert agent.update() is None
    assert server.brought == [(1, 1.0), (2, 2.0)]


def test_a_server_that_is_down_is_waited_for(agent_of: AgentOf) -> None:
    server, stop = Served(down=3), Event()
    agent = agent_of(server)
    for receipt in agent.follow(stop):
        assert receipt.version == 2
        stop.set()
        agent.subscriber.notify()
    assert (server.brought, server.down) == ([], 2)
    for _ in range(2):
        with pytest.raises(ControlPlaneError):
            agent.update()
    assert agent.update() is None
    assert server.brought == [(2, 2.0)]


def test_an_agent_is_not_ready_before_its_server_has_loaded(agent_of: AgentOf) -> None:
    said = []

    class Slow(Served):
        def load(self, folder: Path, version: int) -> None:
            said.append(agent.why_unready())
            super().load(folder, version)

    agent = agent_of(Slow(down=1))
    with pytest.raises(ControlPlaneError):
        agent.update()
    assert "has not loaded version 2" in agent.why_unready()
    agent.update()
    assert agent.why_unready() == ""
    assert ["has not loaded version 2" in one for one in said] == [True, True]


def test_a_folder_that_was_written_anew_is_loaded_anew(agent_of: AgentOf, tmp_path: Path) -> None:
    server = Served()
    agent = agent_of(server)
    agent.update()
    weights = tmp_path / "head" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    agent.subscriber.scrub()
    agent.update()  # from nothing, to the same version
    agent.update()
    assert server.brought == [(2, 2.0), (2, 2.0)]


# Servers that load adapters


@pytest.mark.parametrize(("name", "keep"), [("a/b", 2), ("", 2), ("a", 0)])
def test_names_that_are_no_names(tmp_path: Path, name: str, keep: int) -> None:
    with pytest.raises(ConfigError, match="plain name"):
        AdapterServer("http://127.0.0.1:9", name=name, folder=tmp_path, keep=keep)


class Vllm:
    """What vLLM's routes for adapters do: it knows names, and where each was loaded from."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        name = body.get("lora_name", "")
        self.asked.append(f"{request.url.path.rpartition('/')[2]} {name}".strip())
        if request.url.path == "/v1/models":
            data = [{"id": "base", "root": "/base"}]
            data += [{"id": one, "root": root} for one, root in self.adapters.items()]
            return httpx.Response(200, json={"data": data})
        if request.url.path == "/v1/load_lora_adapter":
            if name in self.adapters:
                return httpx.Response(400, text="has already been loaded")
            assert (Path(body["lora_path"]) / "adapter_model.safetensors").is_file()
            self.adapters[name] = body["lora_path"]
        else:
            del self.adapters[name]
        return httpx.Response(200)


def adapters_of(value: float) -> MemoryStore:
    """Four versions of something with the names of an adapter, after its first weights."""
    layer = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    model = torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": layer})})
    return versions_of(model, layer.weight, *(value + step for step in range(4)))


def serves(vllm: Vllm, name: str) -> float:
    return float(
        Checkpoint(Path(vllm.adapters[name])).bits("base_model.model.weight").view("float32")[0]
    )


def mocked(server: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    def streamed(request: httpx.Request) -> httpx.Response:
        answer = server(request)
        return httpx.Response(answer.status_code, stream=httpx.ByteStream(answer.content))

    return httpx.Client(transport=httpx.MockTransport(streamed))


def lead(store: MemoryStore, folder: Path, head: Path, vllm: Vllm) -> Agent:
    server = AdapterServer("http://engine", name="policy", folder=folder, keep=2)
    server._client._client = mocked(vllm)
    return Agent(config(store), head, server, store=store)


def test_the_newest_adapters_stay_and_their_folders_a_while_longer(tmp_path: Path) -> None:
    vllm, folder = Vllm(), tmp_path / "adapters"
    with lead(adapters_of(1.0), folder, tmp_path / "head", vllm) as agent:
        for version in range(4):
            agent.update(version)
        assert sorted(vllm.adapters) == ["policy-v2", "policy-v3"]
        assert serves(vllm, "policy-v3") == 3.0
        there = sorted(lies.name.rpartition("-")[0] for lies in folder.glob("policy-*"))
        assert there == ["policy-v1", "policy-v2", "policy-v3"]
        vllm.asked.clear()
        agent.update(3)
        assert vllm.asked == ["models"]


def test_the_adapter_of_another_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    vllm, folder = Vllm(), tmp_path / "adapters"
    with lead(adapters_of(1.0), folder, tmp_path / "one", vllm) as agent:
        agent.update(4)
    assert serves(vllm, "policy-v4") == 4.0
    with lead(adapters_of(100.0), folder, tmp_path / "two", vllm) as agent:
        agent.update(4)
    assert serves(vllm, "policy-v4") == 103.0


def test_weights_that_are_no_adapter_are_refused(store: MemoryStore, tmp_path: Path) -> None:
    with (
        lead(store, tmp_path / "adapters", tmp_path / "head", Vllm()) as agent,
        pytest.raises(ConfigError, match="not the chain of an adapter"),
    ):
        agent.update()


# Servers that load whole checkpoints


class Whole:
    """A server of either engine, which says what it was asked and loads whole checkpoints."""

    def __init__(self, *, is_sglang: bool) -> None:
        self.is_sglang, self.is_paused = is_sglang, False
        self.trouble = ""
        self.named = "default"
        self.asked: list[str] = []
        self.limits: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.trouble == "down":
            raise httpx.ConnectError("refused", request=request)
        if self.trouble == "a proxy that answers for it":
            return httpx.Response(503, text="starting")
        return self._answer(request)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and "timeout" in request.extensions:
            self.limits.append(request.extensions["timeout"]["read"])
        path = request.url.path.removeprefix("/")
        if path == "model_info" and not self.is_sglang:
            return httpx.Response(404, text="Not Found")
        if path in ("model_info", "weight_info"):
            return httpx.Response(200, json={"weight_version": self.named})
        if path == "is_paused":
            return httpx.Response(200, json={"is_paused": self.is_paused})
        self.asked.append(path)
        body = json.loads(request.content or b"{}")
        if "path" in str(body):
            assert self.asked[0].startswith("pause")
            if self.trouble == "a failed load":
                return httpx.Response(200, json={"success": False, "message": "no such file"})
            self.named = body.get("weight_version", self.named)
            return httpx.Response(200, json={"success": True})
        self.named = body.get("new_version", self.named)
        return httpx.Response(200)

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        """The same for a real server."""
        asked = Request(scope, receive)
        answer = self(httpx.Request(asked.method, str(asked.url), content=await asked.body()))
        await Response(answer.content, answer.status_code)(scope, receive, send)


def reloading(engine: Whole) -> ReloadServer:
    server = ReloadServer("http://engine:4040")
    server._client._client = mocked(engine)
    return server


@pytest.mark.parametrize(
    ("trouble", "is_sglang", "said"),
    [
        ("down", False, "did not answer"),
        ("down", True, "did not answer"),
        ("a proxy that answers for it", False, "answered 503"),
        ("a failed load", True, "no such file"),
    ],
)
def test_a_server_is_told_again_until_it_has_loaded_and_stays_paused_meanwhile(
    agent_of: AgentOf, trouble: str, said: str, *, is_sglang: bool
) -> None:
    engine = Whole(is_sglang=is_sglang)
    agent = agent_of(reloading(engine))
    resumed = "continue_generation" if is_sglang else "resume"
    engine.trouble = trouble
    with pytest.raises(ControlPlaneError, match=said):
        agent.update()
    assert resumed not in engine.asked
    engine.trouble = ""
    agent.update()
    assert (engine.named, engine.asked[-1]) == ("2", resumed)
    assert set(engine.limits) == {10.0}  # seconds until it counts as hanging; a load has more


@pytest.mark.parametrize("is_sglang", [False, True])
def test_a_server_that_has_the_version_is_left_alone_until_something_happens_to_it(
    agent_of: AgentOf, *, is_sglang: bool
) -> None:
    engine = Whole(is_sglang=is_sglang)
    agent = agent_of(reloading(engine))
    agent.update()
    engine.asked.clear()
    agent.update()
    assert engine.asked == []
    engine.named = "default"  # it was started again
    agent.update()
    assert engine.named == "2"
    if not is_sglang:
        engine.is_paused = True
        with pytest.raises(ControlPlaneError, match="paused by another client"):
            agent.update()
        engine.is_paused = False
        agent.update()


def test_the_command_brings_a_server_to_the_head_and_ends(tmp_path: Path) -> None:
    url, vllm = str(tmp_path / "policy"), Whole(is_sglang=False)
    Publisher(url).attach(torch.nn.Linear(3, 2, bias=False)).close()
    with served(Starlette(routes=[Mount("/", vllm.asgi)])) as engine:
        words = ("--engine", engine, "--out", tmp_path / "head", "--once", "--json")
        done = ok("agent", url, *words)
    assert vllm.named == "0"
    assert json.loads(done.stdout)["version"] == 0


def test_the_command_wants_a_chain(tmp_path: Path) -> None:
    done = invoke("agent", "--engine", "http://127.0.0.1:9", "--out", tmp_path)
    assert done.code == 2
    assert "URL" in done.stderr
