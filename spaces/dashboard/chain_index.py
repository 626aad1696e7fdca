"""Index of a chain: its manifests read once, and then whatever is new."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final

from deltachain import errors
from deltachain.chain import tags
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.trust import Trust
from deltachain.format.documents import EdgeSummary, PruneRecord, Tag, phases_of, reverted_to
from deltachain.maintain.survey import Survey
from deltachain.redact import LONGEST, printable
from deltachain.store import Store
from deltachain.subscribe.history import Watch
from deltachain.subscribe.targets.base import HeldVersion
from deltachain.types import Version


@dataclass(frozen=True, slots=True)
class VersionSummary:
    version: Version
    epoch: int
    kind: str
    encodings: tuple[str, ...]
    nbytes: int
    step: int | None
    time: float  # time of the commit in seconds since 1970, on the publisher's clock
    nnz: int
    numel: int
    state: str
    manifest: str
    reverted_to: Version | None  # the version whose state it has again; None if it is no revert
    signers: tuple[str, ...]  # ids of the keys that signed it
    signed_by: tuple[str, ...]  # ids of the trusted ones among them; empty without trusted keys
    metadata: tuple[tuple[str, str], ...]
    phases: Mapping[str, float]  # seconds of the phases before the commit, by name

    @property
    def density(self) -> float:
        return min(self.nnz / self.numel, 1.0) if self.numel else 0.0


def version_summary(committed: Committed) -> VersionSummary:
    manifest = committed.manifest
    signers = dict.fromkeys(printable(signature.key_id) for signature in committed.signatures)
    metadata = tuple(
        (printable(name), printable(value)) for name, value in manifest.metadata.items()
    )
    own = ("version", "epoch", "step", "time", "nnz", "numel", "state")
    fields: dict[str, Any] = {name: getattr(manifest, name) for name in own}
    return VersionSummary(
        **fields,
        kind=manifest.edge.kind,
        encodings=tuple(printable(name) for name in manifest.edge.encodings),
        nbytes=manifest.edge.nbytes,
        manifest=committed.digest,
        reverted_to=reverted_to(manifest),
        signers=tuple(signers),
        signed_by=committed.signed_by,
        metadata=metadata[:LONGEST],
        phases=phases_of(manifest),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainModel:
    tensors: int
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    url: str
    chain: str = ""  # id of the chain; empty before it is found
    model: ChainModel | None = None  # its model; None before it is found
    rows: tuple[VersionSummary | None, ...] = ()  # from version 0; None: gone or damaged
    newest: Version | None = None  # newest version found in the store; None before the first
    edges: tuple[EdgeSummary, ...] = ()  # edges of all versions, by version, pruned ones too
    tags: tuple[Tag, ...] = ()
    prunes: PruneRecord | None = None
    looked_at: float | None = None  # time of the store's last answer, in seconds since 1970
    revision: int = 0  # grows with every change of anything but looked_at
    trouble: str = ""  # why the last look failed; empty if it did not
    doubt: str = ""  # why the history that was shown before was given up; empty if it never was

    @property
    def head(self) -> VersionSummary | None:
        return next((row for row in reversed(self.rows) if row is not None), None)

    @property
    def lost(self) -> tuple[Version, ...]:
        return tuple(version for version, row in enumerate(self.rows) if row is None)

    def at(self, version: Version | None) -> VersionSummary | None:
        return self.rows[version] if version is not None and 0 <= version < len(self.rows) else None


logger = logging.getLogger(__name__)

READS: Final = 16  # manifests read at a time
PUBLISHED: Final = 512  # versions after which a view shows what was read meanwhile
DETAILS_S: Final = 30.0  # between two listings of edges, tags and prunes, without a new version
LISTED_S: Final = 5.0  # seconds between two such listings while versions are committed


CHECKED_S: Final = 5.0  # between two looks whether the newest version is still in the store


class ChainIndex:
    """Reads a chain, which need not exist yet, and keeps a view of it; never writes.

    A store that went back, forked or was replaced is read again from version 0, once two looks
    agree, and the view says why.
    """

    def __init__(self, store: Store, trust: Trust | None = None) -> None:
        self._store = store
        self._trust = trust
        self._chain: Chain | None = None
        self._survey: Survey | None = None
        self._watch = Watch()
        self._listed_at: float | None = None
        self._checked_at = 0.0
        self._changing = Lock()
        self._view = ChainView(url=store.url)

    @property
    def view(self) -> ChainView:
        return self._view

    def refresh(self, now: float) -> ChainView:
        with self._changing:
            try:
                self._look(now)
            except errors.DeltaChainError as exc:
                trouble = printable(str(exc.args[0]) if exc.args else type(exc).__name__)
                answered = errors.FormatError | errors.ChainError | errors.ObjectNotFoundError
                at = now if isinstance(exc, answered) else self._view.looked_at
                self._change(trouble=trouble, looked_at=at)
            else:
                self._change(trouble="", looked_at=now)
            return self._view

    def _look(self, now: float) -> None:
        chain = self._chain or self._open()
        head = self._view.head
        if head is not None and now - self._checked_at >= CHECKED_S:
            self._checked_at = now
            if self._is_replaced(chain, head):
                chain, head = self._open(), None
        known = len(self._view.rows) - 1
        if head is not None:
            newest: Version | None = chain.newest(head.version)
        else:
            newest = found.version if (found := chain.head()) else None
        if newest is not None:
            self._change(newest=newest)
            self._read(chain, known + 1, newest)
        self._list(chain, now, grew=newest is not None and newest > known)

    def _open(self) -> Chain:
        chain = self._chain = Chain.open(self._store, self._trust)
        self._survey, self._listed_at, self._watch = Survey(chain), None, Watch()
        specs = chain.table.specs()
        model = ChainModel(
            tensors=len(specs),
            numel=sum(spec.numel for spec in specs),
            nbytes=sum(spec.nbytes for spec in specs),
        )
        self._change(chain=printable(chain.identity.chain), model=model)
        return chain

    def _is_replaced(self, chain: Chain, head: VersionSummary) -> bool:
        """Return whether two looks found another history, and forget the old one."""
        held = HeldVersion(
            chain=chain.identity.chain,
            version=head.version,
            epoch=head.epoch,
            manifest=head.manifest,
            state=head.state,
        )
        try:
            self._watch.look(chain, held)
        except errors.BrokenChainError:
            return False  # a gap after the head, which reading shows
        except errors.DeltaChainError as exc:
            if self._watch.doubt is None:
                raise
            doubt = printable(str(exc.args[0]))
            self._chain = None
            self._change(rows=(), newest=None, edges=(), tags=(), prunes=None, doubt=doubt)
            return True
        return False

    def _read(self, chain: Chain, first: Version, last: Version) -> None:
        """Read versions; those whose manifests are gone or damaged get no row."""
        rows: list[VersionSummary | None] = []
        while (start := first + len(rows)) <= last:
            try:
                for committed in chain.history(start, last, reads=READS):
                    rows.append(version_summary(committed))
                    if len(rows) % PUBLISHED == 0:
                        self._change(rows=(*self._view.rows, *rows))
                        first, rows = first + len(rows), []
            except (errors.BrokenChainError, errors.FormatError, errors.ObjectNotFoundError) as exc:
                logger.warning("version %s cannot be shown: %s", first + len(rows), exc)
                if first + len(rows) == start:
                    rows.append(None)
            except errors.DeltaChainError:
                self._change(rows=(*self._view.rows, *rows))
                raise
        self._change(rows=(*self._view.rows, *rows))

    def _list(self, chain: Chain, now: float, *, grew: bool) -> None:
        period = LISTED_S if grew else DETAILS_S
        head = self._view.head
        committed = chain.read(head.version) if head else None
        is_due = self._listed_at is None or now - self._listed_at >= period
        if self._survey is None or committed is None or not is_due:
            return
        self._listed_at = now
        self._change(
            edges=self._survey.edges(committed),
            tags=tags.read_all(chain),
            prunes=chain.prunes.newest(),
        )

    def _change(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the view
        """Show other values; the revision grows if any of them is not just a time."""
        new = replace(self._view, **changes)
        is_same = replace(new, looked_at=self._view.looked_at) == self._view
        self._view = new if is_same else replace(new, revision=self._view.revision + 1)
