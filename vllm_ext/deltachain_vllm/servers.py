"""Servers whose engines share experts: the server of the first engine leads the engines of all.

Such engines (``--data-parallel-rank``, ``--data-parallel-hybrid-lb``) step, pause and resume as one
in vLLM, and each holds a part of the experts, so only one leader can prove and swap them. Messages
lie in the store of the engines' own group, a ``TCPStore`` that ends with the first engine: calls of
the leader to engines of other servers, and what clients request from other servers.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Thread, local
from typing import Any, Final, Literal, Protocol

import httpx
import msgspec
from fastapi import FastAPI
from torch.distributed import TCPStore

from deltachain import errors
from deltachain.control.server import aside
from deltachain.replica import messages as wire
from deltachain.replica.engine import Engine, age, run_on
from deltachain.replica.target import POLL_S, POLL_SHARE
from deltachain.threads import started

from . import MEETING

BEAT_S: Final = 1.0  # seconds between two signs of life of a server
SILENT_S: Final = 30.0  # seconds without one after which a server is lost
START_S: Final = (
    1800.0  # seconds until the first one: engines that are up may be proven for minutes
)
_FOREVER: Final = timedelta(days=365)

logger = logging.getLogger(__name__)


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    method: Literal["call", "pause", "resume", "oldest", "name_version"]
    text: str = ""  # a request to ranks
    in_doubt: bool = False
    version: int = 0


class _Returned(msgspec.Struct, frozen=True, kw_only=True):
    texts: tuple[str, ...] = ()
    error: str = ""
    message: str = ""
    hint: str = ""


class _Asked(msgspec.Struct, frozen=True):
    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class _Answered(msgspec.Struct, frozen=True):
    code: int
    kind: str
    body: bytes


class Post:
    """Messages to servers by their number, and replies; thread-safe."""

    def __init__(self, host: str, port: int) -> None:
        self._at = host, port
        self._own = local()  # a connection waits for one key at a time

    @property
    def _store(self) -> TCPStore:
        if not hasattr(self._own, "store"):
            more: dict[str, Any] = {"is_master": False, "wait_for_workers": False}
            self._own.store = TCPStore(*self._at, timeout=_FOREVER, **more)
        found: TCPStore = self._own.store
        return found

    def send(self, server: int, message: msgspec.Struct) -> Callable[[], bytes]:
        """Send a message; return a function that waits for its reply.

        Both raise :class:`ApplyError` if the store is gone or the server gives no sign of life.
        """
        with _reaching(server):
            key = _key(server, self._store.add(_key(server), 1))
            self._store.set(key, _text(message))
        return partial(self._reply, server, f"{key}/reply")

    def _reply(self, server: int, key: str) -> bytes:
        start = heard = time.monotonic()
        beats, limit_s = 0, START_S
        with _reaching(server):
            while not self._store.check([key]):
                now, found = time.monotonic(), self._store.add(_key(server, "beats"), 0)
                if found > beats:
                    beats, heard, limit_s = found, now, SILENT_S
                if now - heard > limit_s:
                    raise TimeoutError(f"no sign of life for {limit_s:.0f} s")
                time.sleep(min(max(POLL_SHARE * (now - start), POLL_S[0]), POLL_S[1]))
            reply = self._store.get(key)
            self._store.delete_key(key)
        return reply

    def answer(
        self, server: int, reply: Callable[[bytes], msgspec.Struct], gone: Callable[[], object]
    ) -> None:
        """Answer the messages to a server in threads of their own, until the store is gone."""

        def answer(message: bytes, key: str) -> None:
            self._store.set(f"{key}/reply", _text(reply(message)))

        def answer_all() -> None:
            for number in itertools.count(1):
                key = _key(server, number)
                message = self._store.get(key)  # waits
                self._store.delete_key(key)
                _start(partial(answer, message, key))

        def live() -> None:
            try:
                while True:
                    self._store.add(_key(server, "beats"), 1)
                    time.sleep(BEAT_S)
            except RuntimeError as exc:
                logger.warning("the engine that leads is gone: %s", _first_line(exc))
                gone()

        _start(answer_all)
        _start(live)


def _key(server: int, what: object = "") -> str:
    return f"deltachain/{server}/{what}"


def _text(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


def _start(run: Callable[[], object]) -> None:
    def quietly() -> None:
        with suppress(RuntimeError):  # the store is gone
            run()

    if not started(Thread(target=quietly, name="deltachain-servers", daemon=True)):
        raise errors.ApplyError("no thread is left", hint="let this process have more (ulimit -u)")


@contextmanager
def _reaching(server: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TimeoutError) as exc:
        raise errors.ApplyError(
            f"server {server} of these engines does not answer: {_first_line(exc)}",
            hint="start the servers of all engines again, with the same DELTACHAIN_URL",
        ) from exc


@dataclass(frozen=True, slots=True)
class Servers:
    """This server among those whose engines share experts.

    Attributes:
        number: Number of this server, in the order of its engines; 0 leads.
        count: Number of all servers.
        ranks: Number of ranks of each.
    """

    number: int
    count: int
    ranks: int
    post: Post

    def joint(self, engine: "OwnEngine") -> "JointEngine":
        """Return the engines of all servers as one, by which this server leads."""
        return JointEngine(engine, self)

    async def obey(self, engine: "OwnEngine") -> None:
        """Let the leader call this engine, which ends with its own; wait until it leads."""
        self.post.answer(self.number, partial(_called, engine), engine.end)
        await self.leader().get("/ping")  # any answer will do

    def answer(self, app: FastAPI, loop: asyncio.AbstractEventLoop) -> None:
        """Answer what other servers pass on, with the whole app of this one."""

        def answered(message: bytes) -> _Answered:
            try:
                return run_on(loop, _ask(app, message))
            except errors.ApplyError as exc:
                return _Answered(500, "text/plain", str(exc.args[0]).encode())

        self.post.answer(0, answered, lambda: None)

    def leader(self) -> httpx.AsyncClient:
        """Return a client of the server that leads."""
        return httpx.AsyncClient(transport=_ToLeader(self.post), base_url="http://leader")


class OwnEngine(Engine, Protocol):
    """The engine of one of the servers."""

    def end(self) -> None:
        """End the engine, and its server."""


async def meet(client: Any) -> Servers:
    """Return the servers whose engines share experts with this one's."""
    parallel = client.vllm_config.parallel_config
    host, port = await client.engine_core.call_utility_async(MEETING)
    each = parallel.data_parallel_size_local
    return Servers(
        number=parallel.data_parallel_rank // each,
        count=parallel.data_parallel_size // each,
        ranks=parallel.world_size * each,
        post=Post(host, int(port)),
    )


class JointEngine:
    """Engines of all servers as one; see :class:`deltachain.replica.engine.Engine`.

    If a server fails, that is a refusal of its ranks. If it gives no sign of life, this server's
    engine ends too, as it would in its next step.
    """

    def __init__(self, own: OwnEngine, servers: Servers) -> None:
        self.software: Final = own.software
        self._own, self._servers = own, servers

    def call(self, request: wire.AnyRequest) -> Sequence[wire.RankReply]:
        asked = _Call(method="call", text=wire.encode(request))
        outcomes = self._try(asked, lambda: self._own.call(request))
        replies: list[wire.RankReply] = []
        for outcome in outcomes:
            if not isinstance(outcome, errors.DeltaChainError):
                replies += outcome
                continue
            if all(isinstance(one, errors.DeltaChainError) for one in outcomes):
                raise outcome
            refusal = wire.Refusal(
                error=type(outcome).__name__, message=str(outcome.args[0]), hint=outcome.hint
            )
            ranks = range(len(replies), len(replies) + self._servers.ranks)
            replies += [wire.addressed(refusal, rank, request) for rank in ranks]
        return replies

    def is_dead(self) -> bool:
        return self._own.is_dead()

    def is_paused(self) -> bool:
        return self._own.is_paused()

    def pause(self, *, in_doubt: bool = False) -> None:
        own = partial(self._own.pause, in_doubt=in_doubt)
        self._all(_Call(method="pause", in_doubt=in_doubt), own)

    def resume(self) -> None:
        self._all(_Call(method="resume"), self._own.resume)

    def oldest(self) -> str:
        first, *others = self._all(_Call(method="oldest"), self._own.oldest)
        return str(min((first, *(one[0] for one in others)), key=age))

    def name_version(self, version: int) -> None:
        own = partial(self._own.name_version, version)
        self._all(_Call(method="name_version", version=version), own)

    def _all(self, asked: _Call, own: Callable[[], Any]) -> list[Any]:
        outcomes = self._try(asked, own)
        for outcome in outcomes:
            if isinstance(outcome, errors.DeltaChainError):
                raise outcome
        return outcomes

    def _try(self, asked: _Call, own: Callable[[], Any]) -> list[Any]:
        """Call all engines at once, as one may wait for others; return results and errors."""
        others = range(1, self._servers.count)
        sent = [_caught(partial(self._servers.post.send, one, asked)) for one in others]
        found = [_caught(own)]
        for wait in sent:
            reply = wait if isinstance(wait, Exception) else _caught(wait)
            if isinstance(reply, Exception):
                self._own.end()
            read = partial(_results, reply, asked)
            found.append(reply if isinstance(reply, Exception) else _caught(read))
        return found


def _caught(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except errors.DeltaChainError as exc:
        return exc


def _called(engine: Engine, message: bytes) -> _Returned:
    asked = msgspec.json.decode(message, type=_Call)
    texts: Sequence[str] = ()
    try:
        match asked.method:
            case "call":
                replies = engine.call(wire.decode_request(asked.text))
                texts = [wire.encode_reply(reply) for reply in replies]
            case "pause":
                engine.pause(in_doubt=asked.in_doubt)
            case "resume":
                engine.resume()
            case "oldest":
                texts = [engine.oldest()]
            case "name_version":
                engine.name_version(asked.version)
    except errors.DeltaChainError as exc:
        return _Returned(error=type(exc).__name__, message=str(exc.args[0]), hint=exc.hint)
    except Exception as exc:  # noqa: BLE001 - the leader waits for a reply
        return _Returned(error="ApplyError", message=repr(exc))
    return _Returned(texts=tuple(texts))


def _results(reply: bytes, asked: _Call) -> list[Any]:
    found = msgspec.json.decode(reply, type=_Returned)
    if not found.error:
        return [wire.decode_reply(one) if asked.method == "call" else one for one in found.texts]
    kind = getattr(errors, found.error, None)
    if not isinstance(kind, type) or not issubclass(kind, errors.ApplyError):
        kind = errors.ApplyError
    raise kind(found.message, hint=found.hint)


async def _ask(app: FastAPI, message: bytes) -> _Answered:
    asked = msgspec.json.decode(message, type=_Asked)
    given: dict[str, Any] = {"headers": asked.headers, "content": asked.body}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://leader") as client:
        found = await client.request(asked.method, asked.url, timeout=None, **given)
    return _Answered(found.status_code, found.headers.get("content-type", ""), found.content)


class _ToLeader(httpx.AsyncBaseTransport):
    def __init__(self, post: Post) -> None:
        self._post = post

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        headers = tuple(
            (key.decode("latin-1"), one.decode("latin-1")) for key, one in request.headers.raw
        )
        url = request.url.raw_path.decode()
        asked = _Asked(request.method, url, headers, await request.aread())
        try:
            reply = await aside(lambda post: post.send(0, asked)(), self._post)
        except errors.ApplyError as exc:
            raise httpx.ConnectError(str(exc.args[0]), request=request) from exc
        found = msgspec.json.decode(reply, type=_Answered)
        kind = {"content-type": found.kind}
        return httpx.Response(found.code, headers=kind, content=found.body, request=request)
