"""Whether what is held is still the chain's: a second look at what was proven once.

A store may be restored from an older copy, lose objects, or be given to another chain, all without
an error: there is nothing new in it. What is missing counts once a second look, in another turn,
misses it too.
"""

from __future__ import annotations

from deltachain.chain.chain import Chain
from deltachain.chain.identity import lost_chain
from deltachain.chain.lookup import Standing
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ChainMismatchError,
    DeltaChainError,
    ForkedChainError,
    StoreWentBackError,
)
from deltachain.subscribe.targets.base import HeldVersion
from deltachain.types import Version


def judge(held: HeldVersion, found: Standing, url: str) -> DeltaChainError | None:
    """What is wrong with a store, by what was found where a held version was committed.

    Args:
        held: What is held.
        found: What a look found.
        url: Of the store.
    """
    if found.chain is None:
        return lost_chain(url)
    if found.chain != held.chain:
        return ChainMismatchError(
            f"two chains were at {url}: chain.json says {found.chain}, version {held.version} of "
            f"{held.chain} is held",
            hint="find out which is the right one, and give the other a URL of its own; replicas "
            "join the one that is there from nothing",
        )
    if found.manifest is None:
        return _gone(held, found.newest, url)
    if found.manifest != held.manifest:
        return ForkedChainError(
            f"version {held.version} in the store is not the one that is held: its manifest is "
            f"{found.manifest}, {held.manifest} is held",
            version=held.version,
        )
    if found.newest is not None and found.newest > held.version:
        return _missing(held.version + 1, found.newest)
    return None


def _gone(held: HeldVersion, newest: Version | None, url: str) -> DeltaChainError:
    if newest is not None and newest > held.version:
        return _missing(held.version, newest)
    there = "none is there" if newest is None else f"the newest there is {newest}"
    back = "" if newest is None else f" (`rollback` to {newest}, then `release`)"
    return StoreWentBackError(
        f"the store went back: version {held.version} is held, {there} at {url}",
        version=held.version,
        hint=f"{StoreWentBackError.default_hint}{back}",
    )


def _missing(version: Version, newest: Version) -> BrokenChainError:
    return BrokenChainError(
        f"manifest of version {version} is missing, there is one of {newest}",
        version=version,
        hint="manifests are never deleted: put it back, or publish an anchor that leads around it",
    )


class Watch:
    """What looks at a held version have found so far.

    Attributes:
        doubt: Why what is held may not be the chain's; ``None`` while it is.
    """

    def __init__(self) -> None:
        self.doubt: DeltaChainError | None = None
        self._proven = ""
        self._suspected = ""

    def proved(self, held: HeldVersion) -> None:
        """A version that is held was just seen to be the chain's."""
        self.doubt, self._proven, self._suspected = None, held.manifest, ""

    def is_open(self, held: HeldVersion) -> bool:
        """Whether a version was not looked at yet, or not found where it should be."""
        return self._proven != held.manifest or bool(self._suspected)

    def ended(self, exc: DeltaChainError) -> None:
        """Following ended: what it found of the chain stays until a person has resolved it."""
        if isinstance(exc, ChainError):
            self.doubt = exc

    def look(self, chain: Chain, held: HeldVersion) -> bool:
        """Look at a held version again.

        Returns:
            Whether it is where it should be; if not, another look will tell.

        Raises:
            ForkedChainError: Another is there.
            DeltaChainError: Two looks, one after the other, missed the same.
        """
        finding = judge(held, chain.look_back(held.version), chain.store.url)
        if finding is None:
            self.proved(held)
            return True
        if self.note(finding, held):
            raise finding
        return False

    def note(self, finding: DeltaChainError, held: HeldVersion) -> bool:
        """Keep what a look found; whether it counts."""
        suspected = f"{type(finding).__name__} {getattr(finding, 'version', '')}"
        counts = isinstance(finding, ForkedChainError) or self._suspected == suspected
        self._suspected = suspected
        ahead = isinstance(finding, BrokenChainError) and finding.version != held.version
        if ahead:
            self._proven, self.doubt = held.manifest, None  # what is held is there
        elif counts:
            self.doubt = finding
        return counts
