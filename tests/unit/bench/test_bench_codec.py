import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deltachain.bench import codec
from deltachain.bench.chains import SyntheticChain
from deltachain.bench.layouts import LAYOUTS, ChangedTensors, changes_of
from deltachain.bench.shapes import TINY
from deltachain.delta import TensorDelta

BASE = SyntheticChain(seed=3, layout=TINY, warmup=1)
SPECS = {spec.name: spec for spec in TINY.specs()}


@pytest.fixture(scope="module")
def update() -> ChangedTensors:
    return changes_of(next(BASE.steps(1)))


def two(base: SyntheticChain) -> Iterator[tuple[str, SyntheticChain]]:
    yield "slow", base
    yield "fast", replace(base, lr=1e-5)


def test_rows_count_every_byte_and_name_every_layout() -> None:
    rows, document = codec.run(BASE, two, rounds=1)
    assert [row.label for row in rows] == ["slow", "fast"]
    for row in rows:
        assert row.numel == TINY.numel
        assert row.density == row.nnz / row.numel
        assert row.layouts.keys() == LAYOUTS.keys()
        assert [e.encoding for e in row.encodings] == list(codec.ENCODINGS)
        wire = [e.nbytes + row.manifest_nbytes for e in row.encodings]
        assert [e.bits for e in row.encodings] == [8 * nbytes / row.nnz for nbytes in wire]
        limits = row.limits
        assert limits["limit given the base"] < limits["limit without the base"]
        assert row.encodings[0].bits > limits["limit given the base"]
    assert rows[0].density < rows[1].density
    parsed = json.loads(json.dumps(document, allow_nan=False))
    assert parsed["benchmark"] == "codec"
    assert parsed["rows"][0]["encodings"][0]["encoding"] == "step"


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_every_encoding_decodes_to_the_update(update: ChangedTensors, encoding: str) -> None:
    deltas = codec.decode(codec.encode(SPECS, update, encoding).data)
    codec.check(update, deltas)


def test_check_sees_one_wrong_bit_and_a_missing_tensor(update: ChangedTensors) -> None:
    first, *others = codec.decode(codec.encode(SPECS, update, "overwrite").data)
    values = first.values.copy()
    values[-1] ^= 1
    wrong = replace(first, values=values)
    with pytest.raises(ArithmeticError, match="does not decode"):
        codec.check(update, [wrong, *others])
    moved = first.indices
    assert moved is not None
    shorter = TensorDelta(
        spec=first.spec,
        indices=moved[1:],
        values=first.values[1:],
        absolute=first.absolute,
    )
    with pytest.raises(ArithmeticError, match="does not decode"):
        codec.check(update, [shorter, *others])
    with pytest.raises(ArithmeticError, match="not decoded"):
        codec.check(update, others)


def test_a_manifest_does_not_grow_with_the_part(update: ChangedTensors) -> None:
    few = codec.encode(SPECS, update, "step")
    many = codec.encode(SPECS, update, "raw")
    sizes = [codec.manifest_nbytes(part, TINY.numel) for part in (few, many)]
    assert abs(sizes[0] - sizes[1]) < 200
    assert 1_000 < sizes[0] < 10_000


def test_aims_are_judged_at_the_density_they_are_set_for() -> None:
    def row(density: float, step: float) -> codec.ChainRow:
        encoding = codec.EncodingRow(
            encoding="step",
            nbytes=0,
            bits=step,
            encode_gb_per_s=0,
            decode_gb_per_s=0,
            encode_ns=0,
            decode_ns=0,
        )
        return codec.ChainRow(
            label="",
            lr=1e-6,
            density=density,
            numel=0,
            nnz=0,
            manifest_nbytes=0,
            encodings=[encoding],
            layouts={},
            limits={},
        )

    assert codec.missed([row(0.0013, 14.0), row(0.0121, 9.9)]) == []
    assert codec.missed([row(0.0013, 9.0), row(0.0121, 10.1)]) == ["step"]


def test_main_writes_one_object_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    result = codec.run(BASE, two, rounds=1)
    monkeypatch.setattr(codec, "run", lambda _: result)
    picture = tmp_path / "sizes.png"
    codec.main(json_output=True, plot=picture)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["missed"] == result[1]["missed"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    codec.main(json_output=False)
    table = capsys.readouterr().out
    assert all(name in table for name in (*LAYOUTS, "deltachain step", "slow", "fast"))


def test_chains_differ_in_density_and_in_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "DENSITIES", (0.01,))
    found = dict(codec.chains(BASE))
    assert list(found) == ["at 1.00%", "lr 1e-06", "lr 3e-06", "lr 1e-05"]
    assert found["at 1.00%"].lr not in codec.LEARNING_RATES
    assert np.isclose(found["lr 1e-05"].lr, 1e-5)
