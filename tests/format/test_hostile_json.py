"""Documents that somebody tampered with: each is refused by one of two errors, or is sound."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.format import documents
from deltachain.format.keys import edge_key, manifest_key, prune_key, tag_key
from deltachain.store.memory import MemoryStore
from tests.format import freeze
from tests.format import stranger_chain as stranger
from tests.format.forge import KEYS, TABLES, enveloped, no_documents
from tests.format.stranger import RefusedError, read_json
from tests.format.stranger_chain import read_prune, read_tag

VALUES: tuple[Any, ...] = (
    *(None, -1, 1 << 70, 10**4000, 1.5, True, "x", ""),
    *([], {}, [None], {"x": None}),
)
CHAIN = freeze.FOLDER / "chain"
Reader = Callable[[bytes], object]


def bare(fields: stranger.Fields) -> Reader:
    return lambda data: stranger.check_document(read_json(data), fields)


def envelope(fields: stranger.Fields) -> Reader:
    return lambda data: stranger.open_envelope(data, fields)


FILES: dict[str, tuple[Path, type[documents.Document], Reader]] = {
    "chain": (CHAIN / "chain.json", documents.Identity, bare(stranger.CHAIN)),
    "table": (CHAIN / "table.json", documents.Table, bare(stranger.TABLE)),
    "head": (CHAIN / "head.json", documents.Head, bare(stranger.HEAD)),
    "manifest": (CHAIN / manifest_key(3), documents.Manifest, envelope(stranger.MANIFEST)),
    "record": (CHAIN / edge_key(2, "skip", 0), documents.EdgeRecord, envelope(stranger.RECORD)),
    "prune": (freeze.PRUNES / prune_key(1), documents.PruneRecord, read_prune),
    "tag": (freeze.TAGS / tag_key("best", 1), documents.Tag, read_tag),
}
ENVELOPES = ("manifest", "record", "prune", "tag")


def frozen(name: str) -> bytes:
    return FILES[name][0].read_bytes()


def read(name: str, data: bytes) -> documents.Document:
    kind = FILES[name][1]
    take = documents.unseal if name in ENVELOPES else documents.parse
    return take(data, kind, key=name)


def is_refused(name: str, data: bytes) -> bool:
    with suppress(errors.FormatError):
        read(name, data)
        return False
    return True


def is_refused_by_stranger(name: str, data: bytes) -> bool:
    with suppress(RefusedError):
        FILES[name][2](data)
        return False
    return True


def document(name: str) -> Any:
    whole = json.loads(frozen(name))
    return whole["payload"] if name in ENVELOPES else whole


def sealed(name: str, content: Any) -> bytes:
    data = json.dumps(content, separators=(",", ":")).encode()
    return enveloped(data) if name in ENVELOPES else data


def places(content: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for name, value in items:
        if isinstance(value, (dict, list)):
            yield from places(value, *path, name)
        else:
            yield (*path, name)


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(content)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("name", FILES)
def test_what_was_frozen_is_sound(name: str) -> None:
    assert not is_refused(name, frozen(name))
    assert not is_refused_by_stranger(name, frozen(name))
    assert sealed(name, document(name)) == frozen(name)


@pytest.mark.parametrize("name", FILES)
def test_values_of_other_types_are_refused_by_both_readers_or_by_none(name: str) -> None:
    content = document(name)
    free = {"ext", "metadata", "aliases"}
    differ, refused = [], 0
    for path in places(content):
        if free & set(path):
            continue
        for value in VALUES:
            data = sealed(name, replaced(content, path, value))
            ours = is_refused(name, data)
            refused += ours
            # Shapes, keys and ways are checked where they are used, which is elsewhere there.
            elsewhere = {"tensors", "key", "record", "recent", "version", "base", "kind", "parts"}
            elsewhere |= {"reference", "window_from", "edge", "anchors"}
            if name in ("prune", "tag"):
                elsewhere = set()
            if not elsewhere & set(path) and ours != is_refused_by_stranger(name, data):
                differ.append((path, value))
    assert differ == []
    assert refused > 50


@pytest.mark.parametrize("name", FILES)
def test_fields_that_nobody_knows_are_malformed_at_every_depth(name: str) -> None:
    content = document(name)
    accepted = []
    for path in [(), *places(content)]:
        inner = content
        for step in path:
            inner = inner[step]
        if isinstance(inner, dict) and not {"ext", "metadata", "aliases"} & set(path):
            changed = replaced(content, (*path, "colour"), "red")
            if not is_refused(name, sealed(name, changed)):
                accepted.append(path)
    assert accepted == []
    with pytest.raises(errors.MalformedError, match="colour"):
        read(name, sealed(name, content | {"colour": "red"}))


@pytest.mark.parametrize("name", FILES)
def test_ext_may_hold_anything(name: str) -> None:
    ext = {"later": [1, {"a": None}], "x": 1e300}
    assert read(name, sealed(name, document(name) | {"ext": ext})).ext == ext


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [{"requires": ["ranks"]}, {"format": 2}, {"format": 0}])
def test_what_is_newer_is_unsupported_whatever_else_is_in_it(
    name: str, change: dict[str, Any]
) -> None:
    later = sealed(name, {"colour": "red"} | document(name) | change)
    with pytest.raises(errors.UnsupportedFormatError):
        read(name, later)
    assert is_refused_by_stranger(name, later)


@pytest.mark.parametrize("name", FILES)
def test_documents_without_a_format_are_malformed(name: str) -> None:
    content = document(name)
    del content["format"]
    with pytest.raises(errors.MalformedError):
        read(name, sealed(name, content))


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_malformed(name: str) -> None:
    data = frozen(name)
    assert [n for n in range(len(data)) if not is_refused(name, data[:n])] == []


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_raises_another_error(name: str) -> None:
    # Whether the text still is a document is another matter: digests name its exact bytes.
    data = bytearray(frozen(name))
    refused = 0
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        refused += is_refused(name, bytes(data))
        data[bit // 8] ^= 1 << bit % 8
    assert refused == 8 * len(data) if name in ENVELOPES else refused > 2 * len(data)


@pytest.mark.parametrize("what", no_documents(b'{"ext":{},"format":1}'))
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_document_is_malformed(name: str, what: str) -> None:
    sound = json.dumps(document(name), separators=(",", ":")).encode()
    data = no_documents(sound)[what]
    assert data != sound
    with pytest.raises(errors.MalformedError):
        read(name, enveloped(data) if name in ENVELOPES else data)


def test_envelopes_are_strict_and_signatures_are_carried() -> None:
    payload = json.dumps(document("manifest"), separators=(",", ":")).encode()
    signature = b'{"key_id":"a","algorithm":"b","value":"c"}'
    signed = enveloped(payload, b"[%s]" % signature)
    assert read("manifest", signed) == read("manifest", frozen("manifest"))
    for wrong in (
        frozen("manifest")[:-1] + b',"signatures":[]}',
        frozen("manifest")[:-1] + b',"colour":""}',
        frozen("manifest") + b" ",
        enveloped(payload, b'[%s,"d":""}]' % signature[:-1]),
        enveloped(b"1"),
    ):
        with pytest.raises(errors.MalformedError):
            read("manifest", wrong)
        assert is_refused_by_stranger("manifest", wrong)


def test_a_changed_payload_is_not_the_one_that_was_sealed() -> None:
    for name in ENVELOPES:
        changed = frozen(name).replace(b'"format":1,', b'"format":1 ,')
        assert changed != frozen(name)
        with pytest.raises(errors.DigestMismatchError):
            read(name, changed)
        assert is_refused_by_stranger(name, changed)


@pytest.mark.parametrize("what", TABLES)
def test_tables_of_no_model_are_malformed(what: str) -> None:
    store = MemoryStore()
    table = sealed("table", document("table") | TABLES[what])
    identity = document("chain") | {"table": blake3(table).hexdigest()}
    store.put("table.json", table)
    store.put("chain.json", sealed("chain", identity))
    with pytest.raises(errors.MalformedError):
        Chain.open(store)


Edit = Callable[[Any], object]


def edge(**fields: Any) -> tuple[str, Edit]:
    return "manifest", lambda d: d["edge"].update(fields)


def listed(**fields: Any) -> tuple[str, Edit]:
    return "manifest", lambda d: d["recent"][0].update(fields)


def part(**fields: Any) -> tuple[str, Edit]:
    return "record", lambda d: d["edge"]["parts"][0].update(fields)


def pruned(*rows: dict[str, Any]) -> tuple[str, Edit]:
    return "prune", lambda d: d.update(pruned=list(rows))


def tag(**fields: Any) -> tuple[str, Edit]:
    return "tag", lambda d: d.update(fields)


PART = {"key": f"anchors/{3:020d}-x", "nbytes": 1, "blake3": ""}
ROW = {"kind": "delta", "span": 1, "first": 1, "last": 8, "after": 0.0}
ANCHOR, SKIP = ROW | {"kind": "anchor", "span": 0}, ROW | {"kind": "skip", "span": 8}
MALFORMED: dict[str, tuple[str, Edit]] = {
    # Edges that led back, or were cheaper than nothing, would send a planner in circles.
    "a delta from an older version": edge(kind="delta", base=1),
    "a delta from itself": edge(kind="delta", base=3),
    "a delta from nothing": edge(kind="delta", base=None),
    "a delta from a later version": edge(kind="delta", base=4),
    "a skip from the version before": edge(kind="skip", base=2),
    "an anchor from a version": edge(kind="anchor", base=2),
    "a base without a reference": edge(kind="base", base=None),
    "a reference of a delta": edge(reference={"path": "x"}),
    "a base with parts": edge(kind="base", base=None, reference={}, parts=[PART]),
    "an edge to its own version is listed": listed(version=3),
    "a version of 2^63 is listed": listed(version=2**63),
    "fewer bytes than none are listed": listed(nbytes=-(10**9)),
    "fewer parts than none are listed": listed(parts=-1),
    "an unknown kind is listed": listed(kind="sideways"),
    "an anchor from a version is listed": listed(base=1),
    "a record in a system folder is listed": listed(record="../../etc/passwd"),
    # Reading backwards from window to window would never end.
    "a window that does not go back": ("manifest", lambda d: d.update(window_from=3)),
    **{f"a part at {key[:20]!r}, {len(key)} long": part(key=key) for key in KEYS},
    "a delta over no version": pruned(ROW | {"span": 0}),
    "a delta over two versions": pruned(ROW | {"span": 2}),
    "an anchor with a span": pruned(ANCHOR | {"span": 1}),
    "a skip from nothing": pruned(SKIP | {"span": 0}),
    "a skip over one version": pruned(SKIP | {"span": 1}),
    "a base": pruned(ANCHOR | {"kind": "base"}),
    "a range that ends before it begins": pruned(ROW | {"first": 9}),
    "a range beyond the head": pruned(ROW | {"last": 1041}),
    "two that overlap": pruned(ROW, ROW | {"first": 8, "last": 9}),
    "one inside another": pruned(ROW, ROW | {"first": 2, "last": 3}),
    "one twice": pruned(ROW, ROW),
    "a later one first": pruned(ROW | {"first": 9, "last": 10}, ROW),
    "kinds out of order": pruned(ROW, ANCHOR),
    "spans out of order": pruned(SKIP | {"span": 64}, SKIP),
    "a tag of no version that names a state": tag(version=None),
    "a tag of no version that names a manifest": tag(version=None, state=""),
    "a tag without a state": tag(state=""),
    "a tag without a manifest": tag(manifest=""),
    "a tag without a name": tag(name=""),
    "a hidden tag": tag(name=".best"),
    "a tag in a folder": tag(name="a/b"),
    "a tag of 129 characters": tag(name="a" * 129),
    "a tag with a number of nine digits": tag(number=10**8),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_cannot_be_is_malformed(what: str) -> None:
    name, edit = MALFORMED[what]
    content = document(name)
    edit(content)
    data = sealed(name, content)
    with pytest.raises(errors.MalformedError):
        read(name, data)
    # A stranger checks the others where it uses them.
    assert is_refused_by_stranger(name, data) or name in ("manifest", "record")


def test_ranges_in_order_are_sound() -> None:
    rows = [ANCHOR, ROW, ROW | {"first": 9, "last": 1040}, SKIP, SKIP | {"span": 64}]
    data = sealed("prune", document("prune") | {"pruned": rows})
    assert not is_refused("prune", data)
    assert not is_refused_by_stranger("prune", data)
