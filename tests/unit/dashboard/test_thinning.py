from __future__ import annotations

import numpy as np

from deltachain.dashboard.documents import thinned
from deltachain.dashboard.watcher import MOMENTS, FleetTrack, Moment, changes, spread


def test_short_columns_are_shown_whole() -> None:
    assert thinned([np.arange(5.0)], 5) == [0, 1, 2, 3, 4]
    assert thinned([np.array([])], 5) == []


def test_long_columns_keep_their_ends_and_every_peak() -> None:
    generator = np.random.default_rng(0)
    one, other = generator.random(10_000), generator.random(10_000)
    one[4321], other[77], other[9_000] = 50.0, 60.0, -1.0
    chosen = thinned([one, other], 500)
    assert len(chosen) <= 500
    assert chosen == sorted(set(chosen))
    assert {0, 9_999, 4321, 77, 9_000} <= set(chosen)
    ranges = np.array(chosen) // 100
    assert set(ranges.tolist()) == set(range(100))  # nothing is left out for long


def test_values_are_spread_to_the_last() -> None:
    assert spread([1, 2, 3], 3) == [1, 2, 3]
    some = spread(list(range(1000)), 10)
    assert len(some) == 10
    assert some[-1] == 999
    assert set(np.diff(some)) == {100}


def test_a_track_covers_the_whole_time_in_bounded_memory() -> None:
    track = FleetTrack()
    for time in range(10 * MOMENTS):
        track.add(Moment(float(time), time, {"a": time}))
    moments = track.moments(MOMENTS)
    times = [moment.time for moment in moments]
    assert MOMENTS // 2 <= len(times) <= MOMENTS
    assert times[0] < MOMENTS
    assert times[-1] >= 10 * MOMENTS - 16
    assert len(set(np.diff(times))) == 1


def test_only_changes_of_a_replica_are_sent() -> None:
    held = [None, 1, 1, 1, 2, None]
    moments = [Moment(float(time), 2, {"a": version}) for time, version in enumerate(held)]
    assert changes(moments, "a") == [(0, None), (1, 1), (4, 2), (5, None)]
    assert changes(moments, "unknown") == [(0, None)]
