"""A reader of prune records made from FORMAT.md alone: it shares no code with deltachain."""

from __future__ import annotations

import itertools
from typing import Final

from tests.format.stranger_base import is_size, require
from tests.format.stranger_chain import (
    DOCUMENT,
    REQUIRED,
    Fields,
    Json,
    many,
    number,
    open_envelope,
    text,
)

SPANS: Final = {
    "anchor": range(1),
    "delta": range(1, 2),
    "skip": range(2, 1 << 63),
}
RANGE: Final[Fields] = {
    "kind": (lambda value: isinstance(value, str) and value in SPANS, REQUIRED),
    **dict.fromkeys(("span", "first", "last"), (is_size, REQUIRED)),
    "after": (number, REQUIRED),
}
PRUNE: Final[Fields] = {
    **DOCUMENT,
    "chain": (text, REQUIRED),
    "number": (is_size, REQUIRED),
    "head": (is_size, REQUIRED),
    "maintainer": (text, REQUIRED),
    "time": (number, REQUIRED),
    "pruned": (many(RANGE), []),
}


def read_prune(data: bytes) -> Json:
    """The fields of a prune record, checked."""
    record = open_envelope(data, PRUNE)
    for row in record["pruned"]:
        require(row["span"] in SPANS[row["kind"]], "span")
        require(row["first"] <= row["last"] <= record["head"], "range")
    for one, other in itertools.pairwise(record["pruned"]):
        before, after = (one["kind"], one["span"]), (other["kind"], other["span"])
        require(before <= after, "order of the ranges")
        require(before < after or one["last"] < other["first"], "ranges that overlap")
    return record


def is_pruned(record: Json, kind: str, base: int | None, version: int) -> bool:
    """Whether a prune record names an edge."""
    span = 0 if base is None else version - base
    return any(
        (row["kind"], row["span"]) == (kind, span) and row["first"] <= version <= row["last"]
        for row in record["pruned"]
    )
