import json
from dataclasses import replace

import numpy as np
import pytest

from deltachain.types import StateDigest
from tests.bench import apply
from tests.bench.apply import Scene


@pytest.fixture
def scene() -> Scene:
    return Scene.generate(tensors=2, numel=1 << 13, density=0.02)


def test_a_swap_and_its_undo_are_exact(scene: Scene) -> None:
    patches = scene.check()
    assert sum(patch.nnz for patch in patches) == scene.nnz
    assert all(np.array_equal(t.bits[t.indices], t.old) for t in scene.tensors)
    scene.put_new()
    assert all(np.array_equal(t.bits[t.indices], t.new) for t in scene.tensors)


def test_staging_from_another_base_is_refused(scene: Scene) -> None:
    scene.tensors[0].bits[scene.tensors[0].indices[0]] ^= 1
    with pytest.raises(ArithmeticError, match="digest"):
        scene.stage()


def test_staging_another_promise_is_refused(scene: Scene) -> None:
    with pytest.raises(ArithmeticError, match="digest"):
        replace(scene, change=StateDigest(1, 2)).stage()


def test_rows_compare_writes_with_bare_ones(scene: Scene) -> None:
    found = {row.name: row for row in apply.rows(apply.measure(scene, rounds=2), scene)}
    assert found[apply.BARE].times_bare == 1.0
    assert found[apply.STAGE].times_bare is None
    assert found[apply.SWAP].times_bare is not None
    assert all(0 < row.best_ns <= row.median_ns for row in found.values())


def test_threads_stage_the_same(scene: Scene) -> None:
    for one, other in zip(scene.stage(), scene.stage(threads=2), strict=True):
        assert one.spec == other.spec
        assert np.array_equal(np.asarray(one.new), np.asarray(other.new))


def test_bytes_are_those_of_the_part_its_streams_and_the_arrays(scene: Scene) -> None:
    counted = apply.count_bytes(scene)
    assert counted.wire == len(scene.data) / scene.nnz
    assert counted.device < 2  # a table row of 64 bytes for every 98 changes; 1.3 at full size
    assert counted.host > counted.wire + 8 + 2 + 2 + 2


def test_main_writes_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {**apply.run(tensors=1, numel=1 << 12, rounds=1, small=3), "missed": []}
    monkeypatch.setattr(apply, "run", lambda: result)
    assert apply.main(json_output=True) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["nnz"] == result["nnz"]
    result["missed"] = [apply.SWAP]
    assert apply.main(json_output=False) == 1
    assert apply.BARE in capsys.readouterr().out
