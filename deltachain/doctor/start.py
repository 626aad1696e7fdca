"""What a start with this environment would do: the chain that is there, and how it is followed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.mirror_record import refuse_mirror
from deltachain.chain.plan import Plan
from deltachain.chain.reachable import plan_present
from deltachain.chain.trust import Trust
from deltachain.doctor.finding import Finding, Role, failed, fault, note, ok
from deltachain.doctor.probe import CLOCK, SKEW_S, compare_clocks
from deltachain.environment import read
from deltachain.errors import DeltaChainError, ObjectNotFoundError
from deltachain.format.keys import manifest_key
from deltachain.redact import redacted_url
from deltachain.replica.settings import ReplicaSettings, spool_folder
from deltachain.retry import between_polls
from deltachain.room import NoRoomError, check_room
from deltachain.store import Store
from deltachain.store.base import ObjectInfo
from deltachain.subscribe.announcements import RARE
from deltachain.subscribe.history import require
from deltachain.tokens import Tokens

CHAIN: Final = "chain"
START: Final = "start"


def check_chain(store: Store, role: Role, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Read the chain as a start would.

    Args:
        store: Store of the chain.
        role: Whether a publisher or a follower starts.
        environment: Environment variables without mistakes.
    """
    try:
        if role is Role.PUBLISHER:
            trust = Trust.of_writer(environment=environment)
            refuse_mirror(store, trust)
        else:
            trust = Trust.of_reader(environment=environment)
        chain = Chain.open(store, trust)
        head = require(chain, None)
    except ObjectNotFoundError:
        yield _no_chain(store, role)
        return
    except DeltaChainError as exc:
        yield failed(CHAIN, exc)
        return
    yield _newest(chain, head)
    stored = store.find(manifest_key(head.version))
    yield from _publisher_clock(head, stored)
    if role is Role.FOLLOWER:  # a publisher's writes have told more
        yield from compare_clocks(store, stored)
        yield from _newcomer(chain, head, environment)
    else:
        yield ok(START, f"a publisher continues with version {head.version + 1}")


def check_silence(store: Store, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that a follower polls before its store counts as silent.

    Args:
        store: Store of the chain.
        environment: Environment variables without mistakes.
    """
    given = read(environment)
    most_s = given.get("MAX_SILENCE_S")
    poll_s = given.get("POLL_S") or store.capabilities.poll_s
    intervals = RARE if store.url.startswith("hf://") else 1  # a live feed makes polls rare
    pause_s = between_polls(poll_s * intervals).first_s
    if most_s is not None and most_s <= pause_s:
        yield fault(
            START,
            f"DELTACHAIN_MAX_SILENCE_S is {most_s:g}, and a follower of this store polls every "
            f"{pause_s:g} s at most: it would say again and again that it is not ready",
            f"set it to several polls: {max(60, math.ceil(2 * pause_s))}, or poll more often",
        )


def _no_chain(store: Store, role: Role) -> Finding:
    if role is Role.PUBLISHER:
        return ok(START, f"{store.url} has no chain: a publisher makes one, with version 0")
    said = f"{store.url} has no chain: a follower waits until a publisher has made one"
    return note(CHAIN, said, "start the publisher, or correct the URL")


def _newest(chain: Chain, head: Committed) -> Finding:
    manifest = head.manifest
    age = max(0.0, time.time() - manifest.time)
    step = "" if manifest.step is None else f" of step {manifest.step}"
    signed = "" if chain.trust.trusted is None else ", signed by a trusted key"
    return ok(
        CHAIN, f"version {head.version}{step} is the newest, committed {_span(age)} ago{signed}"
    )


def _publisher_clock(head: Committed, stored: ObjectInfo | None) -> Iterator[Finding]:
    """Yield a finding if a manifest is dated after its write, which no copying can cause."""
    told = None if stored is None else stored.modified
    ahead_s = head.manifest.time - (time.time() if told is None else told)
    if ahead_s > SKEW_S:
        yield note(
            CLOCK,
            f"version {head.version} is dated {_span(ahead_s)} after its write to the store: "
            "the clock of its publisher is ahead",
            "set the clock of the publisher: alerts on the age of versions come that much later",
        )


def _newcomer(chain: Chain, head: Committed, environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        plan = plan_present(chain, None, head)
    except DeltaChainError as exc:
        yield failed(START, exc)
        return
    size = f"{plan.nbytes / 1e6:,.1f} MB in {plan.requests} objects"
    yield ok(START, f"a follower that holds nothing fetches {size}")
    yield from _spool(plan, spool_folder(environment))
    if any(edge.kind == "base" for edge in plan.edges) and "BASE" not in read(environment):
        yield note(
            START,
            "the chain begins with a base checkpoint that it does not contain",
            "set DELTACHAIN_BASE, or start the engine from that checkpoint",
        )


def _spool(plan: Plan, spool: Path) -> Iterator[Finding]:
    there = next(path for path in (spool, *spool.parents) if path.exists())
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError:
        yield fault(
            START,
            f"{there}, where objects are kept while they are staged, cannot be written to",
            "name another folder in DELTACHAIN_SPOOL",
        )
        return
    try:
        check_room(there, plan.nbytes)
    except NoRoomError as exc:
        hint = "free some space, or name another folder in DELTACHAIN_SPOOL"
        yield fault(START, f"{there} lacks {exc.missing:,} bytes for the fetched objects", hint)


def check_server(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Tell what a vLLM or SGLang server would do that starts with this environment.

    Args:
        environment: Environment variables without mistakes.
    """
    try:
        settings = ReplicaSettings.of(environment)
        if settings is None:
            yield note(START, "a server would follow no chain: DELTACHAIN_URL is not set")
            return
        tokens = Tokens(settings.token)
    except DeltaChainError as exc:
        yield failed(START, exc)
        return
    exits = "ends at its start" if settings.strict else "serves what it loaded"
    yield ok(
        START, f"a server follows {redacted_url(settings.subscribe.url)}, and {exits} if it cannot"
    )
    if not settings.follow:
        hint = "set DELTACHAIN_FOLLOW=1 to apply them as they are committed"
        yield note(START, "a server applies new versions only when it is told to", hint)
    if not tokens:
        yield note(
            START,
            "a server without a key of its own answers on the loopback interface alone",
            "set DELTACHAIN_TOKEN or DELTACHAIN_TOKEN_FILE to control it from elsewhere",
        )


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
