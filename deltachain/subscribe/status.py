"""What a replica says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltachain.errors import ChainError, ObjectNotFoundError
from deltachain.format.documents import Struct
from deltachain.subscribe.history import check_standing
from deltachain.types import Version

if TYPE_CHECKING:
    from deltachain.subscribe.subscriber import Subscriber


class Status(Struct, frozen=True, kw_only=True):
    """Held and head, as JSON fields.

    Attributes:
        url: Where the chain lies.
        chain: Its id.
        version: The version held; null for nothing that can be proven.
        manifest: blake3 of its manifest: of two replicas with one version and two of these, one
            holds what is not the chain's.
        state: Its state digest.
        head: The newest version in the store.
        lag_versions: ``head - version``; null where the store has no such lag: see ``doubt``.
        doubt: Why what is held may not be the chain's: the store went back, forked or was lost.
        pinned: Whether a rollback keeps it where it is.
        poisoned: Whether it cannot prove what it holds.
        last: The last apply, in words.
    """

    url: str
    chain: str
    version: int | None
    manifest: str | None
    state: str | None
    head: int | None
    lag_versions: int | None
    doubt: str
    pinned: bool
    poisoned: bool
    last: str | None


def status_of(subscriber: Subscriber) -> Status:
    """What a subscriber holds, and what the store says of it now."""
    chain, held = subscriber.chain, subscriber.held
    head, doubt = chain.head(), subscriber.watch.doubt
    try:
        if held is not None:
            check_standing(chain, held)
    except (ChainError, ObjectNotFoundError) as exc:
        doubt = exc
    newest = head.version if head else None
    return Status(
        url=chain.store.url,
        chain=chain.identity.chain,
        version=held.version if held else None,
        manifest=held.manifest if held else None,
        state=held.state if held else None,
        head=newest,
        lag_versions=lag(newest, held.version if held else None),
        doubt=str(doubt.args[0]) if doubt else "",
        pinned=subscriber.pinned,
        poisoned=subscriber.poisoned,
        last=str(subscriber.last) if subscriber.last else None,
    )


def lag(head: Version | None, held: Version | None) -> int | None:
    """Versions behind; ``None`` where that means nothing: a store that ends before what is held."""
    return None if head is None or held is None or head < held else head - held
