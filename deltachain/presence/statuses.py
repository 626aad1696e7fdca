"""Statuses of those that follow a chain without an engine: a follower, an agent, a mirror."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltachain.checkpoint import HELD_FILE
from deltachain.errors import ControlPlaneError, StoreUnavailableError
from deltachain.redact import redacted_url
from deltachain.replica.readiness import Condition, why_unready
from deltachain.replica.status import ReplicaStatus
from deltachain.subscribe.status import lag
from deltachain.version import __version__

if TYPE_CHECKING:
    from deltachain.errors import DeltaChainError
    from deltachain.mirror.follow import MirrorTotals
    from deltachain.mirror.mirror import Mirror
    from deltachain.subscribe import Subscriber


def follower_status(
    subscriber: Subscriber,
    given: Mapping[str, Any],
    *,
    engine: str,
    trouble: DeltaChainError | None,
    unready: str = "",
) -> ReplicaStatus:
    """Return the status of a follower, from memory and a look at its folder.

    Args:
        subscriber: The subscriber.
        given: Variables of the environment, as :func:`deltachain.environment.read` returns them.
        engine: What it writes into; see :func:`deltachain.figures.info`.
        trouble: Error of its last look; ``None`` for none.
        unready: Why what it writes into does not serve the held version; empty if it does.
    """
    chain, held, times = subscriber.opened, subscriber.held, subscriber.times
    version, newest = held.version if held else None, chain.latest if chain else None
    doubt = subscriber.watch.doubt
    reason = _reason(subscriber, given, trouble) or unready
    committed_at = times.commit_of(held.manifest) if held else None
    return _status(
        url=chain.store.url if chain else redacted_url(subscriber.config.url),
        chain=chain.identity.chain if chain else None,
        version=version,
        manifest=held.manifest if held else None,
        state=held.state if held else None,
        head=newest,
        lag_versions=lag(newest, version),
        ready=not reason,
        reason=reason,
        pinned=subscriber.pinned,
        poisoned=subscriber.poisoned,
        trouble=str(trouble) if trouble else "",
        doubt=str(doubt.args[0]) if doubt else "",
        engine=engine,
        last={"version": subscriber.last.version} if subscriber.last else None,
        phases=subscriber.last.phases if subscriber.last else {},
        looked_at=times.looked_at,
        applied_at=times.applied_at,
        committed_at=committed_at,
        silence_s=times.silence_s,
        age_s=None if committed_at is None else max(0.0, time.time() - committed_at),
    )


def mirror_status(
    mirror: Mirror, totals: MirrorTotals, given: Mapping[str, Any], *, url: str
) -> ReplicaStatus:
    """Return the status of a mirror, from memory.

    Args:
        mirror: The mirror.
        totals: Its totals.
        given: Variables of the environment, as :func:`deltachain.environment.read` returns them.
        url: URL of its source.
    """
    version, head, silence_s = (
        totals.version_of(mirror),
        totals.head_of(mirror),
        totals.silence_of(mirror),
    )
    trouble = totals.trouble
    # A source that does not answer is a matter of silence; all else keeps versions from readers.
    is_away = isinstance(trouble, StoreUnavailableError) and trouble.url != mirror.destination.url
    doubt = str(trouble.args[0]) if trouble is not None and not is_away else ""
    reason = _why_unready(given, version=version, newest=head, silence_s=silence_s, doubt=doubt)
    return _status(
        url=url,
        chain=mirror.chain,
        version=version,
        head=head,
        lag_versions=lag(head, version),
        ready=not reason,
        reason=reason,
        trouble=str(totals.trouble) if totals.trouble else "",
        engine="mirror",
        looked_at=totals.looked_at,
        applied_at=totals.applied_at,
        silence_s=silence_s,
    )


def _reason(
    subscriber: Subscriber, given: Mapping[str, Any], trouble: DeltaChainError | None
) -> str:
    """Return why a follower does not do its work; empty if it does."""
    chain, doubt = subscriber.opened, subscriber.watch.doubt
    if isinstance(trouble, ControlPlaneError):  # the server of an agent does not have the version
        return str(trouble.args[0])
    folder = getattr(subscriber.target, "folder", None)
    if isinstance(folder, Path) and subscriber.held and not (folder / HELD_FILE).exists():
        return f"{folder} was removed, or its {HELD_FILE} was"
    return _why_unready(
        given,
        version=subscriber.version,
        newest=chain.latest if chain else None,
        poisoned=subscriber.poisoned,
        doubt=str(doubt.args[0]) if doubt else "",
        pinned=subscriber.pinned,
        silence_s=subscriber.times.silence_s,
    )


def _why_unready(given: Mapping[str, Any], **known: Any) -> str:  # noqa: ANN401 - as it takes them
    """Return why something without an engine is not ready; empty if it is."""
    usual: dict[str, Any] = {
        "poisoned": False,
        "released": (),
        "paused": "",
        "doubt": "",
        "ended": "",
        "pinned": False,
        "caught_up": True,
        "follows": True,
        "max_lag": given.get("MAX_LAG"),
        "max_silence_s": given.get("MAX_SILENCE_S"),
    }
    return why_unready(Condition(**usual | known))


def _status(**fields: Any) -> ReplicaStatus:  # noqa: ANN401 - as the status takes them
    """Return a status of something without an engine."""
    usual: dict[str, Any] = {
        "manifest": None,
        "state": None,
        "staged": None,
        "following": True,
        "paused": False,
        "pinned": False,
        "poisoned": False,
        "classes": {},
        "on_host": {},
        "ranks": [],
        "last": None,
        "deltachain": __version__,
    }
    return ReplicaStatus(**usual | fields)
