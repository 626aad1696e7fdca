from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from deltachain.chain.checks import check_assets, check_edge, check_encodings, check_record
from deltachain.errors import MalformedError
from deltachain.format.documents import (
    Edge,
    EdgeKind,
    EdgeRecord,
    EdgeSummary,
    Identity,
    ObjectRef,
    summarise,
)
from deltachain.format.keys import asset_key, edge_key, payload_key

PART = ObjectRef(key=payload_key("skip", 3, 0, "a" * 32, 0), nbytes=7, blake3="0" * 64)
SKIP = Edge(kind="skip", base=1, encodings=("step",), parts=(PART,))
KEY = edge_key(3, "skip", 1)
DIGEST = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Lie:
    """A field of a summary that is not the edge's."""

    name: str
    value: Any


LIES = (
    Lie("version", 4),
    Lie("base", 0),
    Lie("nbytes", 8),
    Lie("parts", 2),
    Lie("encodings", ()),
    Lie("encodings", ("dense", "step")),
    Lie("state", "1" * 32),
    Lie("record", edge_key(3, "skip", 0)),
    Lie("digest", "1" * 64),
)


def summary(**fields: Any) -> EdgeSummary:
    true = summarise(3, SKIP, "0" * 32, record=KEY, digest=DIGEST)
    return EdgeSummary(**{name: getattr(true, name) for name in true.__struct_fields__} | fields)


def test_what_lies_where_it_belongs_is_taken() -> None:
    assert check_edge(SKIP, summary(), summary(), KEY) is SKIP
    check_record(record(), DIGEST, "0" * 32, KEY)
    sound = identity(asset_key(DIGEST, "a.json"), asset_key(DIGEST, "b.json"))
    assert check_assets(sound) is sound


@pytest.mark.parametrize("lie", LIES)
def test_an_edge_that_is_not_as_it_was_listed_is_refused(lie: Lie) -> None:
    with pytest.raises(MalformedError, match=f"has {lie.name} ") as caught:
        check_edge(SKIP, summary(), summary(**{lie.name: lie.value}), KEY)
    assert caught.value.key == KEY


@pytest.mark.parametrize("key", [payload_key("skip", 2, 0, "a" * 32, 0), "table.json"])
def test_a_part_that_lies_elsewhere_is_refused(key: str) -> None:
    part = ObjectRef(key=key, nbytes=7, blake3="0" * 64)
    edge = Edge(kind="skip", base=1, encodings=("step",), parts=(part,))
    with pytest.raises(MalformedError, match="as a part"):
        check_edge(edge, summary(), summary(), KEY)


def test_an_encoding_that_its_edge_does_not_list_is_refused() -> None:
    check_encodings(SKIP, ["step", "step"], PART.key)
    check_encodings(SKIP, [], PART.key)
    with pytest.raises(MalformedError, match="'dense'") as caught:
        check_encodings(SKIP, ["step", "dense"], PART.key)
    assert caught.value.key == PART.key


def record(*, version: int = 3, kind: EdgeKind = "skip", base: int | None = 1) -> EdgeRecord:
    return EdgeRecord(
        chain="one",
        version=version,
        manifest=DIGEST,
        base_state="",
        state="0" * 32,
        edge=Edge(kind=kind, base=base),
    )


@pytest.mark.parametrize(
    ("there", "manifest", "state"),
    [
        (record(), "0" * 64, "0" * 32),
        (record(), DIGEST, "1" * 32),
        (record(version=4), DIGEST, "0" * 32),
        (record(base=0), DIGEST, "0" * 32),
        (record(kind="anchor", base=None), DIGEST, "0" * 32),
    ],
)
def test_a_record_of_something_else_is_refused(
    there: EdgeRecord, manifest: str, state: str
) -> None:
    with pytest.raises(MalformedError) as caught:
        check_record(there, manifest, state, KEY)
    assert caught.value.key == KEY


def identity(*keys: str) -> Identity:
    refs = tuple(ObjectRef(key=key, nbytes=1, blake3=DIGEST) for key in keys)
    return Identity(chain="one", created=0.0, table="", assets=refs)


@pytest.mark.parametrize(
    "keys",
    [
        ("table.json",),
        (f"assets/{'0' * 32}/a.json",),
        (f"assets/{DIGEST[:32]}/x/a.json",),
        (asset_key(DIGEST, "a.json"), asset_key(DIGEST, "a.json")),
    ],
)
def test_files_that_lie_elsewhere_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(MalformedError, match="as a file") as caught:
        check_assets(identity(*keys))
    assert caught.value.key == "chain.json"
