"""Two servers whose engines share experts: each has one rank of a model of two."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from torch._C._distributed_c10d import TCPStore

from deltachain.errors import ApplyError, PartialApplyError, PoisonedError
from deltachain.replica import messages
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.subscribe import SubscribeConfig
from deltachain.threads import apart
from deltachain_vllm import servers as module
from deltachain_vllm.front_ends import pass_on
from deltachain_vllm.servers import Post, Servers
from tests.support.engine import Sharding
from tests.unit.replica.replicas import Followed


class OneRank:
    """The engine of a server."""

    software = "fake/1.0"

    def __init__(self, whole: Followed, rank: int) -> None:
        self.whole, self.rank = whole, rank
        self.paused = self.ended = self.silent = False
        self.raises: dict[str, Exception] = {}
        self.dies_at = ""
        self.named = 0

    def call(self, request: messages.RankRequest) -> Sequence[messages.RankReply]:
        name = messages.name_of(request)
        assert self.paused or name != "swap", "weights are written while the engine runs"
        if self.dies_at in (name, "dead"):
            self.dies_at = "dead"
            raise ApplyError("dead")
        if name in self.raises:
            raise self.raises.pop(name)
        if name == "swap" and self.silent:
            time.sleep(3600)
        service = self.whole.engine.services[self.rank]
        return [messages.decode_reply(service.answer(messages.encode(request)))]

    def is_dead(self) -> bool:
        return self.ended

    def is_paused(self) -> bool:
        return self.paused

    def pause(self, *, in_doubt: bool = False) -> None:
        del in_doubt
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def oldest(self) -> str:
        return str(self.named)

    def name_version(self, version: int) -> None:
        self.named = version

    def end(self) -> None:
        self.ended = True


class Pair:
    def __init__(self, folder: Path) -> None:
        self.followed = Followed(Sharding(tp=2), folder)
        self.followed.publish(1)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        both = [Servers(number, 2, 1, Post("127.0.0.1", self.store.port)) for number in (0, 1)]
        self.first, self.second = both
        self.engines = [OneRank(self.followed, rank) for rank in (0, 1)]
        subscribe = SubscribeConfig(url=self.followed.store.url)
        settings = ReplicaSettings(subscribe=subscribe, spool=self.followed.spool)
        own: Any = self.engines[0]
        engine = self.first.joint(own)
        self.leader = Leader(settings, engine, store=self.followed.store)

    def obeys(self) -> None:
        engine: Any = self.engines[1]
        self.second.post.answer(1, lambda text: module._called(engine, text), engine.end)

    def are(self, field: str) -> list[Any]:
        return [getattr(one, field) for one in self.engines]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    made = Pair(tmp_path)
    made.obeys()
    made.store.wait([module._key(1, "beats")])
    yield made
    made.leader.stop()
    made.followed.close()
    vars(made).pop("store", None)
    for thread in threading.enumerate():
        if thread.name == module.NAME:
            thread.join(0.5)  # if Python ended first, those in torch's code would abort it


def test_the_first_server_swaps_the_engines_of_both(pair: Pair) -> None:
    pair.leader.update()
    assert pair.followed.holds(1)
    assert pair.are("named") == [1, 1]
    pair.leader.rollback(0)
    assert pair.followed.holds(0)
    assert pair.are("paused") == [False, False]
    pair.engines[1].named = -1
    pair.leader.target.look()
    assert pair.leader.target.oldest == "-1"


def test_a_pause_of_one_server_by_another_client_is_told_and_kept(pair: Pair) -> None:
    pair.leader.update(0)
    pair.engines[1].paused = True
    pair.leader.target.look()
    assert pair.leader.status().reason == "paused by another client"
    pair.leader.update()
    assert pair.are("paused") == [True, True]
    pair.leader.resume()
    assert pair.are("paused") == [False, False]


def test_a_server_that_starts_no_thread_answers_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "started", lambda _: False)
    for _ in range(2):
        found = apart(pair.first.post.send(1, "oldest", ""), "test")
        assert found is not None
        assert found.result(20) == b'[true,["0"]]'


@pytest.mark.parametrize(("rank", "at"), [(0, "stage"), (1, "stage"), (0, "swap"), (1, "swap")])
def test_if_one_server_refuses_none_moves(pair: Pair, rank: int, at: str) -> None:
    pair.leader.update(0)
    pair.engines[rank].raises[at] = PartialApplyError("no")
    with pytest.raises(PartialApplyError, match=f"rank {rank}: no"):
        pair.leader.update()
    assert pair.followed.holds(0)
    assert pair.are("paused") == [False, False]
    pair.leader.update()
    assert pair.followed.holds(1)


def test_an_engine_that_dies_in_a_swap_leaves_the_others_paused(pair: Pair) -> None:
    pair.leader.update(0)
    pair.engines[1].dies_at = "swap"
    with pytest.raises(ApplyError, match="rank 1: dead"):
        pair.leader.update()
    assert pair.are("paused") == [True, True]
    assert not pair.leader.status().ready


def test_a_server_without_signs_of_life_ends_the_engine_that_leads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.leader.update(0)
    monkeypatch.setattr(module, "SILENT_S", 2.0)
    pair.engines[1].silent = True
    monkeypatch.setattr(module, "BEAT_S", 3600.0)  # the next one comes never
    with pytest.raises(PoisonedError, match=r"rank 1: server 1 .* no sign of life"):
        pair.leader.subscriber.update()
    assert pair.engines[0].ended
    assert pair.are("paused") == [True, True]


def test_an_engine_ends_with_the_one_that_leads(pair: Pair) -> None:
    assert not pair.engines[1].ended
    del pair.store
    until = time.monotonic() + 20
    while not pair.engines[1].ended:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("is_open", "host"), [(True, "localhost"), (False, "another-server")])
def test_what_other_servers_are_asked_is_passed_on(pair: Pair, *, is_open: bool, host: str) -> None:
    """As from the loopback interface, where no token is asked, by a server there alone."""
    leading, other = FastAPI(), FastAPI()

    @leading.post("/v1/deltachain/update", status_code=409)
    async def update(request: Request) -> dict[str, str]:
        return {"body": (await request.body()).decode(), "host": request.headers["host"]}

    async def run() -> httpx.Response:
        pass_on(other, ["/v1/deltachain/{rest:path}"], pair.second.leader(is_open=is_open))
        asked = asyncio.create_task(pair.second.obey(pair.engines[1]))
        await asyncio.sleep(0.2)
        assert not asked.done(), "it waits for a leader"
        pair.first.answer(leading, asyncio.get_running_loop())
        await asked
        transport = httpx.ASGITransport(app=other)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            large = b"1" * (module.LARGEST + 1)  # of a client that has no token, perhaps
            refused = await client.post("/v1/deltachain/update", content=large)
            assert refused.status_code == 413
            return await client.post("/v1/deltachain/update?a=1", content=b'{"version": 7}')

    found = asyncio.run(run())
    assert (found.status_code, found.json()) == (409, {"body": '{"version": 7}', "host": host})


def test_a_server_that_never_follows_is_told_of(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = pair.first.post.send(2, "resume", "")
    monkeypatch.setattr(module, "SILENT_S", 0.3)
    monkeypatch.setattr(module, "START_S", 1.0)
    with pytest.raises(ApplyError, match=r"server 2 .* no sign of life for 1 s"):
        send()
    assert caplog.text.count("waiting for server 2 of the engines") == 1
