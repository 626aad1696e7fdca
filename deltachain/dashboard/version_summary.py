"""Summary of a version: what its manifest says, for the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltachain.chain.chain import Committed
from deltachain.format.documents import phases_of, reverted_to
from deltachain.redact import LONGEST, printable
from deltachain.types import Version


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """One version, as its manifest describes it.

    Attributes:
        version: Number of the version.
        epoch: Epoch of its publisher.
        kind: Kind of the edge that was committed with it.
        encodings: Encodings of that edge.
        nbytes: Size of that edge, in bytes.
        step: Step of the trainer; ``None`` if the manifest names none.
        time: Time of the commit in seconds since 1970, on the publisher's clock.
        nnz: Number of changed elements.
        numel: Number of all elements.
        state: State digest of the version.
        manifest: blake3 of the manifest.
        reverted_to: The version whose state it has again; ``None`` if it is no revert.
        signers: Ids of the keys that signed it.
        signed_by: Ids of the trusted ones among them; empty without trusted keys.
        metadata: Free text of the publisher, by name.
        phases: Seconds of the phases before the commit, by name.
    """

    version: Version
    epoch: int
    kind: str
    encodings: tuple[str, ...]
    nbytes: int
    step: int | None
    time: float
    nnz: int
    numel: int
    state: str
    manifest: str
    reverted_to: Version | None
    signers: tuple[str, ...]
    signed_by: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...]
    phases: Mapping[str, float]

    @property
    def density(self) -> float:
        """Changed elements over all elements, in [0, 1]."""
        return min(self.nnz / self.numel, 1.0) if self.numel else 0.0


def version_summary(committed: Committed) -> VersionSummary:
    """Summarise a version; long texts are cut."""
    manifest = committed.manifest
    signers = dict.fromkeys(printable(signature.key_id) for signature in committed.signatures)
    metadata = tuple(
        (printable(name), printable(value)) for name, value in manifest.metadata.items()
    )
    return VersionSummary(
        version=manifest.version,
        epoch=manifest.epoch,
        kind=manifest.edge.kind,
        encodings=tuple(printable(name) for name in manifest.edge.encodings),
        nbytes=manifest.edge.nbytes,
        step=manifest.step,
        time=manifest.time,
        nnz=manifest.nnz,
        numel=manifest.numel,
        state=manifest.state,
        manifest=committed.digest,
        reverted_to=reverted_to(manifest),
        signers=tuple(signers),
        signed_by=committed.signed_by,
        metadata=metadata[:LONGEST],
        phases=phases_of(manifest),
    )
