"""Fencing: refuse a publisher whose version, parent or chain another publisher has written.

Pure decisions over documents that :mod:`deltachain.chain.commits` has read. A store with
put-if-absent creates each manifest once; here it is decided what the one that is there means.
"""

from __future__ import annotations

from collections.abc import Container

from deltachain.errors import BrokenChainError, ChainMismatchError, PublisherFencedError
from deltachain.format.documents import Manifest
from deltachain.format.keys import CHAIN_KEY
from deltachain.format.revert_mark import reverted_to
from deltachain.types import Version


def check_own(manifest: Manifest, found: Manifest, *, key: str) -> None:
    """Check that the manifest under a version's key is this publisher's.

    Args:
        manifest: Manifest that this publisher put.
        found: Manifest that is there.
        key: Its key.

    Raises:
        PublisherFencedError: It is another publisher's.
        BrokenChainError: It belongs to a lost history.
        ChainMismatchError: It belongs to another chain.
    """
    version = manifest.version
    if found.commit_id == manifest.commit_id:
        return
    if found.chain != manifest.chain:
        raise ChainMismatchError(
            f"{key}: belongs to chain {found.chain}, expected {manifest.chain}: "
            "there are two chains here",
            version=version,
        )
    if found.epoch < manifest.epoch and found.parent != manifest.parent:
        raise BrokenChainError(
            f"{key}: is of epoch {found.epoch} and does not follow version {version - 1} of "
            f"epoch {manifest.epoch}: it was left by a history that the store has lost",
            version=version,
            hint=f"stop every other publisher, then remove {key} and all later manifests; "
            "publishing then continues",
        )
    goal = reverted_to(found)
    who, hint = "another publisher", ""
    if goal is not None:
        who = f"a revert to version {goal}"
        hint = f"stop this publisher, load the weights of version {goal}, and start it again"
    raise PublisherFencedError(
        f"version {version} was committed by {who} "
        f"(commit {found.commit_id}, epoch {found.epoch}; this publisher's was "
        f"{manifest.commit_id}, epoch {manifest.epoch})",
        version=version,
        hint=hint,
    )


def check_no_successor(version: Version, found: Container[Version]) -> None:
    """Check that no other publisher continued a version before this publisher had put it.

    Raises:
        PublisherFencedError: The next version is there.
    """
    if version + 1 in found:
        raise PublisherFencedError(
            f"version {version + 1} already exists: another publisher wrote version "
            f"{version} between this publisher's check and its put, and continued",
            version=version,
            hint="two publishers wrote here at once; run `deltachain verify`",
        )


def parent_was_replaced(manifest: Manifest, other: Manifest) -> PublisherFencedError:
    """Build the error for a parent that is not the one that a manifest names."""
    return PublisherFencedError(
        f"version {manifest.version} cannot follow: the manifest of version "
        f"{manifest.version - 1} was replaced by another publisher (commit "
        f"{other.commit_id}, epoch {other.epoch}; this one is at epoch {manifest.epoch})",
        version=manifest.version,
    )


def chain_was_replaced(manifest: Manifest) -> PublisherFencedError:
    """Build the error for a URL whose identity is another chain's."""
    return PublisherFencedError(
        f"version {manifest.version} cannot follow: the chain at this URL was replaced "
        f"by another publisher's; {CHAIN_KEY} no longer belongs to chain "
        f"{manifest.chain}: there are two chains here",
        version=manifest.version,
        hint="give each run a URL of its own; to continue here, this chain needs its own "
        f"{CHAIN_KEY} and this publisher a restart",
    )
