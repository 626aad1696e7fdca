"""The heartbeat of a signed chain: a publisher's word for which version is the newest, and when.

A store that withholds new versions shows true, signed, old ones. A reader with a limit of age
notices: the newest manifest or a heartbeat that names it must be younger.
"""

from __future__ import annotations

import time
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.errors import ObjectNotFoundError, StaleChainError
from deltachain.format.documents import unseal
from deltachain.format.keys import HEARTBEAT_KEY
from deltachain.format.signed import Heartbeat

MAX_HEARTBEAT: Final = 1 << 16
"""Size limit of a heartbeat, in bytes; it is read before it is trusted."""


def write_heartbeat(chain: Chain, committed: Committed, *, now: float) -> None:
    """Write that a version is the newest.

    Args:
        chain: The chain, with a signing key.
        committed: Its newest version.
        now: Seconds since 1970.
    """
    heartbeat = Heartbeat(
        chain=chain.identity.chain,
        version=committed.version,
        manifest=committed.digest,
        time=now,
    )
    chain.store.put(HEARTBEAT_KEY, chain.trust.seal(heartbeat, chain.identity.chain))


def read_heartbeat(chain: Chain) -> Heartbeat | None:
    """Read the heartbeat; ``None`` if there is none.

    Raises:
        SignatureError: No trusted key signed it.
        MalformedError: It is no heartbeat.
    """
    try:
        data = chain.store.get(HEARTBEAT_KEY, limit=MAX_HEARTBEAT)
    except ObjectNotFoundError:
        return None
    found = unseal(data, Heartbeat, key=HEARTBEAT_KEY)
    chain.trust.check(data, Heartbeat, chain=chain.identity.chain, key=HEARTBEAT_KEY)
    return found


def check_age(chain: Chain, newest: Committed) -> None:
    """Raise if the newest version is older than the reader allows.

    Makes a request only if the manifest itself is too old; none without a limit.

    Args:
        chain: The chain.
        newest: The newest version that its store shows.

    Raises:
        StaleChainError: Manifest and heartbeat are too old, or the heartbeat names a later version.
    """
    most_s, now = chain.trust.max_age_s, time.time()
    if most_s is None or now - newest.manifest.time <= most_s:
        return
    stale = judge_age(newest, read_heartbeat(chain), now=now, most_s=most_s, url=chain.store.url)
    if stale is not None:
        raise stale


def judge_age(
    newest: Committed, heartbeat: Heartbeat | None, *, now: float, most_s: float, url: str
) -> StaleChainError | None:
    """Return the error for a version that is too old to be the newest; ``None`` if it is not.

    Args:
        newest: The newest version that a store shows.
        heartbeat: The accepted heartbeat, if any.
        now: Seconds since 1970.
        most_s: Largest age, in seconds.
        url: URL of the store.
    """
    version = newest.version
    if heartbeat is not None and heartbeat.version > version:
        return StaleChainError(
            f"{url} shows version {version} as its newest, its heartbeat names version "
            f"{heartbeat.version}",
            version=version,
        )
    latest = newest.manifest.time
    if heartbeat is not None and heartbeat.manifest == newest.digest:
        latest = max(latest, heartbeat.time)
    age = now - latest
    if age <= most_s:
        return None
    return StaleChainError(
        f"version {version} is the newest at {url}, and the last sign of its publisher is "
        f"{age:.0f} s old, more than {most_s:g} s",
        version=version,
    )
