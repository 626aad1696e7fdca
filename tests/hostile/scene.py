"""A sound chain in memory, whose objects can be replaced so that everything else still fits."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from blake3 import blake3

from deltachain.chain.trust import Trust
from deltachain.codec import Part, encode_part
from deltachain.delta import OldBits
from deltachain.errors import DeltaChainError, MalformedError
from deltachain.format import keys
from deltachain.format.documents import Edge, ObjectRef
from deltachain.format.keys import digest_key
from deltachain.types import Bits, StateDigest
from tests.contract import reference
from tests.format.forge import dumps, enveloped
from tests.format.forgeries import NEW, PARTS, SPEC
from tests.format.freeze import Builder, as_max, dense, store_of

RECORD: Final = "record"
MAX: Final = "max"
SCENES: Final = (*PARTS, RECORD, MAX)
ENVELOPES: Final = ("manifest", "record")


def max_part() -> bytes:
    return encode_part([as_max(SPEC, np.ones(SPEC.numel, SPEC.bits_dtype), NEW)]).data


class Scene:
    """A chain of one tensor, whose elements are all 1, as bits, in version 0."""

    def __init__(self, name: str, *, trust: Trust | None = None, keeps: bool = False) -> None:
        self.name = name
        self._keeps = keeps
        data = max_part() if name == MAX else PARTS.get(name, PARTS["dense"])
        part = Part.from_bytes(data)
        ((tensor, row),) = part.rows.items()
        ones = np.ones(row.spec.numel, row.spec.bits_dtype)
        delta = part.read(tensor, old=OldBits(ones))
        self.spec = delta.spec
        builder = Builder([self.spec], {}, trust=trust)
        self.store = builder.store
        first = np.ones(self.spec.numel, self.spec.bits_dtype)
        anchor = builder.put("anchor", None, 0, [dense(self.spec, first)])
        builder.commit(0, anchor, self.state(first), nnz=self.spec.numel)
        at = slice(None) if delta.indices is None else delta.indices
        self.truth: Bits = first.copy()
        self.truth[at] = delta.new_bits(first[at])
        self.head = 2 if name == RECORD else 1
        self.keys = {
            "chain": keys.CHAIN_KEY,
            "table": keys.TABLE_KEY,
            "head": keys.HEAD_KEY,
            "manifest": keys.manifest_key(self.head),
            "record": keys.edge_key(1, "anchor", None),
            "part": keys.payload_key("delta", 1, 0, f"{1:032x}", 0),
            "asset": builder.chain.identity.assets[0].key,
        }
        if name == RECORD:
            self._record(builder)
        else:
            self._delta(builder, data, part)

    def _delta(self, builder: Builder, data: bytes, part: Part) -> None:
        encodings = tuple(sorted({row.encoding for row in part.rows.values()}))
        ref = ObjectRef(
            key=self.keys["part"],
            nbytes=len(data),
            blake3=blake3(data).hexdigest(),
            directory=part.digest,
        )
        self.store.put(ref.key, data)
        edge = Edge(kind="delta", base=0, encodings=encodings, parts=(ref,))
        builder.commit(1, edge, self.state(self.truth), nnz=part.nnz)
        builder.chain.write_head(1, [])

    def _record(self, builder: Builder) -> None:
        assert self.spec == SPEC
        state = self.state(self.truth)
        unreadable = Edge(kind="delta", base=0, encodings=("later",))
        builder.commit(1, unreadable, state, nnz=self.spec.numel)
        assert builder.parent is not None
        anchor = builder.put("anchor", None, 1, [dense(self.spec, NEW)])
        self.keys["part"] = anchor.parts[0].key
        builder.added = [builder.chain.add_edge(builder.parent, anchor, "")]
        builder.commit(2, Edge(kind="delta", base=1), state, nnz=0)
        builder.chain.write_head(2, [])

    def fresh(self) -> "Scene":
        """The same chain in another store: to build it takes most of the time of many a case."""
        other = copy.copy(self)
        other.store = store_of(self.objects())
        return other

    def state(self, bits: Bits) -> StateDigest:
        return reference.digest(digest_key(self.spec), bits)

    def objects(self) -> dict[str, bytes]:
        return {info.key: self.store.get(info.key, limit=info.nbytes) for info in self.store.list()}

    def read(self, level: str) -> bytes:
        return self.store.get(self.keys[level])

    def document(self, level: str) -> bytes:
        whole = json.loads(self.read(level))
        return dumps(whole["payload"]) if level in ENVELOPES else self.read(level)

    def put_document(self, level: str, document: bytes) -> None:
        self.put(level, self._enveloped(level, document) if level in ENVELOPES else document)

    def _enveloped(self, level: str, document: bytes) -> bytes:
        if not self._keeps:
            return enveloped(document)
        signatures = json.loads(self.read(level))["signatures"]
        return enveloped(document, dumps(signatures))

    def put(self, level: str, data: bytes) -> None:
        """Replace an object; all that name it say what it is."""
        self.replace(level, data)
        digest = blake3(data).hexdigest()
        if level == "table":
            self.edit("chain", lambda d: d.update(table=digest))
        if level == "record":
            self.edit("manifest", lambda d: listed(d).update(digest=digest))
        if level == "part":
            true = {"nbytes": len(data), "blake3": digest, "directory": front(data)}
            self.edit("manifest", lambda d: d["edge"]["parts"][0].update(true))

    def replace(self, level: str, data: bytes) -> None:
        """Replace an object; nobody else knows."""
        self.store.put(self.keys[level], data)

    def edit(self, level: str, change: Callable[[Any], object]) -> None:
        content = json.loads(self.document(level))
        change(content)
        self.put_document(level, dumps(content))


def listed(manifest: Any) -> Any:
    (summary,) = (edge for edge in manifest["recent"] if edge["record"])
    return summary


def front(data: bytes) -> str:
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        first, last = json.loads(data[8:start])["digest"]["data_offsets"]
        return data[start + first : start + last].hex()
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


Level = Literal["part", "manifest", "record", "table", "chain", "head"]
Category = Literal[
    "truncated",
    "overlapping",
    "oversized",
    "out of range",
    "unsorted",
    "duplicate",
    "wrong type",
    "bomb",
    "path",
    "lying size",
    "requires",
    "wrong digest",
    "another rule",
]

ORDERED: Final[frozenset[Level]] = frozenset(("part", "manifest", "record"))
"""Levels that have anything whose order is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A forgery in a sound chain, and what a follower that holds version 0 must do."""

    level: Level
    category: Category
    name: str
    act: Callable[[Scene], object]
    error: type[DeltaChainError] | None = MalformedError  # None: it gets to the head all the same
    at: Level | Literal["", "asset"] = ""  # the object that the error names; of a version: empty
    scene: str = "step"
    opens: bool = False  # by a new follower, which has not read the chain yet
    assets: bool = False  # the small files are taken, instead of a version
    poisons: bool = False  # the follower does not trust its target any more

    @property
    def id(self) -> str:
        return f"{self.level}: {self.category}: {self.name}"


def case(
    level: Level,
    category: Category,
    name: str,
    act: Callable[[Scene], object],
    *,
    error: type[DeltaChainError] | None = MalformedError,
    **more: Any,
) -> Case:
    """A case whose error names its own level, if nothing else is said."""
    more = {"at": level, "scene": "step", **more}
    return Case(level=level, category=category, name=name, act=act, error=error, **more)


def edited(level: Level, edit: Callable[[Any], object]) -> Callable[[Scene], object]:
    return lambda scene: scene.edit(level, edit)
