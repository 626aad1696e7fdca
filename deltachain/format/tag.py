"""Tag records: the document that makes a name stand for a version (FORMAT.md 2)."""

from __future__ import annotations

import re
from typing import Final

from deltachain.format.documents import Count, Document

NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Names of tags."""

MAX_NUMBER: Final = 10**8 - 1
"""Largest number of a tag record: eight digits."""


class Tag(Document, frozen=True, kw_only=True):
    """One record of a tag; the record with the largest number counts.

    Attributes:
        chain: Id of the chain.
        name: Name of the tag.
        number: Number of the record, counted from 0.
        version: The version that the name stands for from now on; ``None`` if the tag is removed.
        state: State digest of that version; empty if the tag is removed.
        manifest: blake3 of that version's manifest; empty if the tag is removed.
        time: Seconds since 1970 on the writer's clock; informational only.
    """

    chain: str
    name: str
    number: Count
    version: Count | None
    state: str
    manifest: str
    time: float

    def __post_init__(self) -> None:
        if NAME.fullmatch(self.name) is None or self.number > MAX_NUMBER:
            raise ValueError(f"tag {self.name[:80]!r}, number {self.number}: no such tag can exist")
        if (self.version is None) != (not self.state) or bool(self.state) != bool(self.manifest):
            raise ValueError(f"tag {self.name!r}: names a version without its state and manifest")
