"""View of a chain at one moment: what the dashboard has read of it so far."""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.dashboard.version_summary import VersionSummary
from deltachain.format.documents import EdgeSummary
from deltachain.format.prune_record import PruneRecord
from deltachain.format.tag import Tag
from deltachain.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainModel:
    """The model of a chain.

    Attributes:
        tensors: Number of its tensors.
        numel: Number of their elements.
        nbytes: Their size in bytes.
    """

    tensors: int
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    """What is known of a chain.

    Attributes:
        url: URL of its store.
        chain: Id of the chain; empty before it is found.
        model: Its model; ``None`` before it is found.
        rows: Its versions from 0, up to the newest that was read; ``None`` for a version whose
            manifest is gone or damaged.
        newest: Newest version found in the store; ``None`` before the first.
        edges: Edges of all versions, by version, pruned ones too.
        tags: Tags that stand for a version.
        prunes: The newest prune record; ``None`` if nothing was pruned.
        looked_at: Time of the last answer of the store, in seconds since 1970; ``None`` before.
        revision: Grows with every change of anything but ``looked_at``.
        trouble: Why the last look failed; empty if it did not.
        doubt: Why the history that was shown before was given up; empty if it never was.
    """

    url: str
    chain: str = ""
    model: ChainModel | None = None
    rows: tuple[VersionSummary | None, ...] = ()
    newest: Version | None = None
    edges: tuple[EdgeSummary, ...] = ()
    tags: tuple[Tag, ...] = ()
    prunes: PruneRecord | None = None
    looked_at: float | None = None
    revision: int = 0
    trouble: str = ""
    doubt: str = ""

    @property
    def is_indexed(self) -> bool:
        """Whether every version that was found has been read."""
        return self.newest is not None and len(self.rows) > self.newest

    @property
    def head(self) -> VersionSummary | None:
        """The newest version that was read."""
        return next((row for row in reversed(self.rows) if row is not None), None)

    @property
    def lost(self) -> tuple[Version, ...]:
        """Versions whose manifests are gone or damaged."""
        return tuple(version for version, row in enumerate(self.rows) if row is None)

    def at(self, version: Version | None) -> VersionSummary | None:
        """Return the row of a version; ``None`` if there is none."""
        return self.rows[version] if version is not None and 0 <= version < len(self.rows) else None
