import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.bench import crossover
from deltachain.bench.codec_rows import ChainRow, EncodingRow, LayoutRow, StagingRow
from deltachain.publish.encoding_choice import EncodingCost, fastest_encoding


def cost(name: str, nbytes: float, ns: float) -> EncodingCost:
    return EncodingCost(encoding=name, nbytes=nbytes, encode_ns=ns / 2, decode_ns=ns / 2)


def row(*layouts: LayoutRow) -> ChainRow:
    step = EncodingRow(
        encoding="step",
        nbytes=1_200_000,
        bits=10.0,
        encode_gb_per_s=1.0,
        decode_gb_per_s=1.0,
        encode_ns=20.0,
        decode_ns=30.0,
    )
    return ChainRow(
        label="1.20%",
        lr=1e-6,
        dtype="BF16",
        density=0.01,
        numel=100_000_000,
        nnz=1_000_000,
        dense_nbytes=200_000_000,
        manifest_nbytes=3_000,
        encodings=[step],
        staging=StagingRow(step_ns=15.0, max_ns=40.0, floor_ns=10.0),
        layouts={one.layout: one for one in layouts},
        full_copy=LayoutRow(
            layout="full copy", nbytes=200_000_000, bits=1600.0, encode_ns=10.0, decode_ns=10.0
        ),
        limits={},
    )


FAST = LayoutRow(layout="fast", nbytes=6_000_000, bits=48.0, encode_ns=3.0, decode_ns=2.0)
UNTIMED = LayoutRow(layout="untimed", nbytes=1, bits=1.0, encode_ns=None, decode_ns=None)


def test_seconds_are_work_and_two_crossings() -> None:
    # 1 M changes: 50 ms of work, and 1.25 MB up and down at 1 MB a second.
    (step, *_) = crossover.costs(row())
    assert crossover.serve_seconds(step, 1_000_000, 8e6) == pytest.approx(0.05 + 2.5)


def test_what_was_not_timed_takes_no_part() -> None:
    names = [one.encoding for one in crossover.costs(row(FAST, UNTIMED))]
    assert names == ["step", "fast", "full copy"]


def test_document_has_seconds_by_link_and_who_is_first() -> None:
    document = crossover.document(row(FAST))
    assert document["label"] == "1.20%"
    assert document["served_s"].keys() == {"step", "fast", "full copy"}
    assert document["served_s"]["step"].keys() == crossover.BANDWIDTHS.keys()
    assert document["first"]["10 Mbit/s"] == "step"
    assert document["first"]["400 Gbit/s"] == "fast"
    assert [span["name"] for span in document["spans"]] == ["step", "fast"]
    assert document["spans"][-1]["up_to_bits_per_s"] is None


def test_spans_end_where_two_take_equally_long() -> None:
    small, fast = cost("small", 1.0, 100.0), cost("fast", 5.0, 20.0)
    first, last = crossover.spans([fast, small])
    assert (first.name, last.name, last.up_to) == ("small", "fast", math.inf)
    speed = first.up_to / 8
    assert small.serve_ns(speed) == pytest.approx(fast.serve_ns(speed))
    assert fastest_encoding([fast, small], speed * 0.99).encoding == "small"
    assert fastest_encoding([fast, small], speed * 1.01).encoding == "fast"


def test_one_that_is_smallest_and_fastest_is_first_on_every_link() -> None:
    assert crossover.spans([cost("b", 2.0, 50.0), cost("a", 1.0, 10.0)]) == [
        crossover.FastestSpan("a", math.inf)
    ]


@given(
    st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(1.0, 1e4)), min_size=1, max_size=8),
    st.floats(1e6, 1e12),
)
def test_spans_name_the_first_on_every_link(
    figures: list[tuple[float, float]], bits_per_s: float
) -> None:
    candidates = [cost(str(number), *figure) for number, figure in enumerate(figures)]
    found = crossover.spans(candidates)
    assert [one.up_to for one in found] == sorted(one.up_to for one in found)
    span = next(one for one in found if bits_per_s < one.up_to)
    chosen = fastest_encoding(candidates, bits_per_s / 8)
    assert chosen.serve_ns[span.name] == pytest.approx(chosen.serve_ns[chosen.encoding])


@pytest.mark.parametrize(
    ("value", "text"),
    [(321_987.4, "321,987"), (99.96, "100.0"), (12.34, "12.3"), (0.01234, "0.0123"), (1, "1.00")],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert crossover.short(value) == text


@pytest.mark.parametrize(
    ("bits", "text"), [(3.44e9, "3.4 Gbit/s"), (41e9, "41 Gbit/s"), (413e6, "413 Mbit/s")]
)
def test_speeds_are_named(bits: float, text: str) -> None:
    assert crossover.speed(bits) == text
