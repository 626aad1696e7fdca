"""The examination: all checks, in the order in which one depends on another."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import closing
from typing import Any, Final

from deltachain.doctor.engines import check_engines
from deltachain.doctor.finding import Finding, Grade, Role, failed, note
from deltachain.doctor.packages import check_packages
from deltachain.doctor.presence import check_presence
from deltachain.doctor.settings import check_files, check_names, check_transport
from deltachain.doctor.start import (
    STORE,
    check_chain,
    check_server,
    check_silence,
    probe_latency,
    probe_writes,
)
from deltachain.environment import mistakes
from deltachain.errors import DeltaChainError
from deltachain.store import open_store

DEADLINE_S: Final = 8.0
"""Time limit of one request to the store, in seconds: a diagnosis does not wait for a store."""

_LIMITED: Final = ("s3", "hf")
"""Schemes of stores with such a limit."""


def examine(
    url: str, role: Role = Role.FOLLOWER, environment: MutableMapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Examine this machine for one role; yield findings as they are made.

    Only a publisher's store is written to, and the place for presences, under keys of their own
    that are removed.

    Args:
        url: URL of the chain; empty for ``DELTACHAIN_URL``.
        role: What the machine is to do.
        environment: The environment of this process. Variables with mistakes are removed from it
            once they are reported, so that the other checks can go on.
    """
    yield from check_names(environment)
    for name in dict(mistakes(environment)):
        environment.pop(name)
    yield from check_packages(role)
    transport = [*check_files(environment), *check_transport(environment)]
    yield from transport
    if role is Role.FOLLOWER:
        yield from check_engines(environment)
        yield from check_server(environment)
    url = url or environment.get("DELTACHAIN_URL", "")
    if role is Role.FOLLOWER:
        yield from check_presence(environment, url)
    if not url:
        yield note(STORE, "no store was examined", "give its URL, or set DELTACHAIN_URL")
    elif all(finding.grade is not Grade.FAULT for finding in transport):
        yield from _examine_store(url, role, environment)
    else:
        yield note(STORE, "no store was examined", "correct the faults above first")


def _examine_store(
    url: str, role: Role, environment: MutableMapping[str, str]
) -> Iterator[Finding]:
    scheme = url.partition("://")[0].lower()
    options: dict[str, Any] = {"deadline_s": DEADLINE_S} if scheme in _LIMITED else {}
    try:
        store = open_store(url, options, writer=role is Role.PUBLISHER)
    except DeltaChainError as exc:
        yield failed(STORE, exc)
        return
    with closing(store):
        try:
            yield probe_latency(store)
        except DeltaChainError as exc:
            yield failed(STORE, exc)
            return
        if role is Role.PUBLISHER:
            yield from probe_writes(store)
        else:
            yield from check_silence(store, environment)
        try:
            yield from check_chain(store, role, environment)
        except DeltaChainError as exc:
            yield failed(STORE, exc)
