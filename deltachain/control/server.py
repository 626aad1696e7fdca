"""The server of a replica: its start, and how much is asked of it at once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Security
from fastapi.security import HTTPBearer
from starlette.requests import ClientDisconnect

from deltachain.environment import is_strict, refused
from deltachain.errors import ControlPlaneError, DeltaChainError, EngineDamagedError
from deltachain.format.documents import decode
from deltachain.metrics import Figure, register_figures
from deltachain.presence.together import Together
from deltachain.presence.writer import PresenceWriter, record_key, replica_presence
from deltachain.replica.engine import Engine
from deltachain.replica.leader import REFUSALS, Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.threads import apart
from deltachain.tokens import Tokens

from .access import Access
from .schemas import VersionRequest

BODY_S: Final = 10.0  # seconds in which a request body must arrive
LARGEST: Final = 4096  # size limit of a request body, in bytes
AT_ONCE: Final = 4  # concurrent requests of one kind
LOOK_S: Final = 0.5  # seconds between two checks for a disconnected client
RequestKind: TypeAlias = Literal["update", "rollback", "quick"]

_SCHEME: Final = HTTPBearer(auto_error=False, scheme_name="token")
"""For OpenAPI only: :meth:`Access.check` compares the token."""

_T = TypeVar("_T")
_A = TypeVar("_A")


class Control:
    """The leader behind the routes, and who may call them."""

    def __init__(
        self,
        leader: Leader | None,
        refusal: str,
        *,
        token: str | Path,
        is_open: bool,
        is_guarded: bool = False,
        presence: PresenceWriter | None = None,
    ) -> None:
        self.leader = leader
        self.presence = presence
        self.refusal = refusal
        self.access = Access(Tokens(token), is_open=is_open, is_guarded=is_guarded)
        self._free = {kind: asyncio.Semaphore(AT_ONCE) for kind in get_args(RequestKind)}

    def figures(self) -> Iterator[Figure]:
        if self.leader is not None:
            yield from self.leader.figures()
        if self.presence is not None:
            yield from self.presence.figures()

    async def run(
        self, action: Callable[[Leader], _T], request: Request | None, kind: RequestKind = "quick"
    ) -> _T:
        """Run a slow action outside the event loop.

        The wait ends once the client of ``request`` disconnects, since a server that shuts down
        waits for its requests. Actions of one ``kind`` wait for each other alone: those that wait
        for the store do not block others.
        """
        if self.leader is None:
            raise HTTPException(503, self.refusal)
        free = self._free[kind]
        slot = asyncio.ensure_future(free.acquire())
        try:
            await _unless_left(slot, request)
        finally:
            slot.cancel()  # no effect once it is acquired
        work = asyncio.ensure_future(aside(action, self.leader))
        work.add_done_callback(partial(_end, free))
        await _unless_left(work, request)
        return work.result()


async def _unless_left(work: asyncio.Future[Any], request: Request | None) -> None:
    while not (await asyncio.wait({work}, timeout=LOOK_S))[0]:
        if request is not None and await request.is_disconnected() and not work.done():
            raise HTTPException(503, "client disconnected")


def _end(free: asyncio.Semaphore, work: asyncio.Future[Any]) -> None:
    free.release()
    if not work.cancelled():
        work.exception()  # retrieved here, since the waiting coroutine may be gone


async def aside(action: Callable[[_A], _T], given: _A) -> _T:
    """Call in a daemon thread, which does not block the end of the process as executors do."""
    outcome = apart(partial(action, given), "deltachain-control")
    if outcome is None:
        raise ControlPlaneError("this process cannot start another thread", hint="ask again later")
    return await asyncio.wrap_future(outcome)


def control_of(request: Request) -> Control:
    """Return the server's :class:`Control`; 503 while the engine is starting."""
    control = control_in(request.app)
    if control is None:
        raise HTTPException(503, "the engine is starting")
    return control


def control_in(app: FastAPI) -> Control | None:
    control: Control | None = getattr(app.state, "deltachain", None)
    return control


def leading(app: FastAPI) -> Control | None:
    control = control_in(app)
    return control if control is not None and control.leader is not None else None


async def _allowed(request: Request, _: Annotated[object, Security(_SCHEME)]) -> Control:
    control = control_of(request)
    control.access.check(request)
    return control


Allowed = Annotated[Control, Depends(_allowed)]


class _Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True): ...


async def _asked(control: Allowed, request: Request) -> VersionRequest:
    del control
    return await _body(request, VersionRequest, '{"version": N} or {}')


async def _nothing(control: Allowed, request: Request) -> None:
    del control
    await _body(request, _Nothing, "empty or {}")


async def _body(request: Request, kind: type[_T], expected: str) -> _T:
    if request.url.query:
        raise HTTPException(422, "query parameters are not supported; send a JSON body")
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST:
                    raise HTTPException(413, f"request body above {LARGEST} bytes")
    except TimeoutError as exc:
        headers = {"connection": "close"}  # the rest of the body is not waited for
        raise HTTPException(408, f"request body not there in {BODY_S:g} s", headers) from exc
    except ClientDisconnect as exc:
        raise HTTPException(400, "request body ended early") from exc
    try:
        return decode(body or b"{}", kind)
    except msgspec.DecodeError as exc:
        raise HTTPException(422, f"invalid request body: expected {expected}") from exc


Asked = Annotated[VersionRequest, Depends(_asked)]
NothingAsked = Annotated[None, Depends(_nothing)]


def fall_asleep(leader: Leader, kinds: frozenset[str]) -> None:
    """Wait for a running swap, then mark the replica as unready; kinds are the engine's terms."""
    with leader.subscriber.alone():
        leader.released |= kinds


def wake_up(leader: Leader, kinds: frozenset[str], weights: str) -> None:
    """Verify or heal restored weights, then mark the replica as ready."""
    try:
        if weights in kinds & leader.released:
            leader.scrub()
    finally:
        leader.released -= kinds


logger = logging.getLogger(__name__)


LedEngine: TypeAlias = tuple[Engine, Path]
"""An engine, and the checkpoint that it was loaded from: base of the chain."""


async def lead(
    find: Callable[[ReplicaSettings], LedEngine],
    environment: Mapping[str, str],
    *,
    is_open: bool,
    is_guarded: bool,
    key: str = "",
    address: str = "",
) -> Control:
    """Start following the chain of ``DELTACHAIN_URL`` with this server's engine, if it is set.

    Returns once the replica is at the head, or must wait for an unavailable store or a chain that
    does not exist yet. If the engine is refused and ``DELTACHAIN_STRICT`` is false, the server
    starts anyway, and the routes report the reason; else the process exits. ``key`` is the required
    token if the environment names none; ``address`` tells the presence of this replica from others
    of the machine.
    """
    leader, refusal = None, "DELTACHAIN_URL is not set: this server follows no chain"
    presence: PresenceWriter | None = None
    token: str | Path = key
    try:
        settings = ReplicaSettings.of(environment)
        if settings is not None:
            Tokens(settings.token)  # a wrong file is found before the engine is touched
            token = settings.token or key
            engine, checkpoint = find(settings)
            base = settings.subscribe.base or checkpoint
            settings = replace(settings, subscribe=replace(settings.subscribe, base=base))
            leader = Leader(settings, engine)
            if settings.together is not None:
                member = record_key(engine.software, address).removesuffix(".json")
                group = Together(settings.presence, settings.together, member)
                leader.subscriber.group = group
            presence = replica_presence(
                settings, leader.status, engine=engine.software, place=address
            )
            await aside(Leader.start, leader)
    except DeltaChainError as exc:
        if presence is not None:
            presence.fail(str(exc.args[0]))
        is_damaged = isinstance(exc, EngineDamagedError)
        if is_damaged or (is_strict(environment) and isinstance(exc, REFUSALS)):
            raise refused(exc) from exc
        leader, refusal = None, str(exc)
        logger.warning("deltachain follows no chain: %s", exc)
    return Control(
        leader, refusal, token=token, is_open=is_open, is_guarded=is_guarded, presence=presence
    )


def leave_at_end(app: FastAPI) -> None:
    """Make the end of a server's lifespan withdraw the presence of its replica, if it has one."""
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with original(app) as state:
            try:
                yield state
            finally:
                control = control_in(app)
                if control is not None and control.presence is not None:
                    await asyncio.to_thread(control.presence.close)

    app.router.lifespan_context = lifespan


def join_registry(control: Control) -> None:
    """Add the figures of a leader to the process' own Prometheus registry, once.

    An engine that serves that registry at its own ``/metrics`` then shows them there.
    """
    if control.leader is None:
        return
    with suppress(ModuleNotFoundError):
        register_figures(control.figures)
