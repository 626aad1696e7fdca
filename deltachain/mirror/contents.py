"""Contents of a mirror, compared with the source as the listings of both go by.

Empty documents count as absent: no document of a chain is empty, and some S3 servers keep an empty
object of a writer that was killed between the header and the body of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from deltachain.chain.log import Committed
from deltachain.errors import ObjectNotFoundError
from deltachain.format.digest import object_digest
from deltachain.format.documents import Manifest, unseal
from deltachain.format.keys import (
    EDGE_PREFIX,
    MANIFEST_PREFIX,
    PAYLOADS,
    PRUNE_PREFIX,
    TAG_PREFIX,
    manifest_key,
    manifest_prefix,
    version_of,
)
from deltachain.mirror.plan import is_payload
from deltachain.store import ObjectInfo, Store
from deltachain.types import Version

DIGITS: Final = 3
"""Manifests are checked for existence a thousand versions at a time."""

RECENT: Final = 1024
"""Newest versions whose edge records are held in memory; others are looked up when needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsToCopy:
    """Versions that a mirror does not have, or not whole, in order.

    Attributes:
        old: Those that it once had, or has not whole.
        new: All after the newest one that it has: a range, since the source may name any version as
            its head.
    """

    old: tuple[Version, ...] = ()
    new: range

    def __iter__(self) -> Iterator[Version]:
        yield from self.old
        yield from self.new

    def __bool__(self) -> bool:
        return bool(self.old or self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorDifference:
    """What a mirror lacks, as far as listings tell.

    Attributes:
        missing: Objects of the source that the mirror lacks: size in bytes by key.
        versions: Versions to copy.
        records: Edge records of the source that the mirror lacks, or that may name payloads that it
            lacks, by key.
        payloads: Payloads of the source.
        unproven: Payloads of the mirror that no document of it may name yet; their digests are not
            known to be right.
    """

    missing: Mapping[str, int]
    versions: VersionsToCopy
    records: Mapping[str, ObjectInfo]
    payloads: Set[str]
    unproven: Set[str]


@dataclass(slots=True)
class MirrorContents:
    """What a mirror has, in memory that does not grow with the number of its versions.

    Only keys of payloads, which pruning bounds, and of recent records are held; manifests are held
    as the versions that lack one.

    Args:
        store: Store of the mirror.

    Attributes:
        is_torn: Whether a manifest is gone that was there, so that all must be listed again.
    """

    store: Store
    is_torn: bool = field(default=False, init=False)
    _sizes: dict[str, int] = field(default_factory=dict)
    _doubtful: set[str] = field(default_factory=set)
    _end: Version = 0
    _gaps: set[Version] = field(default_factory=set)
    _checked: Version = 0

    @property
    def newest(self) -> Version:
        """The newest version without gaps below it; -1 for none."""
        return min(self._gaps, default=self._end) - 1

    @property
    def payloads(self) -> Iterator[str]:
        """Keys of payloads, also of those whose digests are not known to be right."""
        yield from filter(is_payload, self._sizes)
        yield from self._doubtful

    def has_version(self, version: Version) -> bool:
        """Return whether the mirror has the manifest of a version."""
        return version < self._end and version not in self._gaps

    def among(self, versions: VersionsToCopy) -> frozenset[Version]:
        """Return the versions of which the mirror has the manifest."""
        new = range(versions.new.start, min(versions.new.stop, self._end))
        return frozenset(filter(self.has_version, (*versions.old, *new)))

    def read(self, version: Version) -> Committed | None:
        """Read a manifest of the mirror; ``None`` if it has none of the version.

        Raises:
            ObjectNotFoundError: It is gone since the last comparison.
            FormatError: It is damaged.
        """
        if not self.has_version(version):
            return None
        key = manifest_key(version)
        try:
            data = self.store.get(key)
        except ObjectNotFoundError:
            self.is_torn = True
            raise
        return Committed(unseal(data, Manifest, key=key), object_digest(data))

    def has(self, key: str) -> bool:
        """Return whether the mirror has an object; an old edge record is looked up."""
        if key.startswith(EDGE_PREFIX) and key not in self._sizes:
            info = self.store.find(key)
            if info is not None and _is_whole(info):
                self._sizes[key] = info.nbytes
        return key in self._sizes

    def lacks(self, key: str, nbytes: int) -> bool:
        """Return whether the mirror lacks an object, or may lack it."""
        version = version_of(key)
        if version is not None and key == manifest_key(version):
            return not self.has_version(version)
        return self._sizes.get(key) != nbytes

    def add(self, key: str, nbytes: int) -> None:
        """Note an object that was written."""
        version = version_of(key)
        if version is None or key != manifest_key(version):
            self._sizes[key] = nbytes
            self._doubtful.discard(key)
            return
        self._gaps.update(range(self._end, version))
        self._end = max(self._end, version + 1)
        self._gaps.discard(version)

    def remove(self, key: str) -> None:
        """Note that a payload was deleted."""
        self._sizes.pop(key, None)
        self._doubtful.discard(key)

    def look_at(self, keys: Collection[str]) -> None:
        """Look at some objects of the mirror, and note which of them are gone."""
        found = self.store.find_all(keys)
        for key in keys:
            self._sizes.pop(key, None)
            if key in found:
                self._sizes[key] = found[key].nbytes

    def compare(
        self,
        source: Store,
        *,
        first: Version,
        head: Version,
        identity: Collection[str],
        is_first: bool,
    ) -> MirrorDifference:
        """List both stores.

        The first time, and if the newest manifest is gone, as from a mirror that was restored from
        a backup, the manifests of all versions are listed; else those of a thousand versions of the
        mirror, which are others each time.

        Args:
            source: Store of the source; some of its objects may be named by no document.
            first: The oldest version whose payloads are copied.
            head: The newest version of the source.
            identity: Keys of table, assets and identity.
            is_first: Whether this is the first time.
        """
        found = self.store.find_all(identity).values()
        there = filter(_is_whole, (*found, *_listed(self.store)))
        self._sizes = {info.key: info.nbytes for info in there}
        self._doubtful = set()
        payloads, missing = self._compare_payloads(source, first)
        if is_first or self.is_torn or not self._has_newest():
            missing |= self._compare_manifests(source)
        else:
            self._check_manifests()
        torn = {version_of(key) or 0 for key in missing if is_payload(key)}
        healed = {version for version in torn if self.has_version(version)}
        unproven = self._unproven()
        recorded = {version: False for _, version in unproven}
        records = {}
        edges = self._noted(filter(_is_whole, self.store.list(EDGE_PREFIX)), recorded)
        for info, is_there in compared(source.list(EDGE_PREFIX), edges):
            if not is_there:
                missing[info.key] = info.nbytes
            if not is_there or version_of(info.key) in healed:
                records[info.key] = info
        old = {version for version in (*self._gaps, *torn) if version < min(self._end, head + 1)}
        self._doubtful = {key for key, version in unproven if not recorded[version]}
        for key in self._doubtful:
            del self._sizes[key]
        return MirrorDifference(
            missing=missing,
            versions=VersionsToCopy(old=tuple(sorted(old)), new=range(self._end, head + 1)),
            records=records,
            payloads=payloads,
            unproven=frozenset(self._doubtful),
        )

    def _compare_payloads(self, source: Store, first: Version) -> tuple[set[str], dict[str, int]]:
        """List payloads and numbered records of the source; return the payloads, and what lacks."""
        payloads, missing = set[str](), dict[str, int]()
        for info in _listed(source):
            is_wanted = True
            if is_payload(info.key):
                payloads.add(info.key)
                is_wanted = (version_of(info.key) or 0) >= first
            if is_wanted and self._sizes.get(info.key) != info.nbytes:
                missing[info.key] = info.nbytes
        return payloads, missing

    def _compare_manifests(self, source: Store) -> dict[str, int]:
        """List all manifests of both stores; return those that the mirror lacks."""
        self._end, self._gaps, self.is_torn = 0, set(), True  # until the listing ends
        missing = {}

        def noted() -> Iterator[ObjectInfo]:
            for info in filter(_is_whole, self.store.list(MANIFEST_PREFIX)):
                self.add(info.key, 0)
                yield info

        for info, is_there in compared(source.list(MANIFEST_PREFIX), noted()):
            if not is_there:
                missing[info.key] = info.nbytes
        self.is_torn = False
        return missing

    def _has_newest(self) -> bool:
        found = self.store.find(manifest_key(self._end - 1)) if self._end else None
        return not self._end or (found is not None and _is_whole(found))

    def _check_manifests(self) -> None:
        """List the manifests of some versions of the mirror, to find those that were lost."""
        start = self._checked if self._checked < self._end else 0
        versions = range(start, min(start + 10**DIGITS, self._end))
        self._checked = start + 10**DIGITS
        listed = filter(_is_whole, self.store.list(manifest_prefix(start, DIGITS)))
        there = {version_of(info.key) for info in listed}
        self._gaps.difference_update(versions)
        self._gaps.update(version for version in versions if version not in there)

    def _unproven(self) -> list[tuple[str, Version]]:
        """Return the payloads that only an edge record may name, or none, and their versions.

        The version is -1 if it has no manifest: then no edge record names them either.
        """
        placed = ((key, version_of(key) or 0) for key in self.payloads)
        return [
            (key, version if self.has_version(version) else -1)
            for key, version in placed
            if not (key.startswith("deltas/") and self.has_version(version))
        ]

    def _noted(
        self, infos: Iterable[ObjectInfo], recorded: dict[Version, bool]
    ) -> Iterator[ObjectInfo]:
        """Pass on edge records of the mirror; note the recent ones, and which versions have one."""
        for info in infos:
            version = version_of(info.key) or 0
            if version in recorded:
                recorded[version] = True
            if version >= self._end - RECENT:
                self._sizes[info.key] = info.nbytes
            yield info


def compared(
    source: Iterable[ObjectInfo], there: Iterator[ObjectInfo]
) -> Iterator[tuple[ObjectInfo, bool]]:
    """Yield the objects of a listing, and whether another has each, of the same size.

    Args:
        source: The one listing, ascending by key.
        there: The other listing, ascending by key; read to its end.
    """
    other = next(there, None)
    for info in source:
        while other is not None and other.key < info.key:
            other = next(there, None)
        yield info, (other is not None and (other.key, other.nbytes) == (info.key, info.nbytes))
    for _ in there:
        pass


def _is_whole(info: ObjectInfo) -> bool:
    return info.nbytes > 0 or is_payload(info.key)  # pruning deletes any payload


def _listed(store: Store) -> Iterator[ObjectInfo]:
    """List payloads, prune records and tag records."""
    for prefix in (*PAYLOADS, PRUNE_PREFIX, TAG_PREFIX):
        yield from store.list(prefix)
