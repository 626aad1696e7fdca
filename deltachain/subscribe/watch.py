"""Repeated check that the held version is still part of the chain in the store.

A store may be restored from an older copy, lose objects or be taken over by another chain without
any error when polled: it just has nothing new. A finding counts once a second check, in a later
iteration, confirms it.
"""

from __future__ import annotations

from deltachain.chain.chain import Chain
from deltachain.chain.identity import lost_chain, replaced
from deltachain.chain.lookup import Standing
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    DeltaChainError,
    ForkedChainError,
    MirrorLagsError,
    StoreWentBackError,
)
from deltachain.subscribe.targets.base import HeldVersion
from deltachain.types import Version


def judge(held: HeldVersion, found: Standing, url: str) -> DeltaChainError | None:
    """Return the error for the state of the held version in a store; ``None`` if it is intact.

    Args:
        held: The version held.
        found: State of this version in the store.
        url: URL of the store.
    """
    if found.chain is None:
        return lost_chain(url)
    if found.chain != held.chain:
        held_one = f"version {held.version} of {held.chain} is held"
        return replaced(url, found.chain, held_one, held.version)
    if found.manifest is None:
        return _gone(held, found, url)
    if found.manifest != held.manifest:
        return ForkedChainError(
            f"version {held.version} in the store differs from the held one: its manifest is "
            f"{found.manifest}, expected {held.manifest}",
            version=held.version,
        )
    if found.newest is not None and found.newest > held.version:
        return _missing(held.version + 1, found.newest)
    return None


def _gone(held: HeldVersion, found: Standing, url: str) -> DeltaChainError:
    newest = found.newest
    if newest is not None and newest > held.version:
        return _missing(held.version, newest)
    there = "none is there" if newest is None else f"the newest there is {newest}"
    if found.lags:
        return MirrorLagsError(
            f"the mirror lags: version {held.version} is held, {there} at {url}",
            version=held.version,
        )
    back = "" if newest is None else f" (`rollback` to {newest}, then `release`)"
    return StoreWentBackError(
        f"the store went back: version {held.version} is held, {there} at {url}",
        version=held.version,
        hint=f"{StoreWentBackError.default_hint}{back}. Of a mirror that is behind what is held, "
        "set DELTACHAIN_MIRROR=1",
    )


def _missing(version: Version, newest: Version) -> BrokenChainError:
    return BrokenChainError(
        f"manifest of version {version} is missing, although version {newest} exists",
        version=version,
        hint="manifests must never be deleted: restore it, or publish an anchor that avoids it",
    )


class Watch:
    """Findings of the checks of the held version.

    Attributes:
        doubt: Why the held version may not be part of the chain; ``None`` if it is.
    """

    def __init__(self) -> None:
        self.doubt: DeltaChainError | None = None
        self._proven = ""
        self._suspected = ""

    def proved(self, held: HeldVersion) -> None:
        """Record that the held version was just found in the chain."""
        self.doubt, self._proven, self._suspected = None, held.manifest, ""

    def is_open(self, held: HeldVersion) -> bool:
        """Return whether a version was not checked yet, or not found."""
        return self._proven != held.manifest or bool(self._suspected)

    def ended(self, exc: DeltaChainError) -> None:
        """Keep the finding that ended the follow loop, until an operator resolves it."""
        if isinstance(exc, ChainError):
            self.doubt = exc

    def look(self, chain: Chain, held: HeldVersion) -> bool:
        """Check a held version in the store.

        Returns:
            Whether it was found; if not, the next check decides.

        Raises:
            ForkedChainError: The store has another one.
            DeltaChainError: Two consecutive checks had the same finding.
        """
        finding = judge(held, chain.look_back(held.version), chain.store.url)
        if finding is None:
            self.proved(held)
            return True
        if self.note(finding, held):
            raise finding
        return False

    def note(self, finding: DeltaChainError, held: HeldVersion) -> bool:
        """Record a finding; return whether it is confirmed."""
        suspected = f"{type(finding).__name__} {getattr(finding, 'version', '')}"
        counts = isinstance(finding, ForkedChainError) or self._suspected == suspected
        self._suspected = suspected
        ahead = isinstance(finding, BrokenChainError) and finding.version != held.version
        if ahead:
            self._proven, self.doubt = held.manifest, None  # the held version is in the store
        elif counts and not isinstance(finding, MirrorLagsError):
            self.doubt = finding
        return counts
