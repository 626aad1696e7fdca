"""The network as values: who is connected how, and the commands that make it and take it away."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, TypeAlias

from deltachain.errors import ConfigError

Command: TypeAlias = tuple[str, ...]

WIRE: Final = "wire"
"""A place's end of its link."""

HUB: Final = "hub"
"""The namespace of the bridge that all links end in."""

SUBNET: Final = "10.77.0"
"""Only namespaces of the run have it: it may exist elsewhere."""

_BURST_S: Final = 0.002
_LEAST_BURST: Final = 128 << 10
"""Bytes: a segment that the kernel has yet to cut into packets is up to half as large."""

_QUEUE_S: Final = 0.05
_LEAST_QUEUE: Final = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How a place is connected to the others.

    Attributes:
        mbit: Megabits a second, each way; 0 for as many as the machine can do.
        rtt_ms: Milliseconds that a round trip takes in addition.
    """

    mbit: int
    rtt_ms: float

    def __post_init__(self) -> None:
        if self.mbit < 0 or self.rtt_ms < 0:
            raise ConfigError(f"{self}: neither rate nor delay may be negative")

    @property
    def delay_s(self) -> float:
        """Seconds one way."""
        return self.rtt_ms / 2000

    def __str__(self) -> str:
        rate = f"{self.mbit / 1000:g} Gbit/s" if self.mbit >= 1000 else f"{self.mbit} Mbit/s"
        return f"{rate}, {self.rtt_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere a process runs."""

    name: str
    link: Link


TRAINER: Final = Place("trainer", Link(mbit=1000, rtt_ms=2))
STORE: Final = Place("store", Link(mbit=0, rtt_ms=0))
REPLICAS: Final = (Place("a", Link(mbit=100, rtt_ms=80)), Place("b", Link(mbit=1000, rtt_ms=20)))


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """Namespaces of one run.

    Attributes:
        run: Tells runs apart.
        places: Who is connected.
    """

    run: str
    places: tuple[Place, ...]

    def namespace(self, place: str) -> str:
        """The name of a place's namespace."""
        return f"deltachain-{self.run}-{place}"

    def address(self, place: str) -> str:
        """The address that others reach a place by."""
        numbers = {one.name: number for number, one in enumerate(self.places, start=1)}
        return f"{SUBNET}.{numbers[place]}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All of them, the hub's first."""
        return tuple(self.namespace(name) for name in (HUB, *(p.name for p in self.places)))

    def setup(self) -> list[Command]:
        """Commands that make the network, in order."""
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
        """Commands that take it away; links go with their namespaces."""
        return [("ip", "netns", "del", name) for name in reversed(self.namespaces)]

    def inside(self, place: str, command: Command) -> Command:
        """A command, run at a place."""
        return ("ip", "netns", "exec", self.namespace(place), *command)

    def counters(self, place: str) -> tuple[Command, Command]:
        """Commands that show what was sent from a place, and what was sent to it."""
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
    """Bytes that left an interface through its rate limit, by ``tc -s -j qdisc show``.

    Counted here and not at the interface itself, which takes a segment of 64 KB that is yet to be
    cut into packets for one packet with one header.

    Raises:
        ConfigError: The interface has no rate limit.
    """
    for entry in json.loads(report):
        if entry["kind"] == "tbf":
            return int(entry["bytes"])
    raise ConfigError("no rate limit on this interface, so nothing counts its bytes")


def _port(place: str) -> str:
    """The hub's end of a place's link."""
    return f"to-{place}"


def _limit(interface: str, mbit: int) -> Command:
    """Arguments of ``tc`` that limit what leaves an interface, with a queue as a router has."""
    bytes_per_s = mbit * 125_000
    burst = max(_LEAST_BURST, round(bytes_per_s * _BURST_S))
    queue = max(_LEAST_QUEUE, round(bytes_per_s * _QUEUE_S))
    rate = ("rate", f"{mbit}mbit", "burst", f"{burst}b", "limit", f"{queue}b")
    return ("qdisc", "add", "dev", interface, "root", "tbf", *rate)
