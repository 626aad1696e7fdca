"""Keys of all objects in a store (FORMAT.md 1); no other module has key strings."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from blake3 import blake3

from deltachain.types import TensorSpec, Version

DigestKey: TypeAlias = tuple[int, int]
"""Keys of the two lanes of a tensor's state digest, 64 bits each."""

DIGEST_HEX: Final = 64  # hexadecimal digits of an object digest
THREADED: Final = 4 << 20
"""Bytes above which an object is hashed in threads: smaller ones, of which every frame is one, are
hashed by several threads at a time, and would wait for one another."""


def object_digest(data: bytes | bytearray | memoryview) -> str:
    """Return the blake3 of ``data`` as 64 hexadecimal digits."""
    return blake3(data, max_threads=blake3.AUTO if len(data) > THREADED else 1).hexdigest()


def digest_of_pieces(pieces: Iterable[bytes | memoryview], *, threads: int = 1) -> str:
    """Return the blake3 of consecutive pieces of an object; each is hashed while it is in cache."""
    digest = blake3(max_threads=threads)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


@lru_cache(maxsize=1 << 16)
def digest_key(spec: TensorSpec) -> DigestKey:
    """Derive the two lane keys of a tensor from its name, wire dtype and shape."""
    shape = ",".join(map(str, spec.shape))
    seed = blake3(f"{spec.dtype} {shape} {spec.name}".encode()).digest(length=16)
    return int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:], "little")


CHAIN_KEY: Final = "chain.json"  # identity of the chain; put-if-absent
TABLE_KEY: Final = "table.json"  # the tensor table; put-if-absent, immutable
HEAD_KEY: Final = "head.json"  # head hint, may be out of date; overwritten
MIRROR_KEY: Final = "mirror.json"
"""What a mirror copies and leaves out; only in mirrors, and removed when one is promoted."""

MANIFEST_PREFIX: Final = "manifests/"
EDGE_PREFIX: Final = "edges/"
PRUNE_PREFIX: Final = "prunes/"
TAG_PREFIX: Final = "tags/"
HEARTBEAT_KEY: Final = "heartbeat.json"
"""Signed word of the publisher that a version is the newest; overwritten."""

PUBLISHER_KEY: Final = "publisher.json"  # unsigned word of who publishes here; overwritten
PayloadKind = Literal["delta", "anchor", "skip"]

PAYLOADS: Final = ("deltas/", "anchors/", "skips/")
"""Key prefixes of payload objects, which may be deleted (FORMAT.md 1)."""


def manifest_key(version: Version) -> str:
    return f"{MANIFEST_PREFIX}{version:020d}.json"


def edge_key(version: Version, kind: str, base: Version | None) -> str:
    """Return the key of the edge record for an edge that was added after the commit."""
    origin = "nothing" if base is None else f"{base:020d}"
    return f"{EDGE_PREFIX}{version:020d}/{kind}-{origin}.json"


def payload_key(kind: PayloadKind, version: Version, epoch: int, commit_id: str, part: int) -> str:
    """Return the key of a part; the commit id separates the keys of racing publishers."""
    return f"{kind}s/{version:020d}-{epoch:08d}-{commit_id}/{part:05d}.safetensors"


def payload_prefix(kind: PayloadKind, version: Version) -> str:
    return f"{kind}s/{version:020d}-"


def prune_key(number: int) -> str:
    return f"{PRUNE_PREFIX}{number:08d}.json"


def prune_of(key: str) -> int | None:
    found = _PRUNE.fullmatch(key)
    return int(found[1]) if found else None


def asset_key(digest: str, path: str) -> str:
    """Return the content-addressed key of an asset such as ``config.json``.

    A file in a folder has a name with ``--`` in place of the slash: ``1_Pooling--config.json``.
    """
    return f"assets/{digest[:32]}/{path.replace('/', '--')}"


def signature_key(chain: str, key_id: str) -> str:
    return f"signatures/{chain}/{key_id}.json"


def signature_prefix(chain: str) -> str:
    return f"signatures/{chain}/"


def trial_key(name: str) -> str:
    """Return the key of a trial of the store's promises; removed after the trial."""
    return f"trials/{name}"


def tag_key(name: str, number: int) -> str:
    return f"{TAG_PREFIX}{name}/{number:08d}.json"


def tag_of(key: str) -> tuple[str, int] | None:
    found = _TAG.fullmatch(key)
    return (found[1], int(found[2])) if found else None


_PRUNE: Final = re.compile(r"prunes/([0-9]{8})\.json")
_TAG: Final = re.compile(r"tags/([A-Za-z0-9_-][A-Za-z0-9._-]{0,127})/([0-9]{8})\.json")
_VERSIONED: Final = re.compile(r"(?:manifests|edges|deltas|anchors|skips)/([0-9]{20})[./-].*")


def version_of(key: str) -> Version | None:
    """Return the version of a manifest, edge record or part, ``None`` for other keys."""
    found = _VERSIONED.fullmatch(key)
    return int(found[1]) if found else None
