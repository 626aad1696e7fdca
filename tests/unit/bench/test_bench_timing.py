import os

import pytest
import torch

from tests.bench.timing import Candidate, Timings, one_core, round_robin


def test_candidates_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    candidates = [
        Candidate("a", lambda: calls.append("a"), lambda: calls.append("before a")),
        Candidate("b", lambda: calls.append("b")),
    ]
    timings = round_robin(candidates, rounds=2)
    forwards, backwards = ["before a", "a", "b"], ["b", "before a", "a"]
    assert calls == [*backwards, *forwards, *backwards]
    assert {name: len(seconds) for name, seconds in timings.seconds.items()} == {"a": 2, "b": 2}


def test_ratios_are_of_the_best_and_of_pairs() -> None:
    timings = Timings({"floor": [1.0, 2.0, 4.0], "own": [2.0, 8.0, 4.0]})
    assert timings.best("own") == 2.0
    assert timings.typical("own") == 4.0
    assert timings.ratio("own", "floor") == 0.5
    assert timings.paired_ratio("own", "floor") == 0.5


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_one_core_is_given_back() -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with one_core():
        assert len(os.sched_getaffinity(0)) == torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads
