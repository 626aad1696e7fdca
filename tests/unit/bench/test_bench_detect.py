import json
from functools import partial

import numpy as np
import pytest

from deltachain.errors import ConfigError
from deltachain.kernels import reference
from deltachain.kernels.reference import Changes
from deltachain.types import Bits
from tests.bench import detect
from tests.bench.detect import Data

NUMEL = 1 << 14


@pytest.fixture
def data() -> Data:
    return Data.generate(NUMEL, 0.02)


def test_the_snapshot_differs_exactly_where_it_says(data: Data) -> None:
    assert np.array_equal(np.flatnonzero(data.snapshot != data.current), data.indices)
    assert np.array_equal(data.current, reference.cast_bf16(data.master))
    data.snapshot[:] = data.current
    data.restore()
    assert np.array_equal(data.snapshot[data.indices], data.old)


def test_torch_naive_finds_what_the_reference_finds(data: Data) -> None:
    data.check("torch", partial(detect.torch_naive, data.snapshot, data.current))


def test_check_refuses_a_kernel_that_misses_one(data: Data) -> None:
    def careless(snapshot: Bits, current: Bits) -> Changes:
        indices, old, new = reference.diff_(snapshot, current)
        return Changes(indices[:-1], old[:-1], new[:-1])

    with pytest.raises(ArithmeticError, match="careless"):
        data.check("careless", partial(careless, data.snapshot, data.current))


def test_check_refuses_a_kernel_that_leaves_the_snapshot_behind(data: Data) -> None:
    def forgetful(snapshot: Bits, current: Bits) -> Changes:
        return reference.diff_(snapshot.copy(), current)

    with pytest.raises(ArithmeticError, match="forgetful"):
        data.check("forgetful", partial(forgetful, data.snapshot, data.current))


def test_rows_hold_every_candidate_against_its_floor() -> None:
    pytest.importorskip("numba")
    result = json.loads(json.dumps(detect.run(numel=NUMEL, density=0.02, rounds=2)))
    rows = {row["name"]: row for row in result["rows"]}
    assert set(detect.AIMS) <= set(rows)
    assert rows[detect.FLOOR]["ratio"] == rows[detect.CAST_FLOOR]["ratio"] == 1.0
    assert {name for name, row in rows.items() if row["aim"]} == set(detect.AIMS)
    assert all(row["best_s"] <= row["median_s"] for row in rows.values())
    assert result["numel"] == NUMEL
    assert {row["threads"] for row in rows.values()} == {1}
    assert rows[detect.NUMBA]["host_per_change"] == 12
    assert rows[detect.FLOOR]["host_per_change"] == 0
    assert set(result["missed"]) <= set(detect.AIMS)


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        detect.run(numel=NUMEL)
    assert "deltachain[fast]" in caught.value.hint


def test_main_fails_when_an_aim_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba")
    result = {**detect.run(numel=NUMEL, rounds=1), "missed": [detect.NUMBA]}
    monkeypatch.setattr(detect, "run", lambda: result)
    assert detect.main(json_output=True) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["missed"] == [detect.NUMBA]
    result["missed"] = []
    assert detect.main(json_output=False) == 0
    assert "torch, naive" in capsys.readouterr().out
