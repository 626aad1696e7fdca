"""Check of the place where a replica would write its presence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Final
from uuid import uuid4

from deltachain.doctor.finding import Finding, failed, fault, ok
from deltachain.environment import read
from deltachain.errors import ConfigError, DeltaChainError
from deltachain.presence.writer import interval_s
from deltachain.store import Store, open_store
from deltachain.store.apart import check_apart

PRESENCE: Final = "presence"


def check_presence(environment: Mapping[str, str], chain: str) -> Iterator[Finding]:
    """Write an object where presences are written, and remove it.

    Args:
        environment: Environment variables without mistakes.
        chain: URL of the chain; empty if it is not known.
    """
    url = read(environment).get("PRESENCE_URL", "")
    if not url:
        return
    try:
        if chain:
            check_apart(url, chain)
        store = open_store(url)
    except ConfigError as exc:
        yield failed(PRESENCE, exc)
        return
    with closing(store):
        yield _trial(store)


def _trial(store: Store) -> Finding:
    key = f"trial-{uuid4().hex}"
    try:
        store.put(key, b"trial")
        store.delete(key)
    except DeltaChainError as exc:
        hint = exc.hint or "name a place where this machine may write and delete, beside the chain"
        return fault(PRESENCE, f"no presence can be written: {exc.args[0]}", hint)
    every_s = interval_s(store.capabilities)
    return ok(PRESENCE, f"{store.url} takes the presence of a replica, every {every_s:g} s")
