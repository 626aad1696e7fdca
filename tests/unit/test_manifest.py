from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltachain.errors import MalformedError
from deltachain.format.documents import (
    BaseRef,
    Document,
    Edge,
    EdgeRecord,
    EdgeSummary,
    FileRef,
    Head,
    Identity,
    Manifest,
    ObjectRef,
    Table,
    dump,
    parse,
    read_state,
    seal,
    summarise,
    unseal,
)
from deltachain.format.keys import object_digest
from deltachain.types import WIRE_DTYPES, StateDigest

COUNTS = st.integers(0, (1 << 63) - 1)
TEXTS = st.text(max_size=20)
NAMES = st.from_regex(r"\A[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}\Z")
KEYS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
HEX = st.from_regex(r"\A[0-9a-f]{64}\Z")
STATES = st.from_regex(r"\A[0-9a-f]{32}\Z")
ENCODINGS = st.sets(NAMES, max_size=3).map(sorted).map(tuple)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
EXTS = st.dictionaries(TEXTS, st.recursive(st.none() | TEXTS | FLOATS, st.lists, max_leaves=4))

REFS = st.builds(ObjectRef, key=KEYS, nbytes=COUNTS, blake3=HEX, directory=TEXTS, pin=TEXTS)
BASES = st.builds(
    BaseRef,
    repo=TEXTS,
    revision=TEXTS,
    path=TEXTS,
    files=st.lists(st.builds(FileRef, name=TEXTS, nbytes=COUNTS, blake3=HEX)).map(tuple),
)


@st.composite
def ways(draw: st.DrawFn, version: int) -> tuple[Any, int | None]:
    """A kind of edge to a version, and where one of that kind may start."""
    kinds = ["anchor", "base", *(["delta"] if version else []), *(["skip"] if version > 1 else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "skip":
        return kind, draw(st.integers(0, version - 2))
    return kind, version - 1 if kind == "delta" else None


@st.composite
def edges(draw: st.DrawFn, version: int) -> Edge:
    kind, base = draw(ways(version))
    if kind == "base":
        return Edge(kind=kind, base=base, reference=draw(BASES))
    parts = draw(st.lists(REFS, max_size=3, unique_by=lambda ref: ref.key).map(tuple))
    return Edge(kind=kind, base=base, encodings=draw(ENCODINGS), parts=parts)


@st.composite
def summaries(draw: st.DrawFn, below: int) -> EdgeSummary:
    version = draw(st.integers(0, below))
    kind, base = draw(ways(version))
    return EdgeSummary(
        version=version,
        kind=kind,
        base=base,
        nbytes=draw(COUNTS),
        parts=draw(COUNTS),
        encodings=draw(ENCODINGS),
        state=draw(STATES),
        record=draw(st.one_of(st.just(""), KEYS)),
        digest=draw(TEXTS),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    version = draw(st.integers(0, 1000))
    recent = draw(st.lists(summaries(version - 1), max_size=3)) if version else []
    recent.sort(key=lambda edge: edge.version)
    return Manifest(
        ext=draw(EXTS),
        chain=draw(TEXTS),
        version=version,
        epoch=draw(COUNTS),
        commit_id=draw(TEXTS),
        parent=draw(TEXTS),
        step=draw(st.none() | st.integers(-(10**30), 10**30)),
        time=draw(FLOATS),
        base_state=draw(TEXTS),
        state=draw(STATES),
        nnz=draw(COUNTS),
        numel=draw(COUNTS),
        edge=draw(edges(version)),
        recent=tuple(recent),
        window_from=draw(st.integers(0, max(0, version - 1))),
        metadata=draw(st.dictionaries(TEXTS, TEXTS, max_size=3)),
    )


@st.composite
def records(draw: st.DrawFn) -> EdgeRecord:
    version = draw(st.integers(0, 1000))
    return EdgeRecord(
        chain=draw(TEXTS),
        version=version,
        manifest=draw(HEX),
        base_state=draw(STATES),
        state=draw(STATES),
        edge=draw(edges(version)),
    )


HEADS = st.builds(Head, version=COUNTS, anchors=st.lists(summaries(99), max_size=3).map(tuple))
SHAPES = st.lists(COUNTS, max_size=4).map(tuple)
ROWS = st.tuples(TEXTS, st.sampled_from(sorted(WIRE_DTYPES)), SHAPES)
TABLES = st.builds(
    Table,
    tensors=st.lists(ROWS).map(tuple),
    aliases=st.dictionaries(TEXTS, TEXTS, max_size=3),
)
IDENTITIES = st.builds(
    Identity, chain=TEXTS, created=FLOATS, table=HEX, assets=st.lists(REFS, max_size=2).map(tuple)
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(manifests(), records(), HEADS, TABLES, IDENTITIES))
def test_documents_survive_and_have_one_form(document: Document) -> None:
    bare, sealed = dump(document), seal(document)
    assert parse(bare, type(document), key="k") == document
    assert unseal(sealed, type(document), key="k") == document
    assert dump(parse(bare, type(document), key="k")) == bare
    assert seal(unseal(sealed, type(document), key="k")) == sealed
    assert bare in sealed


@settings(max_examples=50, deadline=None)
@given(manifests())
def test_any_spelling_of_a_document_is_read(manifest: Manifest) -> None:
    spaced = json.dumps(json.loads(dump(manifest)), indent=3, sort_keys=True).encode()
    assert parse(spaced, Manifest, key="k") == manifest


@settings(max_examples=50, deadline=None)
@given(manifests())
def test_a_manifest_sums_up_its_own_edge(manifest: Manifest) -> None:
    found = manifest.summary()
    assert found == summarise(manifest.version, manifest.edge, manifest.state)
    assert (found.nbytes, found.parts) == (
        sum(part.nbytes for part in manifest.edge.parts),
        len(manifest.edge.parts),
    )
    assert (found.record, found.digest, found.base) == ("", "", manifest.edge.base)


def test_fields_are_written_in_the_order_of_the_format() -> None:
    head = Head(version=3, anchors=())
    assert dump(head) == b'{"format":1,"requires":[],"ext":{},"version":3,"anchors":[]}'
    digest = object_digest(dump(head)).encode()
    envelope = b'{"blake3":"' + digest + b'","payload":' + dump(head) + b',"signatures":[]}'
    assert seal(head) == envelope


def test_state_digests_of_documents_are_checked() -> None:
    digest = StateDigest(1, 2)
    assert read_state(str(digest), key="k") == digest
    with pytest.raises(MalformedError, match="k: 'x'"):
        read_state("x", key="k")


def test_documents_can_not_be_changed() -> None:
    head = Head(version=3)
    with pytest.raises(AttributeError):
        head.version = 4  # type: ignore[misc]
    assert msgspec.structs.replace(head, version=4).version == 4
