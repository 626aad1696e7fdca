"""Presence records come from anybody: hostile until parsed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from deltachain.errors import MalformedError
from deltachain.presence.record import (
    LARGEST,
    TEXT,
    PresenceRecord,
    encode_record,
    parse_record,
)
from tests.unit.control.statuses import status


def document(**fields: Any) -> dict[str, Any]:
    made = PresenceRecord(time=1.0, status=status(**fields))
    found: dict[str, Any] = json.loads(encode_record(made))
    return found


def parsed(found: object) -> PresenceRecord:
    return parse_record(json.dumps(found).encode(), "r.json")


def test_what_is_written_is_read() -> None:
    record = PresenceRecord(time=1.5, status=status(7, head=9), software={"deltachain": "1"})
    found = parse_record(encode_record(record), "r.json")
    assert (found.status, found.ended) == (record.status, None)


def test_fields_of_a_newer_writer_are_left_alone() -> None:
    found = document()
    found["later"] = found["status"]["later"] = {"a": [1]}
    assert parsed(found).status.version == 7


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
        b"[" + b"[]," * 80_000 + b"[]]",
        b'{"presence":1,"time":0,"status":' + b"[" * 50_000,
    ],
)
def test_what_is_no_record_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError, match="no presence record"):
        parse_record(data, "r.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence", 2),
        ("time", "now"),
        ("ended", 7),
        ("software", {"a": 1}),
        ("status", None),
        ("status.version", "7"),
        ("status.version", -1),
        ("status.version", 1.5),
        ("status.head", 1 << 53),
        ("status.head", 10**30),
        ("status.silence_s", -1.0),
        ("status.silence_s", 1e308),
        ("status.ready", "yes"),
        ("status.url", None),
        ("status.phases", {"look": "x"}),
    ],
    ids=str,
)
def test_a_wrong_type_or_number_is_malformed(field: str, value: object) -> None:
    found = document()
    *path, name = field.split(".")
    place = found[path[0]] if path else found
    place[name] = value
    with pytest.raises(MalformedError, match="no presence record"):
        parsed(found)


def test_a_field_that_is_missing_is_malformed() -> None:
    found = document()
    del found["status"]["url"]
    with pytest.raises(MalformedError, match="url"):
        parsed(found)


def test_a_number_that_is_none_is_malformed() -> None:
    text = json.dumps(document()).replace('"silence_s": 0.5', '"silence_s": NaN')
    with pytest.raises(MalformedError):
        parse_record(text.encode(), "r.json")


def test_long_texts_are_cut_and_details_are_not_kept() -> None:
    found = parsed(
        document(reason="x" * 9999, trouble="y" * 9999, engine="z" * 9999, ranks=[{"a": 1}])
        | {"ended": "w" * 9999}
    )
    texts = (found.status.reason, found.status.trouble, found.status.engine, found.ended or "")
    assert [len(text) for text in texts] == [TEXT] * 4
    assert found.status.ranks == []


def test_a_record_is_small_whatever_a_replica_has_to_say() -> None:
    large = status(
        ranks=[{"unused": "x" * 9999} for _ in range(64)],
        on_host={f"layer.{n}": "y" * 999 for n in range(999)},
        trouble="z" * (2 * LARGEST),
    )
    data = encode_record(PresenceRecord(time=1.0, status=large))
    assert len(data) <= LARGEST
    assert parse_record(data, "r.json").status.version == 7


def test_a_record_has_the_fields_of_the_status_route() -> None:
    found = document()
    assert found["status"].keys() == msgspec.to_builtins(status()).keys()
