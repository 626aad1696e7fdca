from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.store.hf import feed as events
from deltachain.store.hf.feed import FeedEvent, OversizedEventError, parse_events

STREAM = (
    b": keep-alive\n\n"
    b'event: ready\r\ndata: {"cursor": "a.1"}\r\n\r\n'
    b'event:changes\rdata: {"cursor": "a.2",\rdata:  "changes": [{"path": "x", "op": "add"}]}\r\r'
    b"id: 7\nretry: 1\nevent: reset\ndata: {}\n\n"
    b'event: reconnect\ndata: {"cursor": "a.2"}\n\n'
    b"event: ready\ndata: {}"  # not ended
)
EVENTS = [
    FeedEvent("ready", "a.1"),
    FeedEvent("changes", "a.2", ("x",)),
    FeedEvent("reset"),
    FeedEvent("reconnect", "a.2"),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_where_the_stream_is_cut(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(ends)]
    assert list(parse_events(pieces)) == EVENTS


def test_events_are_yielded_as_soon_as_they_end() -> None:
    seen: list[FeedEvent] = []

    def pieces() -> object:
        yield b"event: ready\ndata: {}\n"
        assert not seen
        yield b"\n"
        assert seen == [FeedEvent("ready")]

    for event in parse_events(pieces()):  # type: ignore[arg-type]
        seen.append(event)  # noqa: PERF402 - seen between two pieces


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"7",
        b'"ready"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"changes": {"path": "x"}}',
        b'{"changes": "x"}',
        b'{"cursor": "a.1"}',
    ],
)
def test_malformed_changes_are_skipped(data: bytes) -> None:
    after = b"event: ready\ndata: {}\n\n"
    found = list(parse_events([b"event: changes\ndata: " + data + b"\n\n" + after]))
    assert found == [FeedEvent("ready")]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda v: (
            st.lists(v) | st.dictionaries(st.sampled_from(["cursor", "changes", "path", "op"]), v)
        ),
    )
)
def test_documents_of_any_shape_raise_nothing(document: object) -> None:
    data = json.dumps(document).encode()
    for name in (b"changes", b"ready", b"other", b""):
        for event in parse_events([b"event: " + name + b"\ndata: " + data + b"\n\n"]):
            assert all(isinstance(path, str) for path in (event.cursor, *event.paths))


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_bytes_of_any_kind_raise_nothing(pieces: list[bytes]) -> None:
    list(parse_events(pieces))


def test_cursors_that_no_request_can_carry_are_left_out() -> None:
    for cursor in ("x" * 5000, "a\nb", 7, None):
        data = json.dumps({"cursor": cursor}).encode()
        assert list(parse_events([b"event: ready\ndata: " + data + b"\n\n"])) == [
            FeedEvent("ready")
        ]


@pytest.mark.parametrize("piece", [b"x" * 1000, b"data: " + b"x" * 1000 + b"\n"])
def test_events_without_end_are_refused(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_BYTES", 10_000)
    taken = 0

    def pieces() -> object:
        nonlocal taken
        while True:
            taken += 1
            yield piece

    with pytest.raises(OversizedEventError):
        list(parse_events(pieces()))  # type: ignore[arg-type]
    assert taken < 15
