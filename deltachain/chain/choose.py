"""VersionChoice of a version: by number, trainer step, tag or time.

Steps and times are not decided by the format, so their order is taken as follows. Times grow from
version to version. Steps grow within an epoch, whose first version may repeat the step of the
previous one; a trainer that goes back is a new publisher and has a new epoch. A search by time
reads O(log n) manifests. A search by step reads O(log n) manifests of each epoch, back from the
head to the newest that has the step: where each version is an epoch of its own, as after pushes,
all of these versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from deltachain.chain import tags
from deltachain.chain.chain import Chain, Committed
from deltachain.errors import ChainError, ConfigError, no_version
from deltachain.threads import Pool
from deltachain.types import Version

AHEAD: Final = 64
"""Manifests read at a time where one after another is needed."""

THREADS: Final = 8
"""Manifests read at a time by threads."""

SHORT: Final = 4
"""Versions of an epoch up to which the next epochs back are taken to be short as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChoice:
    """Which version is meant: at most one attribute is given; without any, the head.

    Attributes:
        version: Its number.
        step: Step of the trainer; the newest version of that step is meant.
        tag: Name of a tag.
        at: Time in seconds since 1970; the newest version committed at or before is meant.

    Raises:
        ConfigError: Several are given.
    """

    version: Version | None = None
    step: int | None = None
    tag: str = ""
    at: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("version", "step", "at") if getattr(self, name) is not None]
        given += ["tag"] if self.tag else []
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} exclude each other: each names a version",
                hint="give one of them",
            )

    @property
    def is_search(self) -> bool:
        """Whether the number of the version must be looked up."""
        return self.step is not None or bool(self.tag) or self.at is not None


def choose(chain: Chain, choice: VersionChoice) -> Committed:
    """Read the version that is meant.

    Raises:
        ChainError: There is no such version; the hint names the nearest ones.
        StoreWentBackError: The version of the tag is no longer in the store.
        ForkedChainError: The version of the tag was replaced by another history.
    """
    if choice.tag:
        tag = tags.read(chain, choice.tag)
        if tag is None:
            raise tags.unknown(chain, choice.tag)
        return tags.committed(chain, tag)
    head = chain.head()
    if head is None:
        raise no_version(chain.store.url)
    if choice.version is not None:
        found = chain.find(choice.version)
        if found is None:
            what = f"{chain.store.url} does not have version {choice.version}"
            hint = f"the head is version {head.version}"
            raise ChainError(what, version=choice.version, hint=hint)
        return found
    if choice.step is not None:
        return chain.read(_Search(chain, head).by_step(choice.step))
    if choice.at is not None:
        return chain.read(_Search(chain, head).by_time(choice.at))
    return head


class _Stamp(NamedTuple):
    """What a search needs of a manifest."""

    version: Version
    epoch: int
    step: int | None
    time: float


class _Search:
    """Search through the manifests of a chain, each read once.

    Args:
        chain: The chain.
        head: The newest version.
    """

    def __init__(self, chain: Chain, head: Committed) -> None:
        self._chain = chain
        self._head = _stamp(head)
        self._read: dict[Version, _Stamp | None] = {head.version: self._head}

    def by_step(self, step: int) -> Version:
        """Find the newest version of a step.

        Raises:
            ChainError: No version has it.
        """
        high: _Stamp | None = self._head
        while high is not None:
            low = self._begin_of_epoch(high)
            found = self._in_epoch(low, high, step)
            if found is not None:
                return found
            if high.version - low.version < SHORT:
                self._read_all(range(max(0, low.version - AHEAD), low.version))
            high = self._last(0, low.version - 1)
        raise ChainError(
            f"{self._chain.store.url} has no version of step {step}", hint=self._near(step)
        )

    def by_time(self, at: float) -> Version:
        """Find the newest version committed at or before a time.

        Raises:
            ChainError: Every version is later.
        """
        low, high, found = 0, self._head.version, None
        while low <= high:
            middle = (low + high) // 2
            stamp = self._first(middle, high)
            if stamp is not None and stamp.time <= at:
                found, low = stamp.version, stamp.version + 1
            else:
                high = middle - 1
        if found is None:
            oldest = self._first(0, self._head.version) or self._head
            raise ChainError(
                f"{self._chain.store.url} has no version committed at or before {_iso(at)}",
                hint=f"version {oldest.version} is the oldest, of {_iso(oldest.time)}",
            )
        return found

    def _begin_of_epoch(self, high: _Stamp) -> _Stamp:
        """Find the first version of an epoch, back from one of its versions."""
        first, step = high, 1
        while first.version > 0:
            back = self._last(0, first.version - step)
            if back is None or back.epoch != high.epoch:
                break
            first, step = back, 2 * step
        before, begin = max(first.version - step, -1), first.version
        while begin - before > 1:
            middle = (begin + before) // 2
            stamp = self._first(middle, first.version)
            is_same = stamp is not None and stamp.epoch == high.epoch
            before, begin = (before, middle) if is_same else (middle, begin)
        return self._first(begin, first.version) or first

    def _in_epoch(self, low: _Stamp, high: _Stamp, step: int) -> Version | None:
        """Find the newest version of a step in an epoch."""
        if high.step == step:
            return high.version
        first, last, found = low.version + 1, high.version - 1, low
        while first <= last:
            middle = (first + last) // 2
            stamp = self._first(middle, last, stepped=True)
            if stamp is not None and stamp.step is not None and stamp.step <= step:
                found, first = stamp, stamp.version + 1
            else:
                last = middle - 1
        return found.version if found.step == step else None

    def _first(self, first: Version, last: Version, *, stepped: bool = False) -> _Stamp | None:
        """Return the first of some versions that exists, and has a step if so wanted."""
        for count, version in enumerate(range(first, last + 1)):
            if count >= SHORT and count & (count - 1) == 0:
                self._read_all(range(version, min(version + count, last + 1)))
            stamp = self._stamp(version)
            if stamp is not None and not (stepped and stamp.step is None):
                return stamp
        return None

    def _last(self, first: Version, last: Version) -> _Stamp | None:
        """Return the last of some versions that exists."""
        stamps = (self._stamp(version) for version in range(last, first - 1, -1))
        return next((stamp for stamp in stamps if stamp is not None), None)

    def _stamp(self, version: Version) -> _Stamp | None:
        if version not in self._read:
            found = self._chain.find(version)
            self._read[version] = None if found is None else _stamp(found)
        return self._read[version]

    def _read_all(self, versions: Iterable[Version]) -> None:
        """Read manifests in threads."""
        wanted = [version for version in versions if version not in self._read]
        with Pool(min(THREADS, len(wanted))) as pool:
            for _ in pool.map(self._stamp, wanted):
                pass

    def _near(self, step: int) -> str:
        """Name the nearest steps below and above that were met."""
        met = [s for s in self._read.values() if s is not None and s.step is not None]
        below = max((s for s in met if s.step is not None and s.step < step), default=None, key=_by)
        above = min((s for s in met if s.step is not None and s.step > step), default=None, key=_by)
        near = [f"{s.step} (version {s.version})" for s in (below, above) if s is not None]
        return f"near it are the steps {' and '.join(near)}" if near else "no version has a step"


def _by(stamp: _Stamp) -> tuple[int, Version]:
    return stamp.step or 0, stamp.version


def _stamp(committed: Committed) -> _Stamp:
    manifest = committed.manifest
    return _Stamp(manifest.version, manifest.epoch, manifest.step, manifest.time)


def _iso(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # the publisher's clock may be wrong
        return f"{seconds} s"
