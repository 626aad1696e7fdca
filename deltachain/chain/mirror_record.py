"""Record of a mirror: `mirror.json`, in stores that `deltachain mirror` fills from another one."""

from __future__ import annotations

import logging
from typing import Final

from deltachain.chain.trust import Trust
from deltachain.errors import ConfigError, FormatError, ObjectNotFoundError
from deltachain.format.documents import Count, Document, parse
from deltachain.format.keys import MIRROR_KEY
from deltachain.redact import printable, redacted_url
from deltachain.store import Store

logger = logging.getLogger(__name__)

_told: Final[set[str]] = set()
"""URLs of which a record was told: a maintainer looks before all that it writes."""


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


def refuse_mirror(store: Store, trust: Trust) -> None:
    """Raise if a store is a mirror, which holds what its source holds and nothing else.

    The record is not signed. Where signatures decide who writes, it is told and decides nothing.

    Args:
        store: The store.
        trust: Keys of the writer.

    Raises:
        ConfigError: The store is a mirror, and its chain is not signed.
    """
    is_signed = trust.key is not None and trust.trusted is not None
    try:
        record = read_mirror(store)
    except FormatError as exc:
        if not is_signed:
            raise
        found = f"has {MIRROR_KEY}, which is damaged: {exc.args[0]}"
    else:
        if record is None:
            return
        found = f"is a mirror of {redacted_url(printable(record.source))}"
    way_out = f"end the mirror by `deltachain mirror --promote {store.url}`"
    if not is_signed:
        raise ConfigError(
            f"{store.url} {found}: nothing is written there but by the mirror",
            hint=f"write to its source; or, if this store takes its place, {way_out}",
        )
    if store.url not in _told:
        _told.add(store.url)
        logger.warning(
            "%s %s, says a record that nobody signed; going on with the signing key. If it is one, "
            "stop this writer and use its source; if this store takes its place, %s",
            store.url,
            found,
            way_out,
        )
