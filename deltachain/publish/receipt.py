"""Receipt of a published version."""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.types import StateDigest, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReceipt:
    """One committed version, from the publisher's side.

    Attributes:
        version: Its number.
        manifest: blake3 of its manifest, which tells it from the same number in another history.
        epoch: The publisher's epoch.
        kind: The version's own edge: ``delta``, ``anchor`` or ``base``.
        step: The trainer's step, as it was given.
        state: State digest of the version.
        nnz: Elements changed.
        numel: Elements in all.
        nbytes: Bytes put for the version itself.
        requests: Requests to the store for it.
        diff_s: Seconds the training loop waited for the diff.
        encode_s: Seconds of encoding and putting the parts, behind training.
        commit_s: Seconds of committing.
        kernel: Name of the kernels that compared.
        restored: Documents of the chain that were missing in the store and were put back.

    Example:
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

    @property
    def density(self) -> float:
        """Changed share of all elements."""
        return self.nnz / self.numel if self.numel else 0.0

    def metrics(self) -> dict[str, float]:
        """Metrics for a trainer's log, prefixed."""
        values: dict[str, float] = {
            "version": self.version,
            "changed_frac": self.density,
            "bytes": self.nbytes,
            "requests": self.requests,
            "diff_s": self.diff_s,
            "encode_s": self.encode_s,
            "commit_s": self.commit_s,
        }
        return {f"deltachain/{name}": float(value) for name, value in values.items()}

    def __str__(self) -> str:
        seconds = self.diff_s + self.encode_s + self.commit_s
        return (
            f"version {self.version} {self.kind} nnz {self.nnz:,} density {self.density:.3%} "
            f"{self.nbytes:,} B in {seconds:.3f} s"
        )
