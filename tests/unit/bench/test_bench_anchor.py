from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.bench import anchor


def test_rows_hold_every_candidate_and_floor(capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(json.dumps(anchor.run(nbytes=1, rounds=2)))
    names = [row["name"] for row in result["rows"]]
    assert names[:3] == [anchor.ATTACH, anchor.ANCHOR, anchor.NEWCOMER]
    assert all(name.startswith("floor: ") for name in names[3:])
    assert all(0 < row["best_s"] <= row["median_s"] for row in result["rows"])
    assert result["dense_nbytes"] == 2 * anchor.WIDTH**2
    assert result["of_dense"] <= 0.671
    assert "warming up" in capsys.readouterr().err


def test_a_newcomer_with_other_bits_is_refused(tmp_path: Path) -> None:
    bench = anchor.Bench(tmp_path, 1)
    try:
        bench.check_newcomer()
        with torch.no_grad():
            next(iter(bench.model.parameters())).view(torch.int16)[0, 0] ^= 1
        with pytest.raises(ArithmeticError, match=r"0\.weight"):
            bench.check_newcomer()
    finally:
        bench.close()
