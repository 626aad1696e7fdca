"""The heartbeat of a signed chain: a publisher's word for which records are the newest, and when.

A store that withholds new versions, tags or prune records shows true, signed, old ones. The
heartbeat names the newest of each. A reader with a limit of age notices a heartbeat that is
withheld as well: for versions, the newest manifest or a heartbeat that names it must be younger.
"""

import logging
import time
from collections.abc import Mapping
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.checks import read_document
from deltachain.chain.manifests import NONE
from deltachain.errors import ChainError, ObjectNotFoundError, StaleChainError
from deltachain.format.documents import Heartbeat, PruneRecord
from deltachain.format.keys import HEARTBEAT_KEY

MAX_HEARTBEAT: Final = 1 << 22
"""Size limit of a heartbeat, in bytes: 28,000 tags of the longest name. It is read before it is
trusted."""

YOUNG_S: Final = 300.0
"""Age of a heartbeat, in seconds, from which on a reader without a limit is told that tags may be
older: a publisher at work renews it ten times as often."""

logger = logging.getLogger(__name__)

_WITHHELD: Final = (
    "the store withholds records, or an older copy of it was restored; in that case set the tag "
    "again, or delete heartbeat.json and restart the publisher"
)


def write_heartbeat(
    chain: Chain, committed: Committed, *, now: float, tags: Mapping[str, int], prune: int = NONE
) -> None:
    heartbeat = Heartbeat(
        chain=chain.identity.chain,
        version=committed.version,
        manifest=committed.digest,
        time=now,
        tags=dict(tags),
        prunes=prune + 1,
    )
    data = chain.trust.seal(heartbeat, chain.identity.chain)
    if len(data) > MAX_HEARTBEAT:
        raise ChainError(
            f"{len(tags)} tags do not fit into a heartbeat of {MAX_HEARTBEAT} bytes",
            hint="use fewer names of tags: a removed tag keeps its name",
        )
    chain.store.put(HEARTBEAT_KEY, data)


def read_heartbeat(chain: Chain) -> Heartbeat | None:
    try:
        found, _ = read_document(
            chain.store,
            HEARTBEAT_KEY,
            Heartbeat,
            chain=chain.identity.chain,
            trust=chain.trust,
            limit=MAX_HEARTBEAT,
        )
    except ObjectNotFoundError:
        return None
    return found


def named(chain: Chain) -> Heartbeat | None:
    """Read the heartbeat before tags or prune records, to compare these with it.

    Without trusted keys nothing is read.
    """
    if chain.trust.trusted is None:
        return None
    found, most_s, url = read_heartbeat(chain), chain.trust.max_age_s, chain.store.url
    if most_s is None:
        return found
    if found is None or found.tags is None:
        what = "has no heartbeat" if found is None else "has a heartbeat that names no tags"
        raise StaleChainError(f"{url} {what}: tags and prune records may be old")
    age = time.time() - found.time
    if age < -most_s:
        raise _ahead(url, -age, most_s)
    if age > most_s:
        raise StaleChainError(
            f"the heartbeat of {url} is {age:.0f} s old, more than {most_s:g} s: tags and prune "
            "records may be old"
        )
    return found


def check_tags(chain: Chain, heartbeat: Heartbeat | None, shown: Mapping[str, int]) -> None:
    """Raise if a store shows older records of tags than its heartbeat names."""
    for name, number in ((heartbeat and heartbeat.tags) or {}).items():
        if number > shown.get(name, number):
            raise _withheld(chain, f"record {shown[name]} of tag {name!r}", number)


def warn_of_unproven(chain: Chain, heartbeat: Heartbeat | None, shown: str) -> None:
    """Warn a reader with trusted keys and no limit of age of what no recent heartbeat proves."""
    if chain.trust.trusted is None or chain.trust.max_age_s is not None:
        return
    if heartbeat is None or heartbeat.tags is None:
        why = "has no heartbeat" if heartbeat is None else "has a heartbeat that names no tags"
    elif (age := time.time() - heartbeat.time) > YOUNG_S:
        why = f"has a heartbeat that is {age:.0f} s old"
    else:
        return
    logger.warning(
        "%s %s: nothing proves that %s the newest; with DELTACHAIN_MAX_HEARTBEAT_AGE_S it would be "
        "refused",
        chain.store.url,
        why,
        shown,
    )


def newest_prune(chain: Chain) -> PruneRecord | None:
    """Read the newest prune record of a store, for who sets tags or deletes."""
    heartbeat = named(chain)
    record = chain.prunes.newest_there()
    number = record.number if record else NONE
    if heartbeat is not None and heartbeat.prunes > number + 1:
        raise _withheld(chain, f"prune record {number}", heartbeat.prunes - 1)
    return record


def _withheld(chain: Chain, shown: str, number: int) -> StaleChainError:
    return StaleChainError(
        f"{chain.store.url} shows {shown} as the newest, its heartbeat names {number}",
        hint=_WITHHELD,
    )


def check_age(chain: Chain, newest: Committed) -> None:
    """Raise if the newest version is older than the reader allows.

    Makes a request only if the manifest itself is too old; none without a limit.
    """
    most_s, now = chain.trust.max_age_s, time.time()
    if most_s is None or abs(now - newest.manifest.time) <= most_s:
        return
    stale = judge_age(newest, read_heartbeat(chain), now=now, most_s=most_s, url=chain.store.url)
    if stale is not None:
        raise stale


def judge_age(
    newest: Committed, heartbeat: Heartbeat | None, *, now: float, most_s: float, url: str
) -> StaleChainError | None:
    """Return the error for a version that is too old to be the newest; ``None`` if it is not."""
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
    if age < -most_s:
        return _ahead(url, -age, most_s)
    if age <= most_s:
        return None
    return StaleChainError(
        f"version {version} is the newest at {url}, and the last sign of its publisher is "
        f"{age:.0f} s old, more than {most_s:g} s",
        version=version,
    )


def _ahead(url: str, ahead_s: float, most_s: float) -> StaleChainError:
    return StaleChainError(
        f"the last sign of the publisher of {url} is {ahead_s:.0f} s in the future, more than "
        f"{most_s:g} s: its age is not known",
        hint="set the clocks of this machine and of the publisher",
    )
