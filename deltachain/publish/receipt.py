"""Receipt of a published version."""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.types import StateDigest, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReceipt:
    """Publisher's receipt of one committed version.

    Attributes:
        version: Number of the version.
        manifest: blake3 of the manifest, which differs from that of the same number in a fork.
        epoch: Epoch of the publisher.
        kind: Kind of the version's own edge: ``delta``, ``anchor`` or ``base``.
        step: Step of the trainer, as given.
        state: State digest of the version.
        nnz: Number of changed elements.
        numel: Number of all elements.
        nbytes: Size of the version's own objects, in bytes.
        requests: Number of store requests for the version, and meanwhile for an anchor on its way.
        diff_s: Time of the diff, which blocks the training loop, in seconds.
        encode_s: Time of encoding and uploading the parts in the background, in seconds.
        commit_s: Time of the commit, in seconds.
        upload_s: Part of ``encode_s`` in which at least one object was on its way to the store, in
            seconds; of the slowest rank.
        kernel: Name of the kernels of the diff.
        restored: Keys of the chain's documents that were missing in the store and were restored.
        encoding: Name of the encoding of changes, as configured; empty without a delta.
        kept_nbytes: Size of the old bits that rank 0 keeps for an anchor on its way, in bytes.

    Examples:
        >>> with deltachain.Publisher(new_url).attach(model) as publisher:
        ...     train_step(model, optimizer)
        ...     receipt = publisher.publish(step=1).result()
        >>> receipt.step, receipt.nnz, receipt.numel
        (1, 3, 6)
    """

    version: Version
    epoch: int
    kind: str
    step: int | None
    state: StateDigest
    nnz: int
    numel: int
    nbytes: int
    requests: int
    diff_s: float
    encode_s: float
    commit_s: float
    kernel: str
    restored: tuple[str, ...] = ()
    manifest: str = ""
    kept_nbytes: int = 0
    encoding: str = ""
    upload_s: float = 0.0

    @property
    def density(self) -> float:
        """Changed fraction of all elements."""
        return self.nnz / self.numel if self.numel else 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the version, by name; ``upload`` overlaps with ``encode``."""
        return {
            "diff": self.diff_s,
            "encode": self.encode_s,
            "upload": self.upload_s,
            "commit": self.commit_s,
        }

    @property
    def sequence(self) -> dict[str, float]:
        """Seconds of the phases that follow one another, in their order, for a trace."""
        return {name: seconds for name, seconds in self.phases.items() if name != "upload"}

    @property
    def attributes(self) -> dict[str, str | int | float]:
        """Attributes of the version's span in a trace."""
        step = {} if self.step is None else {"step": self.step}
        return {
            "version": self.version,
            "kind": self.kind,
            "nbytes": self.nbytes,
            "nnz": self.nnz,
            "upload_s": self.upload_s,
            **step,
        }

    def metrics(self) -> dict[str, float]:
        """Return metrics for a trainer's log, with prefixed names."""
        values: dict[str, float] = {
            "version": self.version,
            "changed_frac": self.density,
            "bytes": self.nbytes,
            "requests": self.requests,
            "diff_s": self.diff_s,
            "encode_s": self.encode_s,
            "commit_s": self.commit_s,
            "upload_s": self.upload_s,
        }
        return {f"deltachain/{name}": float(value) for name, value in values.items()}

    def __str__(self) -> str:
        seconds = self.diff_s + self.encode_s + self.commit_s
        return (
            f"version {self.version} {self.kind} nnz {self.nnz:,} density {self.density:.3%} "
            f"{self.nbytes:,} B in {seconds:.3f} s"
        )
