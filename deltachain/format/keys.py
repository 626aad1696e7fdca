"""Where things lie in a store: the only place with key strings (FORMAT.md 1)."""

from __future__ import annotations

import re
from typing import Final, Literal

from deltachain.types import Version

CHAIN_KEY: Final = "chain.json"
"""Identity of the chain; put-if-absent."""
TABLE_KEY: Final = "table.json"
"""The tensor table; put-if-absent, immutable."""
HEAD_KEY: Final = "head.json"
"""A hint that may lag; overwritten."""

PayloadKind = Literal["delta", "anchor", "skip"]


def manifest_key(version: Version) -> str:
    """Key of the manifest that commits ``version``."""
    return f"manifests/{version:020d}.json"


def edge_key(version: Version, kind: str, base: Version | None) -> str:
    """Key of the record of a way to ``version`` that was added after its commit."""
    origin = "nothing" if base is None else f"{base:020d}"
    return f"edges/{version:020d}/{kind}-{origin}.json"


def payload_key(kind: PayloadKind, version: Version, epoch: int, commit_id: str, part: int) -> str:
    """Key of one part; the commit id keeps racing publishers from writing the same key."""
    return f"{kind}s/{version:020d}-{epoch:08d}-{commit_id}/{part:05d}.safetensors"


def payload_prefix(kind: PayloadKind, version: Version) -> str:
    """What the keys of all parts of this kind begin with that lead to a version."""
    return f"{kind}s/{version:020d}-"


def asset_key(digest: str, name: str) -> str:
    """Key of a small file of the checkpoint, such as ``config.json``, named by its content."""
    return f"assets/{digest[:32]}/{name}"


_VERSIONED: Final = re.compile(r"(?:manifests|edges|deltas|anchors|skips)/([0-9]{20})[./-].*")


def version_of(key: str) -> Version | None:
    """The version that a manifest, an edge record or a payload part belongs to."""
    found = _VERSIONED.fullmatch(key)
    return int(found[1]) if found else None
