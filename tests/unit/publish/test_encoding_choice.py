import pytest

from deltachain.errors import ConfigError
from deltachain.publish.encoding_choice import (
    EncodingCost,
    MeasuredUpload,
    fastest_encoding,
    link_speed,
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
    busy = MeasuredUpload(50 << 20, 10.0)
    quiet = MeasuredUpload(8 << 20, 0.5)
    round_trip = MeasuredUpload(2_000, 0.00001)
    assert link_speed([busy, quiet, round_trip]) == (8 << 20) / 0.5


@pytest.mark.parametrize(
    "uploads", [[], [MeasuredUpload(1000, 0.1)], [MeasuredUpload(1 << 20, 0.0)]]
)
def test_small_uploads_show_no_link(uploads: list[MeasuredUpload]) -> None:
    assert link_speed(uploads) is None
