"""A reader of whole chains made from FORMAT.md alone: it shares no code with deltachain."""

import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests.format.stranger import (
    Delta,
    RefusedError,
    UnsupportedError,
    check_shape,
    digest_of,
    is_size,
    numel_of,
    read_json,
    read_part,
    require,
    state_text,
    tensor_lanes,
)

Json = dict[str, Any]
Weights = dict[str, list[int]]
Get = Callable[[str], bytes | None]
"""The bytes of a key, or None where there is no such object."""

KINDS: Final = {"delta": "deltas", "anchor": "anchors", "skip": "skips", "base": ""}
REQUIRED: Final = object()
"""Default of a field that has none."""


def number(value: object) -> bool:
    finite = isinstance(value, (int, float)) and abs(value) < 1 << 1024
    return finite and not isinstance(value, bool)


def text(value: object) -> bool:
    return isinstance(value, str)


def step_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def texts(value: object) -> bool:
    return isinstance(value, list) and all(map(text, value))


def text_map(value: object) -> bool:
    return isinstance(value, dict) and all(map(text, value.values()))


def maybe_size(value: object) -> bool:
    return value is None or is_size(value)


def kind(value: object) -> bool:
    return value in KINDS


def is_object(value: object) -> bool:
    return isinstance(value, dict)


Check = Callable[[Any], bool]
Fields = Mapping[str, tuple[Check, object]]


def many(fields: Fields) -> Check:
    return lambda value: isinstance(value, list) and all(fits(item, fields) for item in value)


def one(fields: Fields) -> Check:
    return lambda value: fits(value, fields)


def one_or_none(fields: Fields) -> Check:
    return lambda value: value is None or fits(value, fields)


def fits(document: Any, fields: Fields) -> bool:
    """Whether it has these fields and no others; fills in defaults."""
    if not isinstance(document, dict) or document.keys() - fields.keys():
        return False
    for name, (_, default) in fields.items():
        if name not in document and default is REQUIRED:
            return False
        document.setdefault(name, default)
    return all(check(document[name]) for name, (check, _) in fields.items())


OBJECT: Final[Fields] = {
    "key": (text, REQUIRED),
    "nbytes": (is_size, REQUIRED),
    "blake3": (text, REQUIRED),
    "directory": (text, ""),
    "xet_hash": (text, ""),
    "ext": (is_object, {}),
}
FILE: Final[Fields] = {name: OBJECT[name] for name in ("nbytes", "blake3")} | {
    "name": (text, REQUIRED)
}
REFERENCE: Final[Fields] = {
    "repo": (text, ""),
    "revision": (text, ""),
    "path": (text, ""),
    "files": (many(FILE), []),
}
EDGE: Final[Fields] = {
    "kind": (kind, REQUIRED),
    "base": (maybe_size, None),
    "encodings": (texts, []),
    "parts": (many(OBJECT), []),
    "reference": (one_or_none(REFERENCE), None),
    "ext": (is_object, {}),
}
SUMMARY: Final[Fields] = {
    "version": (is_size, REQUIRED),
    "kind": (kind, REQUIRED),
    "base": (maybe_size, REQUIRED),
    "nbytes": (is_size, REQUIRED),
    "parts": (is_size, REQUIRED),
    "encodings": (texts, REQUIRED),
    "state": (text, REQUIRED),
    "record": (text, ""),
    "digest": (text, ""),
}
DOCUMENT: Final[Fields] = {
    "format": (is_size, REQUIRED),
    "requires": (texts, []),
    "ext": (is_object, {}),
}
CHAIN: Final[Fields] = {
    **DOCUMENT,
    "chain": (text, REQUIRED),
    "created": (number, REQUIRED),
    "table": (text, REQUIRED),
    "assets": (many(OBJECT), []),
}
TABLE: Final[Fields] = {
    **DOCUMENT,
    "tensors": (lambda value: isinstance(value, list), REQUIRED),
    "aliases": (text_map, {}),
}
MANIFEST: Final[Fields] = {
    **DOCUMENT,
    "chain": (text, REQUIRED),
    "version": (is_size, REQUIRED),
    "epoch": (is_size, REQUIRED),
    "commit_id": (text, REQUIRED),
    "parent": (text, REQUIRED),
    "step": (step_count, REQUIRED),
    "time": (number, REQUIRED),
    "base_state": (text, REQUIRED),
    "state": (text, REQUIRED),
    "nnz": (is_size, REQUIRED),
    "numel": (is_size, REQUIRED),
    "edge": (one(EDGE), REQUIRED),
    "recent": (many(SUMMARY), []),
    "window_from": (is_size, 0),
    "metadata": (text_map, {}),
}
RECORD: Final[Fields] = {
    **DOCUMENT,
    **dict.fromkeys(("chain", "manifest", "base_state", "state"), (text, REQUIRED)),
    "version": (is_size, REQUIRED),
    "edge": (one(EDGE), REQUIRED),
}
HEAD: Final[Fields] = {
    **DOCUMENT,
    "version": (is_size, REQUIRED),
    "anchors": (many(SUMMARY), []),
}
SIGNATURE: Final[Fields] = dict.fromkeys(("key_id", "algorithm", "value"), (text, REQUIRED))
ENVELOPE: Final[Fields] = {
    "blake3": (text, REQUIRED),
    "payload": (is_object, REQUIRED),
    "signatures": (many(SIGNATURE), []),
}


def check_document(document: Any, fields: Fields) -> Json:
    require(isinstance(document, dict), "not an object")
    require(is_size(document.get("format")) and texts(document.get("requires", [])), "gate")
    if document["format"] != 1 or document.get("requires"):
        raise UnsupportedError("a later document")
    require(fits(document, fields), "other fields, or of other types")
    return dict(document)


def canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def open_envelope(data: bytes, fields: Fields) -> Json:
    envelope = read_json(data)
    require(fits(envelope, ENVELOPE), "not an envelope")
    head, tail = b'{"blake3":"%s","payload":' % envelope["blake3"].encode(), b',"signatures":'
    end = data.rfind(tail)
    payload, signatures = data[len(head) : end], data[end + len(tail) : -1]
    require(data.startswith(head) and data.endswith(b"}"), "form")
    require(canonical(envelope["signatures"]) == signatures, "form of the signatures")
    require(blake3(payload).hexdigest() == envelope["blake3"], "digest of the payload")
    return check_document(envelope["payload"], fields)


def check_way(version: int, edge: Json) -> None:
    base, delta = edge["base"], edge["kind"] == "delta"
    require(edge["encodings"] == sorted(set(edge["encodings"])), "encodings")
    if edge["kind"] in ("anchor", "base"):
        require(base is None, "an edge from nothing has no base")
    else:
        require(base is not None and (base < version - 1, base == version - 1)[delta], "base")


def check_parts(edge: Json) -> None:
    keys = [ref["key"] for ref in edge["parts"]]
    require(len(set(keys)) == len(keys), "a part twice")


def check_summary(summary: Json, document: Json) -> None:
    """Of the edge of a manifest, or of an edge record."""
    edge = document["edge"]
    there = {name: edge[name] for name in ("kind", "base", "encodings")}
    there |= {name: document[name] for name in ("version", "state")}
    there |= {"nbytes": sum(p["nbytes"] for p in edge["parts"]), "parts": len(edge["parts"])}
    require(summary == summary | there, "another edge than its summary says")


class Chain:
    """The chain that ``get`` reads."""

    def __init__(self, get: Get) -> None:
        self._get = get
        self.identity = check_document(read_json(self.get("chain.json")), CHAIN)
        data = self.get("table.json")
        require(digest_of(data) == self.identity["table"], "digest of the table")
        self.table = check_document(read_json(data), TABLE)
        self.specs: dict[str, tuple[str, list[int]]] = {}
        for row in self.table["tensors"]:
            require(isinstance(row, list) and len(row) == 3 and text(row[0]), "tensor")
            check_shape(row[1], row[2])
            require(row[0] not in self.specs and numel_of(row[2]) <= 1 << 48, "tensor")
            self.specs[row[0]] = row[1], row[2]
        for alias, name in self.table["aliases"].items():
            require(alias not in self.specs and name in self.specs, "alias")

    def get(self, key: str) -> bytes:
        data = self._get(key)
        if data is None:
            raise RefusedError(f"no {key}")
        return data

    def manifest(self, version: int) -> Json:
        manifest = open_envelope(self.get(manifest_key(version)), MANIFEST)
        require(manifest["chain"] == self.identity["chain"], "another chain")
        require(manifest["version"] == version, "another version")
        check_way(version, manifest["edge"])
        check_parts(manifest["edge"])
        require(manifest["window_from"] in range(max(version, 1)), "window")
        versions = [edge["version"] for edge in manifest["recent"]]
        require(versions == sorted(versions), "order of recent edges")
        for edge in manifest["recent"]:
            require(edge["version"] < version, "recent")
            check_way(edge["version"], edge)
        return manifest

    def head(self) -> int:
        """The newest version, by probing; every manifest must name the one before as its parent."""
        version, parent = -1, ""
        while (data := self._get(manifest_key(version + 1))) is not None:
            version += 1
            require(self.manifest(version)["parent"] == parent, "forked")
            parent = digest_of(data)
        require(version >= 0, "no version")
        return version

    def edges(self) -> list[tuple[int, Json]]:
        """Every edge that the manifests list, with the version it leads to."""
        found: list[tuple[int, Json]] = []
        records: dict[str, Json] = {}
        for version in range(self.head() + 1):
            manifest = self.manifest(version)
            found.append((version, manifest["edge"]))
            for summary in manifest["recent"]:
                if summary["record"]:
                    records[summary["record"]] = summary
                else:
                    check_summary(summary, self.manifest(summary["version"]))
        for key, summary in records.items():
            data = self.get(key)
            require(digest_of(data) == summary["digest"], f"digest of {key}")
            record = open_envelope(data, RECORD)
            committed = digest_of(self.get(manifest_key(record["version"])))
            require(record["manifest"] == committed, "record of another manifest")
            require(record["state"] == self.manifest(record["version"])["state"], "state")
            check_way(record["version"], record["edge"])
            check_parts(record["edge"])
            check_summary(summary, record)
            found.append((record["version"], record["edge"]))
        return found

    def routes(self, version: int) -> list[list[tuple[int, Json]]]:
        """Every way from nothing to a version."""
        ways: dict[int, list[list[tuple[int, Json]]]] = {v: [] for v in range(version + 1)}
        for reached, edge in sorted(self.edges(), key=lambda item: item[0]):
            if reached <= version:
                starts = [[]] if edge["base"] is None else ways[edge["base"]]
                ways[reached] += [[*start, (reached, edge)] for start in starts]
        return ways[version]

    def follow(self, route: list[tuple[int, Json]]) -> Weights:
        """The weights at the end of a way from nothing, proven."""
        weights: Weights = {}
        for version, edge in route:
            before = {name: list(bits) for name, bits in weights.items()}
            for ref in edge["parts"]:
                folder = f"{KINDS[edge['kind']]}/{version:020d}-"
                require(ref["key"].startswith(folder), "part of another version")
                self.apply(self.part(ref, before), weights)
        require(weights.keys() == self.specs.keys(), "not every tensor")
        lanes = [0, 0]
        for name, bits in weights.items():
            for n, lane in enumerate(tensor_lanes(name, *self.specs[name], bits)):
                lanes[n] += lane
        require(state_text(lanes) == self.manifest(route[-1][0])["state"], "state digest")
        return weights

    def part(self, ref: Json, old: Weights) -> dict[str, Delta]:
        data = self.get(ref["key"])
        require(len(data) == ref["nbytes"] and digest_of(data) == ref["blake3"], "part")
        return read_part(data, old)

    def apply(self, part: dict[str, Delta], weights: Weights) -> None:
        for name, delta in part.items():
            dtype, shape = self.specs.get(name, ("", []))
            require((delta.row["dtype"], delta.row["shape"]) == (dtype, shape), f"{name}: row")
            if name not in weights:
                whole = delta.is_absolute and len(delta.values) == numel_of(shape)
                require(whole, f"{name} is not given whole")
                weights[name] = [0] * numel_of(shape)
            delta.apply(weights[name])


def manifest_key(version: int) -> str:
    return f"manifests/{version:020d}.json"


NAME: Final = re.compile("[A-Za-z0-9_-][A-Za-z0-9._-]*")
OF_CHAIN: Final[Fields] = {
    **DOCUMENT,
    "chain": (text, REQUIRED),
    "signature": (one(SIGNATURE), REQUIRED),
}


def key_id(public: bytes) -> str:
    return blake3(public).hexdigest()[:32]


def signed_bytes(record: str, chain: str, payload: bytes) -> bytes:
    require(NAME.fullmatch(chain), "the chain's id is no name")
    return b"\0".join([b"deltachain signature", record.encode(), chain.encode(), payload])


def verifies(public: bytes, signature: Mapping[str, str], signed: bytes) -> bool:
    value = signature["value"]
    if (signature["key_id"], signature["algorithm"]) != (key_id(public), "ed25519"):
        return False
    if re.fullmatch("[0-9a-f]{128}", value) is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(bytes.fromhex(value), signed)
    except InvalidSignature:
        return False
    return True


def payload_of(envelope: bytes) -> bytes:
    return envelope[envelope.index(b'"payload":') + 10 : envelope.rindex(b',"signatures":')]


class SignedChain(Chain):
    """The chain that ``get`` reads, of which only what a trusted key signed is believed."""

    def __init__(self, get: Get, trusted: list[bytes]) -> None:
        super().__init__(get)
        self._trusted = trusted
        self._id: str = self.identity["chain"]
        signatures = [s for public in trusted if (s := self._of_chain(key_id(public))) is not None]
        self.require_signed("chain", self.get("chain.json"), signatures)

    def _of_chain(self, name: str) -> Any:
        data = self._get(f"signatures/{self._id}/{name}.json")
        return None if data is None else check_document(read_json(data), OF_CHAIN)["signature"]

    def require_signed(self, record: str, payload: bytes, signatures: list[Any]) -> None:
        first: dict[str, Any] = {}
        for signature in signatures:
            first.setdefault(signature["key_id"], signature)
        signed = signed_bytes(record, self._id, payload)
        found = [(public, first.get(key_id(public))) for public in self._trusted]
        require(any(s and verifies(public, s, signed) for public, s in found), "not signed")

    def require_envelope(self, record: str, key: str) -> None:
        data = self.get(key)
        self.require_signed(record, payload_of(data), read_json(data)["signatures"])

    def head(self) -> int:
        """The newest version; it is signed, and all others are named through their parents."""
        newest = super().head()
        self.require_envelope("manifest", manifest_key(newest))
        return newest


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
