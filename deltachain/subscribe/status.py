"""What a replica says of itself."""

from __future__ import annotations

from deltachain.manifest import Struct


class Status(Struct, frozen=True, kw_only=True):
    """Held and head, as JSON fields.

    Attributes:
        url: Where the chain lies.
        chain: Its id.
        version: The version held; null for nothing that can be proven.
        state: Its state digest.
        head: The newest version in the store.
        lag_versions: ``head - version``.
        pinned: Whether a rollback keeps it where it is.
        poisoned: Whether it can not prove what it holds.
        last: The last apply, in words.
    """

    url: str
    chain: str
    version: int | None
    state: str | None
    head: int | None
    lag_versions: int | None
    pinned: bool
    poisoned: bool
    last: str | None
