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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Thread, local
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import httpx
import msgspec
from fastapi import FastAPI
from torch._C._distributed_c10d import TCPStore

from deltachain import errors
from deltachain.control.server import aside
from deltachain.replica import messages as wire
from deltachain.replica.engine import age, run_on
from deltachain.replica.leader import in_a_thread
from deltachain.replica.target import POLL_S, POLL_SHARE, error_of
from deltachain.threads import started

from . import MEETING
from .compat import check_version
from .table import SHARED

if TYPE_CHECKING:
    from .engine import VllmEngine

NAME: Final = "deltachain-servers"  # of threads
BEAT_S: Final = 1.0  # seconds between two signs of life of a server
SILENT_S: Final = 30.0  # seconds without one after which a server is lost
START_S: Final = 1800.0  # seconds until the first one: all engines are up, but may be proven first
LARGEST: Final = 1 << 20  # size limit of the body of a request that is passed on, in bytes

logger = logging.getLogger(__name__)


class Post:
    """Messages to servers by their number, and replies, in JSON; thread-safe."""

    def __init__(self, host: str, port: int) -> None:
        self._at = host, port
        self._own = local()  # a connection waits for one key at a time

    @property
    def _store(self) -> Any:
        if not hasattr(self._own, "store"):
            more: dict[str, Any] = {"is_master": False, "wait_for_workers": False}
            made = TCPStore(*self._at, timeout=timedelta(seconds=SILENT_S), **more)
            made.set_timeout(timedelta(days=365))
            self._own.store = made
        return self._own.store

    def send(self, server: int, *message: object) -> Callable[[], bytes]:
        """Send a message; return a function that waits for its reply.

        Both raise :class:`ApplyError` if the store is gone or the server gives no sign of life.
        """
        with _reaching(server):
            key = _key(server, self._store.add(_key(server), 1))
            self._store.set(key, msgspec.json.encode(message).decode())
        return partial(self._reply, server, f"{key}/reply")

    def _reply(self, server: int, key: str) -> bytes:
        start = heard = time.monotonic()
        beats, limit_s, told = 0, START_S, False
        with _reaching(server):
            while not self._store.check([key]):
                now, found = time.monotonic(), self._store.add(_key(server, "beats"), 0)
                if found > beats:
                    beats, heard, limit_s = found, now, SILENT_S
                if not (beats or told) and now - start > SILENT_S:
                    told = True
                    logger.warning(
                        "waiting for server %d of the engines that share experts: it follows "
                        "nothing yet, or was started without DELTACHAIN_URL",
                        server,
                    )
                if now - heard > limit_s:
                    raise TimeoutError(f"no sign of life for {limit_s:.0f} s")
                time.sleep(min(max(POLL_SHARE * (now - start), POLL_S[0]), POLL_S[1]))
            return self._taken(key)

    def _taken(self, key: str) -> bytes:
        found: bytes = self._store.get(key)  # waits
        self._store.delete_key(key)
        return found

    def answer(
        self, server: int, reply: Callable[[bytes], object], gone: Callable[[], object]
    ) -> None:
        """Answer the messages to a server in threads of their own, until the store is gone."""

        def answer(message: bytes, key: str) -> None:
            self._store.set(f"{key}/reply", msgspec.json.encode(reply(message)).decode())

        def answer_all() -> None:
            for number in itertools.count(1):
                key = _key(server, number)
                run = partial(_quietly, partial(answer, self._taken(key), key))
                if not started(Thread(target=run, name=NAME, daemon=True)):
                    run()

        def live() -> None:
            with suppress(RuntimeError):
                while True:
                    self._store.add(_key(server, "beats"), 1)
                    time.sleep(BEAT_S)
            logger.warning("the first of the engines that share experts is gone")
            gone()

        in_a_thread(partial(_quietly, answer_all), NAME)
        in_a_thread(partial(_quietly, live), NAME)


def _key(server: int, what: object = "") -> str:
    return f"deltachain/{server}/{what}"


def _quietly(run: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the store is gone
        run()


@contextmanager
def _reaching(server: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TimeoutError) as exc:
        raise errors.ApplyError(
            f"server {server} of these engines does not answer: {str(exc).splitlines()[0]}",
            hint="start the servers of all engines again, with the same DELTACHAIN_URL",
        ) from exc


@dataclass(frozen=True, slots=True)
class Servers:
    """This server's number among those whose engines share experts, by which 0 leads.

    ``ranks`` is the number of ranks of each.
    """

    number: int
    count: int
    ranks: int
    post: Post

    def joint(self, engine: "VllmEngine") -> "JointEngine":
        return JointEngine(engine, self)

    async def obey(self, engine: Any) -> None:
        """Let the leader call this engine, which ends with its own; wait until it leads."""
        self.post.answer(self.number, partial(_called, engine), engine.end)
        await self.leader(is_open=True).get("/ping")  # any answer will do

    def answer(self, app: FastAPI, loop: asyncio.AbstractEventLoop) -> None:
        """Answer what other servers pass on, with the whole app of this one."""

        def answered(message: bytes) -> tuple[int, str, str]:
            try:
                return run_on(loop, _answered(app, message))
            except errors.ApplyError as exc:
                return 500, "text/plain", str(exc.args[0])

        self.post.answer(0, answered, lambda: None)

    def leader(self, *, is_open: bool) -> httpx.AsyncClient:
        """Return a client of the server that leads.

        ``is_open`` says that this server listens on the loopback interface alone. Without it, no
        request passed on has the name of that interface as its host, for which no token is asked.
        """
        transport = _ToLeader(self.post, keeps_host=is_open)
        return httpx.AsyncClient(transport=transport, base_url="http://leader")


async def meet(client: Any) -> Servers:
    """Return the servers whose engines share experts with this one's."""
    check_version(SHARED)
    parallel = client.vllm_config.parallel_config
    host, port = await client.engine_core.call_utility_async(MEETING)
    each = parallel.data_parallel_size_local
    return Servers(
        number=parallel.data_parallel_rank // each,
        count=parallel.data_parallel_size // each,
        ranks=parallel.world_size * each,
        post=Post(host, port),
    )


_Outcome: TypeAlias = tuple[bool, list[str]]
"""Whether a call of an engine's method succeeded, and its results, or its error as a refusal."""

_METHODS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "call": lambda engine, text: map(wire.encode_reply, engine.call(wire.decode_request(text))),
    "pause": lambda engine, text: engine.pause(in_doubt=bool(text)),
    "resume": lambda engine, _: engine.resume(),
    "is_paused": lambda engine, _: ["paused"] * engine.is_paused(),
    "oldest": lambda engine, _: [engine.oldest()],
    "name_version": lambda engine, text: engine.name_version(int(text)),
}


def _called(engine: "VllmEngine", message: bytes) -> _Outcome:
    method, text = msgspec.json.decode(message, type=tuple[str, str])
    try:
        return True, list(_METHODS[method](engine, text) or ())
    except Exception as exc:  # noqa: BLE001 - the leader waits for a reply
        return _failed(exc)


def _failed(exc: Exception) -> _Outcome:
    known = exc if isinstance(exc, errors.DeltaChainError) else errors.ApplyError(repr(exc))
    name, told = type(known).__name__, str(known.args[0])
    refusal = wire.Refusal(rank=0, error=name, message=told, hint=known.hint)
    return False, [wire.encode_reply(refusal)]


class JointEngine:
    """Engines of all servers as one; see :class:`deltachain.replica.engine.Engine`.

    If a server fails, that is a refusal of its ranks. If it gives no sign of life, this server's
    engine ends too, as it would in its next step.
    """

    def __init__(self, own: "VllmEngine", servers: Servers) -> None:
        self.software: Final = own.software
        self._own, self._servers = own, servers

    def call(self, request: wire.AnyRequest) -> Sequence[wire.RankReply]:
        outcomes = self._try("call", wire.encode(request))
        if not any(is_done for is_done, _ in outcomes):
            _results(outcomes[0])
        replies: list[wire.RankReply] = []
        for is_done, texts in outcomes:
            found: list[wire.RankReply] = [wire.decode_reply(text) for text in texts]
            if not is_done:
                ranks = range(len(replies), len(replies) + self._servers.ranks)
                found = [wire.addressed(found[0], rank, request) for rank in ranks]
            replies += found
        return replies

    def is_dead(self) -> bool:
        return self._own.is_dead()

    def is_paused(self) -> bool:
        return any(self._all("is_paused"))  # another client may have paused one of them alone

    def pause(self, *, in_doubt: bool = False) -> None:
        self._all("pause", "in doubt" if in_doubt else "")

    def resume(self) -> None:
        self._all("resume")

    def oldest(self) -> str:
        return min((text for (text,) in self._all("oldest")), key=age)

    def name_version(self, version: int) -> None:
        self._all("name_version", str(version))

    def _all(self, method: str, text: str = "") -> list[list[str]]:
        return [_results(outcome) for outcome in self._try(method, text)]

    def _try(self, method: str, text: str) -> list[_Outcome]:
        """Call a method of all engines at once, as one may wait for others."""
        others, post = range(1, self._servers.count), self._servers.post
        waits = [post.send(server, method, text) for server in others]
        found = [_called(self._own, msgspec.json.encode((method, text)))]
        for wait in waits:
            try:
                found.append(msgspec.json.decode(wait(), type=_Outcome))
            except errors.ApplyError as exc:
                self._own.end()
                found.append(_failed(exc))
        return found


def _results(outcome: _Outcome) -> list[str]:
    is_done, texts = outcome
    if not is_done:
        raise error_of(cast("wire.Refusal", wire.decode_reply(texts[0])))
    return texts


_Request: TypeAlias = tuple[str, str, list[tuple[str, str]], str]
"""Method, path, headers and body of what a client requests from a server that does not lead."""


async def _answered(app: FastAPI, message: bytes) -> tuple[int, str, str]:
    method, url, headers, body = msgspec.json.decode(message, type=_Request)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        content = body.encode("latin-1")
        found = await client.request(method, url, headers=headers, content=content, timeout=None)
    return found.status_code, found.headers.get("content-type", ""), found.content.decode("latin-1")


class _ToLeader(httpx.AsyncBaseTransport):
    def __init__(self, post: Post, *, keeps_host: bool) -> None:
        self._post, self._keeps_host = post, keeps_host

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self._keeps_host:
            request.headers["host"] = "another-server"
        headers = [tuple(one.decode("latin-1") for one in pair) for pair in request.headers.raw]
        body = b""
        async for chunk in cast("httpx.AsyncByteStream", request.stream):
            body += chunk
            if len(body) > LARGEST:
                return httpx.Response(413, text=f"request body above {LARGEST} bytes")
        message = request.method, request.url.raw_path.decode(), headers, body.decode("latin-1")
        try:
            reply = await aside(lambda post: post.send(0, *message)(), self._post)
        except errors.ApplyError as exc:
            raise httpx.ConnectError(str(exc.args[0]), request=request) from exc
        code, kind, text = msgspec.json.decode(reply, type=tuple[int, str, str])
        return httpx.Response(code, headers={"content-type": kind}, content=text.encode("latin-1"))
