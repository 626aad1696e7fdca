"""Network of a run, created and removed by a ``with`` block; needs Linux and root."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from deltachain.errors import ConfigError, DeltaChainError
from tests.bench.cross_region.plan import Command, NetworkPlan, Place, sent_bytes

logger = logging.getLogger(__name__)


class CrossRegionError(DeltaChainError):
    pass


class Counted(NamedTuple):
    sent: int
    received: int

    def since(self, before: Counted) -> Counted:
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
