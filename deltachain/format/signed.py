"""What a signature covers, and the document that signs ``chain.json`` (FORMAT.md 2, Signatures)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from deltachain.format.documents import (
    Count,
    Document,
    EdgeRecord,
    Envelope,
    Identity,
    Manifest,
    Signature,
)
from deltachain.format.prune_record import PruneRecord
from deltachain.format.tag import Tag


class Heartbeat(Document, frozen=True, kw_only=True):
    """A publisher's word that a version, and records of tags and pruning, are the newest at a time.

    Attributes:
        chain: Id of the chain.
        version: The version.
        manifest: blake3 of the exact bytes of its manifest.
        time: Seconds since 1970 on the publisher's clock.
        tags: Number of the newest record of each tag, of removed ones too, by name; ``None`` if
            nothing is said of tags.
        prunes: How many prune records there are.
    """

    chain: str
    version: Count
    manifest: str
    time: float
    tags: dict[str, Count] | None = None
    prunes: Count = 0


RECORD_TYPES: Final[Mapping[type[Document], str]] = {
    Identity: "chain",
    Manifest: "manifest",
    EdgeRecord: "edge",
    PruneRecord: "prune",
    Tag: "tag",
    Heartbeat: "heartbeat",
}
"""Record type of each document that can be signed; it is part of the signed bytes."""

CONTEXT: Final = b"deltachain signature"
"""First of the signed bytes, so that no signature of another program counts here."""


CHAIN_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
"""Id of a chain that can be part of a key."""


class IdentitySignature(Document, frozen=True, kw_only=True):
    """Signature of the exact bytes of ``chain.json``, in an object of its own."""

    chain: str
    signature: Signature


def signed_bytes(kind: type[Document], chain: str, payload: bytes) -> bytes:
    """Return the bytes that a signature covers: context, record type, chain and payload.

    Args:
        kind: Class of the document, one of ``RECORD_TYPES``.
        chain: Id of the chain.
        payload: Exact bytes of the document, without its envelope.

    Raises:
        ValueError: The id cannot be part of a key, so that no object can have its signature.
    """
    if CHAIN_ID.fullmatch(chain) is None:
        raise ValueError("its id cannot be part of a key")
    fields = (CONTEXT, RECORD_TYPES[kind].encode(), chain.encode(), payload)
    return b"\0".join(fields)


def opened(envelope: bytes) -> tuple[bytes, tuple[Signature, ...]]:
    """Return payload and signatures of an envelope that :func:`documents.unseal` accepted."""
    found = msgspec.json.decode(envelope, type=Envelope)
    return bytes(found.payload), found.signatures
