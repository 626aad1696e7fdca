"""A reader of tags made from FORMAT.md alone: it shares no code with deltachain."""

from __future__ import annotations

import re
from typing import Final

from tests.format.stranger_base import digest_of, is_size, require
from tests.format.stranger_chain import (
    DOCUMENT,
    REQUIRED,
    Chain,
    Fields,
    Get,
    Json,
    manifest_key,
    maybe_size,
    number,
    open_envelope,
    text,
)

TAG: Final[Fields] = {
    **DOCUMENT,
    "chain": (text, REQUIRED),
    "name": (text, REQUIRED),
    "number": (is_size, REQUIRED),
    "version": (maybe_size, REQUIRED),
    "state": (text, REQUIRED),
    "manifest": (text, REQUIRED),
    "time": (number, REQUIRED),
}


def read_tag(data: bytes) -> Json:
    """The fields of a tag record, checked."""
    record = open_envelope(data, TAG)
    name = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", record["name"])
    require(name is not None and record["number"] < 10**8, "no key has this name and number")
    names = record["version"] is not None
    require(names == bool(record["state"]) == bool(record["manifest"]), "version")
    return record


def tagged(get: Get, name: str) -> int | None:
    """The version that a tag stands for; ``None`` if there is no such tag."""
    newest, found = -1, None
    while (data := get(f"tags/{name}/{newest + 1:08d}.json")) is not None:
        newest, found = newest + 1, data
    if found is None:
        return None
    chain, record = Chain(get), read_tag(found)
    require(record["chain"] == chain.identity["chain"], "another chain")
    require((record["name"], record["number"]) == (name, newest), "another tag")
    if record["version"] is None:
        return None
    version = int(record["version"])
    require(digest_of(chain.get(manifest_key(version))) == record["manifest"], "manifest")
    require(chain.manifest(version)["state"] == record["state"], "state")
    return version
