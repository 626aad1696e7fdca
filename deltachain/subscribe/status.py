"""Status of a subscriber."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from deltachain.chain.heartbeat import check_age
from deltachain.errors import ChainError, MirrorLagsError, ObjectNotFoundError
from deltachain.format.documents import Struct
from deltachain.subscribe.history import check_standing
from deltachain.types import Version

if TYPE_CHECKING:
    from deltachain.subscribe.subscriber import Subscriber


class Status(Struct, frozen=True, kw_only=True):
    """Held version and head, as JSON fields.

    Attributes:
        url: URL of the chain.
        chain: Id of the chain.
        version: The proven version held; null for none.
        manifest: blake3 of its manifest. Two replicas with equal versions and different manifests
            follow different histories.
        state: State digest of this version.
        head: The newest version in the store.
        lag_versions: ``head - version``; null if the head is older than ``version``.
        doubt: Why the held version may not be the chain's: the store went back, forked or was
            lost, or its publisher gives no recent sign; empty otherwise.
        pinned: Whether a rollback keeps the target at this version.
        poisoned: Whether the target's state is unknown.
        last: The last receipt as text.
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
    """Read the held version and the current head of the store."""
    chain, held = subscriber.chain, subscriber.held
    head, doubt = chain.head(), subscriber.watch.doubt
    try:
        if held is not None:
            with suppress(MirrorLagsError):  # it was proven from a store that is ahead of this one
                check_standing(chain, held)
        if head is not None:
            check_age(chain, head)
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
    """Return the versions behind the head; ``None`` if the head is older than the held version."""
    return None if head is None or held is None or head < held else head - held
