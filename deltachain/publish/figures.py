"""Figures of a publisher, for metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deltachain.figures import Figure, figures, info, phases
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.writer import Writer


@dataclass(slots=True)
class PublishTotals:
    """Sums over all versions of this process.

    Attributes:
        commits: Number of committed versions.
        failures: Number of versions that were not committed, or of unknown outcome.
        nbytes: Size of their own objects, in bytes.
        nnz: Number of changed elements.
        diff_s: Seconds of diffs, which block the training loop.
        encode_s: Seconds of encoding and uploading.
        upload_s: Seconds of these in which something was uploaded.
        commit_s: Seconds of commits.
        last: The newest receipt; ``None`` before.
        trouble: Why the newest version was not committed; empty if it was.
        stopped: Why the optimizers' steps bring no version; empty if they do.
    """

    commits: int = 0
    failures: int = 0
    nbytes: int = 0
    nnz: int = 0
    diff_s: float = 0.0
    encode_s: float = 0.0
    upload_s: float = 0.0
    commit_s: float = 0.0
    last: PublishReceipt | None = None
    trouble: str = ""
    stopped: str = ""

    def stop(self, reason: str) -> None:
        """Note why steps bring no version; empty once they do."""
        self.stopped = reason

    def fail(self, error: BaseException) -> None:
        """Add a version that was not committed."""
        self.failures += 1
        self.trouble = str(error.args[0]) if error.args else type(error).__name__

    def count(self, receipt: PublishReceipt) -> None:
        """Add a committed version."""
        self.last, self.trouble = receipt, ""
        self.commits += 1
        self.nbytes += receipt.nbytes
        self.nnz += receipt.nnz
        self.diff_s += receipt.diff_s
        self.encode_s += receipt.encode_s
        self.upload_s += receipt.upload_s
        self.commit_s += receipt.commit_s


def publisher_figures(writer: Writer, totals: PublishTotals) -> Iterator[Figure]:
    """Yield the figures of the publishing rank that commits, from memory."""
    head, last = writer.parent, totals.last
    version = head.version if head else None
    yield info(engine="publisher", chain=writer.chain.identity.chain)
    yield from figures(
        {
            "version": version,
            "head_version": version,
            "epoch": writer.epoch,
            "commit_timestamp_seconds": head.manifest.time if head else None,
            "changed_ratio": last.density if last else None,
            "commits": totals.commits,
            "failures": totals.failures,
            "published_bytes": totals.nbytes,
            "changed_elements": totals.nnz,
            "diff_seconds": totals.diff_s,
            "encode_seconds": totals.encode_s,
            "upload_seconds": totals.upload_s,
            "commit_seconds": totals.commit_s,
            "store_requests": writer.chain.store.requests,
        }
    )
    yield from phases(last.phases if last else {})
