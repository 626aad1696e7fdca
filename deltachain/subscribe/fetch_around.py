"""Fetch of the cheapest plan whose objects are all usable."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Final, TypeVar

from deltachain import errors
from deltachain.chain.chain import Chain, Committed, plan_present
from deltachain.chain.fetch import Fetched, fetching
from deltachain.chain.plan import Plan
from deltachain.codec import ENCODINGS
from deltachain.codec.decode import Range
from deltachain.format.documents import EdgeSummary
from deltachain.format.keys import manifest_key, version_of
from deltachain.subscribe.targets.base import HeldVersion
from deltachain.threads import Pool, started
from deltachain.types import Version

LEAST_LOOK_S: Final = 1.0  # shortest time between two looks for later versions while one is staged

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True)
class UsablePlans:
    """Base of plans, and encodings they go ``without``, because their old bits ``lack``."""

    base: Path | None
    without: frozenset[str] = frozenset()
    lack: errors.OldBitsError | None = None

    def leave_out(self, plan: Plan, exc: errors.OldBitsError) -> bool:
        names = {name for edge in plan.edges for name in edge.encodings}
        lost = {name for name in names - self.without if ENCODINGS.get(name).needs_old}
        if lost:
            logger.warning("planning without %s from now on: %s", ", ".join(sorted(lost)), exc)
            self.without, self.lack = self.without | lost, exc
        return bool(lost)


def fetch_around(  # noqa: PLR0913 - as of `fetching`
    chain: Chain,
    held: HeldVersion | None,
    committed: Committed,
    use: Callable[[Fetched], _T],
    *,
    usable: UsablePlans,
    hold: bool = True,
    room: Path | None = None,
    wanted: Mapping[str, Range] | None = None,
) -> tuple[Fetched, _T]:
    """Use the cheapest plan while it is fetched; again around edges of unusable objects."""
    avoid: list[EdgeSummary] = []
    failure: errors.DeltaChainError | None = usable.lack
    have = held.version if held else None
    while True:
        try:
            plan = _plan(chain, have, committed, usable.without, avoid)
        except errors.BrokenChainError:
            if failure is not None:
                raise _named(failure, committed) from failure.__cause__
            raise
        try:
            with fetching(
                chain,
                plan,
                target=committed,
                base=usable.base,
                hold=hold,
                room=room,
                wanted=wanted,
            ) as fetched:
                return fetched, use(fetched)
        except errors.OldBitsError as exc:
            if not usable.leave_out(plan, exc):
                raise
            failure = exc
        except (errors.FormatError, errors.ObjectNotFoundError, errors.ConfigError) as exc:
            bad = _unusable(plan, exc)
            if not bad:
                raise
            logger.warning("planning around %s->%d: %s", bad[0].kind, bad[0].version, exc)
            avoid += bad
            failure = exc


def _plan(
    chain: Chain,
    held: Version | None,
    committed: Committed,
    without: Collection[str],
    avoid: Collection[EdgeSummary],
) -> Plan:
    """Find the cheapest plan; without one, over pruned edges: a record may be forged."""
    try:
        return chain.plan(held, committed, without=without, avoid=avoid)
    except errors.BrokenChainError as broken:
        if chain.prunes.names_edges:
            with suppress(errors.BrokenChainError):
                plan = plan_present(
                    chain, held, committed, without=without, avoid=avoid, pruned=True
                )
                logger.warning("planning over pruned edges: %s", broken)
                return plan
        raise


def _named(failure: errors.DeltaChainError, committed: Committed) -> errors.DeltaChainError:
    key = failure.key if isinstance(failure, errors.ObjectNotFoundError) else ""
    version = version_of(key)
    if version is None or key != manifest_key(version):
        return failure
    return errors.BrokenChainError(
        f"manifest of version {version} is missing ({key}), and no plan to version "
        f"{committed.version} avoids it",
        version=version,
        hint="manifests must never be deleted: restore it, or publish an anchor",
    )


def _unusable(plan: Plan, exc: errors.DeltaChainError) -> list[EdgeSummary]:
    if isinstance(exc, errors.ConfigError):
        return [edge for edge in plan.edges if edge.kind == "base"]
    key = exc.key if isinstance(exc, errors.FormatError | errors.ObjectNotFoundError) else ""
    found = [edge for edge in plan.edges if edge.version == version_of(key)]
    return found or [edge for edge in plan.edges if edge.kind == "base"]


@contextmanager
def looking_ahead(chain: Chain, version: Version, *, every_s: float) -> Iterator[Future[Version]]:
    """Look for later versions while one is staged; yield the newest version at the first look.

    The first look saves a round trip later, and makes no request right after a wide look. A stage
    may take long, or hang: the others, at least ``LEAST_LOOK_S`` apart, show operators that the
    target falls behind meanwhile.
    """
    done = Event()

    def look_again() -> None:
        while not done.wait(max(every_s, LEAST_LOOK_S)):
            with suppress(errors.DeltaChainError):  # the next look of the follow loop reports it
                newest_after(chain, max(version, chain.latest or 0))

    again = Thread(target=look_again, name="deltachain-look-ahead", daemon=True)
    with Pool(1) as pool:
        looking = pool.submit(newest_after, chain, version)
        is_started = False
        try:
            is_started = started(again)  # without it, the first look alone
            yield looking
        finally:
            done.set()
            if is_started:
                again.join()


def newest_after(chain: Chain, version: Version) -> Version:
    try:
        seen = chain.just_seen(version, LEAST_LOOK_S)
        return chain.newest(version) if seen is None else seen
    except errors.BrokenChainError:  # a gap ahead is reported once it is reached
        return version
