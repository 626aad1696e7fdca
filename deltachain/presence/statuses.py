"""Statuses of those that follow a chain without an engine: a follower, an agent, a mirror."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltachain.checkpoint import HELD_FILE
from deltachain.errors import ControlPlaneError, StoreUnavailableError
from deltachain.status import HealthLimits, Status, judged, lag
from deltachain.subscribe.subscriber import NOTHING_HELD, known_status
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
) -> Status:
    """Return the status of a follower, from memory and a look at its folder.

    Args:
        subscriber: The subscriber.
        given: Variables of the environment, as :func:`deltachain.environment.read` returns them.
        engine: What it writes into; see :func:`deltachain.figures.info`.
        trouble: Error of its last look; ``None`` for none.
        unready: Why what it writes into does not serve the held version; empty if it does.
    """
    status = known_status(subscriber, engine=engine, trouble=str(trouble) if trouble else "")
    folder, waits = getattr(subscriber.target, "folder", None), unready
    if status.version is None:
        waits = NOTHING_HELD
    elif isinstance(folder, Path) and not (folder / HELD_FILE).exists():
        waits = f"{folder} was removed, or its {HELD_FILE} was"
    if isinstance(trouble, ControlPlaneError):  # the server of an agent does not have the version
        waits = str(trouble.args[0])
    return judged(status, _limits(given), waits)


def mirror_status(
    mirror: Mirror, totals: MirrorTotals, given: Mapping[str, Any], *, url: str
) -> Status:
    """Return the status of a mirror, from memory.

    Args:
        mirror: The mirror.
        totals: Its totals.
        given: Variables of the environment, as :func:`deltachain.environment.read` returns them.
        url: URL of its source.
    """
    version, head, trouble = totals.version_of(mirror), totals.head_of(mirror), totals.trouble
    # A source that does not answer is a matter of silence; all else keeps versions from readers.
    is_away = isinstance(trouble, StoreUnavailableError) and trouble.url != mirror.destination.url
    kept_back = str(trouble.args[0]) if trouble is not None and not is_away else ""
    status = Status(
        url=url,
        chain=mirror.chain,
        version=version,
        head=head,
        lag_versions=lag(head, version),
        ready=True,
        reason="",
        trouble=str(trouble) if trouble else "",
        deltachain=__version__,
        engine="mirror",
        looked_at=totals.looked_at,
        applied_at=totals.applied_at,
        silence_s=totals.silence_of(mirror),
    )
    return judged(status, _limits(given), kept_back if version is not None else NOTHING_HELD)


def _limits(given: Mapping[str, Any]) -> HealthLimits:
    return HealthLimits(lag=given.get("MAX_LAG"), silence_s=given.get("MAX_SILENCE_S"))
