import numpy as np

from tests.bench.chains import U16
from tests.bench.stats import chain_stats

ONE = 0x3F80


def bits(*values: int) -> U16:
    return np.array(values, np.uint16)


def test_shares_are_counted_over_hand_made_steps() -> None:
    start = bits(ONE, ONE, ONE, ONE)
    middle = bits(ONE + 1, ONE - 2, ONE, ONE)
    end = bits(ONE + 2, ONE - 1, ONE + 5, ONE)
    stats = chain_stats([{"w": (start, middle)}, {"w": (middle, end)}])

    assert (stats.numel, stats.steps, stats.median_weight) == (4, 2, 1.0)
    assert stats.density == 5 / 8
    assert stats.ulp1 == 3 / 5
    assert stats.ulp2 == 4 / 5
    assert stats.recurrence == 2 / 3
    assert stats.sign_kept == 1 / 2


def test_rows_by_exponent_add_up() -> None:
    old = bits(ONE, ONE, 0x3F00, 0x0000)
    new = bits(ONE + 1, ONE, 0x3F00 + 2, 0x8000)
    rows = {row.exponent: row for row in chain_stats([{"w": (old, new)}]).exponents}

    assert rows[0] == (0, 0.5, 1 / 3, 0.5, 1.0)
    assert rows[-1] == (-1, 0.25, 1 / 3, 1.0, 0.0)
    assert rows[-127].flip_probability == 1.0
