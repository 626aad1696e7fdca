"""Record of a mirror: `mirror.json`, in stores that `deltachain mirror` fills from another one."""

from __future__ import annotations

from deltachain.errors import ConfigError, ObjectNotFoundError
from deltachain.format.documents import Count, Document, parse
from deltachain.format.keys import MIRROR_KEY
from deltachain.store import Store


class MirrorRecord(Document, frozen=True, kw_only=True):
    """What a store mirrors, and what it leaves out.

    Attributes:
        chain: Id of the chain.
        source: URL of the store that it is copied from.
        first: The oldest version whose payloads are copied; those of older ones are left out.
        writer: The deltachain version that created the mirror.
    """

    chain: str
    source: str
    first: Count = 0
    writer: str = ""


def read_mirror(store: Store) -> MirrorRecord | None:
    """Read the record of a mirror; ``None`` if the store is none.

    Raises:
        FormatError: The record is damaged, or needs a newer deltachain.
    """
    try:
        return parse(store.get(MIRROR_KEY), MirrorRecord, key=MIRROR_KEY)
    except ObjectNotFoundError:
        return None


def refuse_mirror(store: Store) -> None:
    """Raise if a store is a mirror, which holds what its source holds and nothing else.

    Raises:
        ConfigError: The store is a mirror.
    """
    record = read_mirror(store)
    if record is not None:
        raise ConfigError(
            f"{store.url} is a mirror of {record.source}: nothing is written there but by "
            "the mirror",
            hint=f"use {record.source}; or, if this store takes its place, end the mirror "
            f"by `deltachain mirror --promote {store.url}`",
        )
