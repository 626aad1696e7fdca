"""Network of a run, created and removed by a ``with`` block; needs Linux and root."""

import json
import logging
import os
import queue
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, TypeAlias

from deltachain.errors import ConfigError, DeltaChainError

_PIECE: Final = 64 << 10
_HELD: Final = 512

Held: TypeAlias = "queue.Queue[tuple[float, bytes]]"


class DelayProxy:
    def __init__(self, target: tuple[str, int], *, delay_s: float, host: str = "127.0.0.1") -> None:
        self._target = target
        self._delay_s = delay_s
        self._listener = socket.create_server((host, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._serving: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            ends = [self._listener, *self._open]
        for end in ends:
            with suppress(OSError):  # wakes who waits for it
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for serving in self._serving:
            serving.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                serving = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._serving.append(serving)
                serving.start()

    def _serve(self, client: socket.socket) -> None:
        with ExitStack() as stack:
            stack.callback(self._forget, client)
            if not self._keep(client):
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                return
            stack.callback(self._forget, server)
            if not self._keep(server):
                return
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake_s = 2 * self._delay_s
            ways = [
                threading.Thread(target=self._carry, args=args, daemon=True)
                for args in ((client, server, handshake_s), (server, client, 0.0))
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    def _carry(self, source: socket.socket, sink: socket.socket, first_s: float) -> None:
        held: Held = queue.Queue(_HELD)
        sending = threading.Thread(target=_send, args=(held, sink), daemon=True)
        sending.start()
        ready = time.monotonic() + self._delay_s + first_s
        piece = b"first"
        while piece:
            try:
                piece = source.recv(_PIECE)
            except OSError:
                piece = b""
            ready = max(ready, time.monotonic() + self._delay_s)
            held.put((ready, piece))
        sending.join()

    def _keep(self, end: socket.socket) -> bool:
        with self._lock:
            if not self._stopped:
                self._open.add(end)
            return not self._stopped

    def _forget(self, end: socket.socket) -> None:
        with self._lock:
            self._open.discard(end)
        end.close()


def _send(held: Held, sink: socket.socket) -> None:
    broken = False
    while True:
        ready, piece = held.get()
        if not piece:
            break
        if not broken:  # else only taken, so that nobody waits for room
            time.sleep(max(0.0, ready - time.monotonic()))
            try:
                sink.sendall(piece)
            except OSError:
                broken = True
    time.sleep(max(0.0, ready - time.monotonic()))
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR if broken else socket.SHUT_WR)


Command: TypeAlias = tuple[str, ...]

WIRE: Final = "wire"

HUB: Final = "hub"

SUBNET: Final = "10.77.0"

_BURST_S: Final = 0.002
_LEAST_BURST: Final = 128 << 10

_QUEUE_S: Final = 0.05
_LEAST_QUEUE: Final = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    mbit: int
    rtt_ms: float

    def __post_init__(self) -> None:
        if self.mbit < 0 or self.rtt_ms < 0:
            raise ConfigError(f"{self}: neither rate nor delay may be negative")

    @property
    def delay_s(self) -> float:
        return self.rtt_ms / 2000

    def __str__(self) -> str:
        rate = f"{self.mbit / 1000:g} Gbit/s" if self.mbit >= 1000 else f"{self.mbit} Mbit/s"
        return f"{rate}, {self.rtt_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    link: Link


TRAINER: Final = Place("trainer", Link(mbit=1000, rtt_ms=2))
STORE: Final = Place("store", Link(mbit=0, rtt_ms=0))
REPLICAS: Final = (Place("a", Link(mbit=100, rtt_ms=80)), Place("b", Link(mbit=1000, rtt_ms=20)))


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    run: str
    places: tuple[Place, ...]

    def namespace(self, place: str) -> str:
        return f"deltachain-{self.run}-{place}"

    def address(self, place: str) -> str:
        numbers = {one.name: number for number, one in enumerate(self.places, start=1)}
        return f"{SUBNET}.{numbers[place]}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(self.namespace(name) for name in (HUB, *(p.name for p in self.places)))

    def setup(self) -> list[Command]:
        hub = self.namespace(HUB)
        commands: list[Command] = [
            ("ip", "netns", "add", hub),
            ("ip", "-n", hub, "link", "add", "bridge", "type", "bridge"),
            ("ip", "-n", hub, "link", "set", "dev", "bridge", "up"),
        ]
        for place in self.places:
            commands += self._connect(place)
        return commands

    def teardown(self) -> list[Command]:
        return [("ip", "netns", "del", name) for name in reversed(self.namespaces)]

    def inside(self, place: str, command: Command) -> Command:
        return ("ip", "netns", "exec", self.namespace(place), *command)

    def counters(self, place: str) -> tuple[Command, Command]:
        show = ("-s", "-j", "qdisc", "show", "dev")
        return (
            ("tc", "-n", self.namespace(place), *show, WIRE),
            ("tc", "-n", self.namespace(HUB), *show, _port(place)),
        )

    def _connect(self, place: Place) -> list[Command]:
        hub, own, port = self.namespace(HUB), self.namespace(place.name), _port(place.name)
        commands: list[Command] = [
            ("ip", "netns", "add", own),
            ("ip", "-n", own, "link", "set", "dev", "lo", "up"),
            (
                *("ip", "link", "add", WIRE, "netns", own),
                *("type", "veth", "peer", "name", port, "netns", hub),
            ),
            ("ip", "-n", hub, "link", "set", "dev", port, "master", "bridge", "up"),
            ("ip", "-n", own, "addr", "add", f"{self.address(place.name)}/24", "dev", WIRE),
            ("ip", "-n", own, "link", "set", "dev", WIRE, "up"),
        ]
        if place.link.mbit:
            commands.append(("tc", "-n", own, *_limit(WIRE, place.link.mbit)))
            commands.append(("tc", "-n", hub, *_limit(port, place.link.mbit)))
        return commands


def sent_bytes(report: str) -> int:
    for entry in json.loads(report):
        if entry["kind"] == "tbf":
            return int(entry["bytes"])
    raise ConfigError("no rate limit on this interface, so nothing counts its bytes")


def _port(place: str) -> str:
    return f"to-{place}"


def _limit(interface: str, mbit: int) -> Command:
    bytes_per_s = mbit * 125_000
    burst = max(_LEAST_BURST, round(bytes_per_s * _BURST_S))
    queue = max(_LEAST_QUEUE, round(bytes_per_s * _QUEUE_S))
    rate = ("rate", f"{mbit}mbit", "burst", f"{burst}b", "limit", f"{queue}b")
    return ("qdisc", "add", "dev", interface, "root", "tbf", *rate)


logger = logging.getLogger(__name__)


class CrossRegionError(DeltaChainError):
    pass


class Counted(NamedTuple):
    sent: int
    received: int

    def since(self, before: "Counted") -> "Counted":
        return Counted(self.sent - before.sent, self.received - before.received)


@dataclass(frozen=True, slots=True)
class Network:
    plan: NetworkPlan

    def counted(self, place: str) -> Counted:
        sent, received = (sent_bytes(_run(command)) for command in self.plan.counters(place))
        return Counted(sent, received)


def check_host() -> None:
    if sys.platform != "linux":
        raise ConfigError(
            f"network namespaces need Linux, this is {sys.platform}",
            hint="run it in a virtual machine with Linux",
        )
    if os.geteuid() != 0:
        raise ConfigError(
            f"network namespaces need root, this is user {os.geteuid()}",
            hint="sudo make cross-region; it changes nothing outside namespaces of its own",
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"not found: {' and '.join(missing)}", hint="install the package iproute2"
        )


@contextmanager
def network(places: Sequence[Place]) -> Iterator[Network]:
    check_host()
    plan = NetworkPlan(secrets.token_hex(3), tuple(places))
    try:
        for command in plan.setup():
            _run(command)
        yield Network(plan)
    finally:
        for command in plan.teardown():
            _try(command)


def _run(command: Command) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CrossRegionError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}",
            hint="containers need the capabilities NET_ADMIN and SYS_ADMIN for this",
        )
    return done.stdout


def _try(command: Command) -> None:
    try:
        _run(command)
    except CrossRegionError as exc:
        logger.debug("%s", exc)
