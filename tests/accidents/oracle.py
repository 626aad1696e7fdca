"""What must hold whatever happens to a store: pure functions over what was seen.

``Shelf`` is what lies in a store, read without deltachain's own ways of looking. ``View`` is what
one follower holds and says. Each rule returns what is wrong, in words: nothing when all is well.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deltachain.subscribe.targets.base import HeldVersion
from deltachain.types import Version
from tests.support.models import State, same

History = Mapping[str, State]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A manifest as it lies in a store."""

    digest: str
    parent: str
    chain: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """What lies in a store."""

    chain: str
    leaves: Mapping[Version, Leaf]
    reach: Version | None
    refusal: str = ""
    hinted: Version = -1

    def is_behind(self, version: Version) -> bool:
        shown = {version + 1, version + 2, max(self.hinted, version + 1)}
        return bool(shown & self.leaves.keys())

    @property
    def head(self) -> Version:
        return max(self.leaves, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one follower holds and says."""

    who: str
    held: HeldVersion | None
    bits: State | None
    says: str
    lag: Version | None = None


def wrong_bits(view: View, history: History) -> Iterator[str]:
    """Whoever claims a version holds exactly the bits that were trained."""
    if view.held is None:
        return
    truth = history.get(view.held.state)
    if truth is None:
        yield f"{view.who} claims a state that nobody trained: {view.held}"
    elif view.bits is None or not same(view.bits, truth):
        yield f"{view.who} does not hold the bits of version {view.held.version}"


def silence(view: View, shelf: Shelf) -> Iterator[str]:
    """Whoever holds what is not the chain's, or cannot go on along it, says so."""
    if view.lag is not None and view.lag < 0:
        yield f"{view.who} is {view.lag} versions behind by its own account"
    if view.says:
        return
    if view.held is None:
        yield f"{view.who} holds nothing and says nothing"
        return
    there = shelf.leaves.get(view.held.version)
    if shelf.chain != view.held.chain:
        yield f"{view.who} says nothing of {shelf.chain or 'no chain'} where its chain was"
    elif there is None:
        yield f"{view.who} holds version {view.held.version}, which is gone, and says nothing"
    elif there.digest != view.held.manifest:
        yield f"{view.who} holds another version {view.held.version}, and says nothing"
    elif shelf.is_behind(view.held.version):
        yield f"{view.who} stays at {view.held.version} of {shelf.head}, and says nothing"


def alarm(view: View) -> Iterator[str]:
    """Where nothing is wrong nobody says that anything is."""
    if view.says:
        yield f"{view.who} says for no reason: {view.says}"


def worse(before: Shelf, after: Shelf) -> Iterator[str]:
    """Nobody who writes makes the chain less readable than it was."""
    if before.reach is not None and (after.reach is None or after.reach < before.reach):
        yield f"newcomers got to {before.reach}, now to {after.reach}: {after.refusal}"
    if before.leaves and before.chain != after.chain and after.chain not in _chains(before):
        yield f"a second identity {after.chain} where manifests of a chain were"
    for version in sorted(before.leaves.keys() | after.leaves.keys()):
        yield from _worse_at(version, before, after)


def _worse_at(version: Version, before: Shelf, after: Shelf) -> Iterator[str]:
    old, leaf = before.leaves.get(version), after.leaves.get(version)
    if leaf is None:
        yield f"manifest {version} was deleted"
    elif old is not None and old.digest != leaf.digest:
        yield f"manifest {version} was written over"
    elif old is None and version > 0:
        parent = after.leaves.get(version - 1)
        if parent is None:
            yield f"version {version} was committed over a gap"
        elif parent.digest != leaf.parent:
            yield f"version {version} was committed after another {version - 1}"


def reused(known: Mapping[Version, str], before: Shelf, after: Shelf) -> Iterator[str]:
    """A publisher that committed a version itself never commits that number again."""
    for version in sorted(after.leaves.keys() - before.leaves.keys()):
        if known.get(version, after.leaves[version].digest) != after.leaves[version].digest:
            yield f"version {version} was opened again by the publisher that committed it"


def converged(views: Iterable[View], shelf: Shelf, history: History) -> Iterator[str]:
    """At the end everybody holds the head's bits, and a newcomer gets there."""
    if shelf.reach is None or shelf.reach != shelf.head:
        yield f"newcomers get to {shelf.reach} of {shelf.head}: {shelf.refusal}"
    for view in views:
        yield from wrong_bits(view, history)
        yield from silence(view, shelf)
        yield from alarm(view)


def _chains(shelf: Shelf) -> set[str]:
    return {leaf.chain for leaf in shelf.leaves.values()}
