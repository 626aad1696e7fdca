import numpy as np
import pytest

from deltachain.chain.upload import MeasuredTransfer
from deltachain.errors import ConfigError
from deltachain.publish.encoding_choice import (
    EncodingCost,
    fastest_encoding,
    link_speed,
    may_be_replaced,
    next_encoding,
)

SMALL = EncodingCost(encoding="max", nbytes=0.9, encode_ns=40.0, decode_ns=40.0)
DEFAULT = EncodingCost(encoding="step", nbytes=1.25, encode_ns=12.0, decode_ns=18.0)
QUICK = EncodingCost(encoding="raw", nbytes=6.1, encode_ns=5.0, decode_ns=5.0)


@pytest.mark.parametrize(
    ("bytes_per_s", "encoding"),
    [(1e5, "max"), (13e6, "max"), (15e6, "step"), (4e8, "step"), (6e8, "raw"), (5e10, "raw")],
)
def test_slow_links_take_the_smallest_and_fast_ones_the_quickest(
    bytes_per_s: float, encoding: str
) -> None:
    choice = fastest_encoding([DEFAULT, SMALL, QUICK], bytes_per_s)
    assert choice.encoding == encoding
    assert choice.serve_ns[encoding] == min(choice.serve_ns.values())
    assert choice.serve_ns.keys() == {"max", "step", "raw"}


def test_a_change_crosses_the_link_twice() -> None:
    assert DEFAULT.serve_ns(1e9) == pytest.approx(30.0 + 2 * 1.25)


def test_of_equally_fast_ones_the_first_is_chosen() -> None:
    twin = EncodingCost(encoding="other", nbytes=1.25, encode_ns=18.0, decode_ns=12.0)
    assert fastest_encoding([DEFAULT, twin], 1e9).encoding == "step"
    assert fastest_encoding([twin, DEFAULT], 1e9).encoding == "other"


def test_without_a_link_or_costs_the_given_encoding_is_used() -> None:
    unknown = fastest_encoding([SMALL], None)
    assert (unknown.encoding, unknown.serve_ns) == ("step", {})
    assert fastest_encoding([], 1e9).encoding == "step"
    assert fastest_encoding([], 1e9, otherwise="overwrite").encoding == "overwrite"


@pytest.mark.parametrize(
    ("present", "bytes_per_s", "encoding"),
    [
        ("step", 1e6, "max"),
        ("step", 13e6, "step"),  # `max` would be faster, by less than the margin
        ("max", 13e6, "max"),
        ("max", 15e6, "max"),
        ("max", 4e8, "step"),
        ("raw", 1e6, "max"),  # it was not measured
    ],
)
def test_an_encoding_stays_until_another_is_clearly_faster(
    present: str, bytes_per_s: float, encoding: str
) -> None:
    choice = next_encoding(present, [DEFAULT, SMALL], bytes_per_s)
    assert choice.encoding == encoding
    assert choice.serve_ns.keys() == {"step", "max"}


def test_no_link_speed_lies_between_two_choices() -> None:
    """Where one replaces the other, the other does not replace it at the same speed."""
    for bytes_per_s in np.geomspace(1e4, 1e12, 200):
        chosen = next_encoding("step", [DEFAULT, SMALL], bytes_per_s).encoding
        assert next_encoding(chosen, [DEFAULT, SMALL], bytes_per_s).encoding == chosen


def test_the_reason_says_what_was_measured() -> None:
    assert next_encoding("step", [DEFAULT], None).reason == "link not measured yet"
    choice = next_encoding("step", [DEFAULT, SMALL], 2.5e6)
    assert choice.reason == "link of 2.5 MB/s, step 1,030 ns a change, max 800"


@pytest.mark.parametrize(("bytes_per_s", "may"), [(1e6, True), (1e8, True), (1e9, False)])
def test_no_other_encoding_is_tried_where_fewer_bytes_gain_nothing(
    bytes_per_s: float, may: bool
) -> None:
    assert may_be_replaced(DEFAULT, bytes_per_s) == may


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0])
def test_a_link_that_moves_nothing_is_refused(bytes_per_s: float) -> None:
    with pytest.raises(ConfigError, match="bytes a second"):
        fastest_encoding([DEFAULT], bytes_per_s)


@pytest.mark.parametrize("wrong", ["nbytes", "encode_ns", "decode_ns"])
def test_a_negative_cost_is_refused(wrong: str) -> None:
    figures = {"nbytes": 1.0, "encode_ns": 1.0, "decode_ns": 1.0, wrong: -0.1}
    with pytest.raises(ConfigError, match="'step': a cost must not be negative"):
        EncodingCost(encoding="step", **figures)


def test_the_fastest_large_upload_shows_the_link() -> None:
    busy = MeasuredTransfer(50 << 20, 10.0)
    quiet = MeasuredTransfer(8 << 20, 0.5)
    round_trip = MeasuredTransfer(2_000, 0.00001)
    assert link_speed([busy, quiet, round_trip]) == (8 << 20) / 0.5


@pytest.mark.parametrize(
    "uploads", [[], [MeasuredTransfer(1000, 0.1)], [MeasuredTransfer(1 << 20, 0.0)]]
)
def test_small_uploads_show_no_link(uploads: list[MeasuredTransfer]) -> None:
    assert link_speed(uploads) is None
