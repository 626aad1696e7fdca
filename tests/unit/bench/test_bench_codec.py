import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from rich.console import Console

from deltachain.delta import TensorDelta
from tests.bench import codec, codec_tables, updates
from tests.bench.chains import Step, SyntheticChain
from tests.bench.changes import ChangedTensors, changes_of
from tests.bench.codec_rows import ChainRow, EncodingRow, LayoutRow
from tests.bench.layouts.registry import LAYOUTS
from tests.bench.shapes import TINY
from tests.bench.updates import Update

BASE = SyntheticChain(seed=3, layout=TINY, warmup=1)

Result: TypeAlias = tuple[list[ChainRow], Mapping[str, Any]]


@pytest.fixture(scope="module")
def step() -> Step:
    return next(BASE.steps(1))


@pytest.fixture(scope="module")
def update(step: Step) -> ChangedTensors:
    return changes_of(step, TINY.specs())


@pytest.fixture(scope="module")
def old(step: Step) -> codec.Old:
    return {name: bits for name, (bits, _) in step.items()}


def few(base: SyntheticChain) -> Iterator[Update]:
    (slow, old), (fast, new) = base.updates((), (base.lr, 1e-5))
    yield updates.bf16_update(base, "slow", slow, old)
    yield updates.bf16_update(base, "fast", fast, new, peers_timed=True)
    yield from updates.quantised_updates(base, fast, new)


@pytest.fixture(scope="module")
def result() -> Result:
    return codec.run(BASE, few, rounds=1)


def test_rows_count_every_byte_and_name_every_layout(result: Result) -> None:
    rows, document = result
    assert [row.label for row in rows] == ["slow", "fast", "fp8", "int8"]
    for row in rows[:2]:
        assert row.numel == TINY.numel
        assert row.layouts.keys() == LAYOUTS.keys()
    for row in rows:
        assert row.density == row.nnz / row.numel
        assert [e.encoding for e in row.encodings] == list(codec.ENCODINGS)
        wire = [e.nbytes + row.manifest_nbytes for e in row.encodings]
        assert [e.bits for e in row.encodings] == [8 * nbytes / row.nnz for nbytes in wire]
        assert row.full_copy.nbytes == row.dense_nbytes
        limits = row.limits
        assert limits["limit given the base"] < limits["limit without the base"]
        assert row.encodings[0].bits > limits["limit given the base"]
    assert rows[0].density < rows[1].density
    parsed = json.loads(json.dumps(document, allow_nan=False))
    assert parsed["benchmark"] == "codec"
    assert parsed["rows"][0]["encodings"][0]["encoding"] == "step"


def test_speeds_of_layouts_are_measured_where_asked_for(result: Result) -> None:
    slow, fast, fp8, int8 = result[0]
    assert [row.timed for row in (slow, fast, fp8, int8)] == [False, True, True, True]
    assert all(row.encode_ns is None for row in slow.layouts.values())
    assert all(row.encode_ns and row.decode_ns for row in fast.layouts.values())


def test_quantised_updates_have_fewer_changes_in_codes_and_scales() -> None:
    _, bf16, fp8, int8 = few(BASE)
    assert [one.dtype for one in (bf16, fp8, int8)] == ["BF16", "F8_E4M3", "I8"]
    for one, suffix in ((fp8, "_scale_inv"), (int8, "_scale")):
        codes = {name for name in one.changes if not name.endswith(suffix)}
        assert {name + suffix for name in codes} == one.changes.keys() - codes
        for name in codes:
            assert one.changes[name].spec.dtype == one.dtype
            assert one.changes[name].nnz < bf16.changes[name].nnz / 4
        # Codes only, and not the embedding: what such checkpoints leave in bf16.
        assert "model.embed_tokens.weight" not in codes
        assert not any("norm" in name for name in codes)


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_every_encoding_decodes_to_the_update(
    update: ChangedTensors, old: codec.Old, encoding: str
) -> None:
    part = codec.encode(update, old, encoding)
    assert part.encodings == (encoding,)
    deltas = codec.decode(part.data, old)
    codec.check(update, deltas)


def test_check_sees_one_wrong_bit_and_a_missing_tensor(
    update: ChangedTensors, old: codec.Old
) -> None:
    first, *others = codec.decode(codec.encode(update, old, "overwrite").data, old)
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


def test_a_manifest_does_not_grow_with_the_part(update: ChangedTensors, old: codec.Old) -> None:
    few = codec.encode(update, old, "step")
    many = codec.encode(update, old, "raw")
    sizes = [codec.manifest_nbytes(part, TINY.numel) for part in (few, many)]
    assert abs(sizes[0] - sizes[1]) < 200
    assert 1_000 < sizes[0] < 10_000


def test_aims_are_judged_at_the_density_they_are_set_for() -> None:
    def row(density: float, step: float, dtype: str = "BF16") -> ChainRow:
        encoding = EncodingRow(
            encoding="step",
            nbytes=0,
            bits=step,
            encode_gb_per_s=0,
            decode_gb_per_s=0,
            encode_ns=0,
            decode_ns=0,
        )
        return ChainRow(
            label="",
            lr=1e-6,
            dtype=dtype,
            density=density,
            numel=0,
            nnz=0,
            dense_nbytes=0,
            manifest_nbytes=0,
            encodings=[encoding],
            layouts={},
            full_copy=LayoutRow(layout="", nbytes=0, bits=0, encode_ns=None, decode_ns=None),
            limits={},
        )

    assert codec.missed([row(0.0013, 14.0), row(0.0121, 9.9)]) == []
    assert codec.missed([row(0.0013, 9.0), row(0.0121, 10.1)]) == ["step"]
    assert codec.missed([row(0.0121, 9.9), row(0.0120, 15.0, "F8_E4M3")]) == []


def test_main_writes_one_object_or_tables(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: Result,
) -> None:
    monkeypatch.setattr(codec, "run", lambda _: result)
    codec.main(json_output=True)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["missed"] == result[1]["missed"]
    codec.main(json_output=False)
    table = capsys.readouterr().out
    assert all(name in table for name in (*LAYOUTS, "deltachain step", "slow", "fast"))


def test_tables_fit_into_80_columns(result: Result) -> None:
    rows, _ = result
    console = Console(width=80, record=True, file=io.StringIO())
    for table in codec_tables.tables(rows):
        assert console.measure(table).minimum <= 80
        console.print(table)
    lines = console.export_text().splitlines()
    for name in LAYOUTS:
        assert sum(line.startswith(f"{name}  ") for line in lines) >= 2


def test_updates_differ_in_density_in_learning_rate_and_in_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updates, "DENSITIES", (0.0007, 0.012))
    found = {update.label: update for update in updates.updates(BASE)}
    assert list(found) == ["0.07%", "1.20%", "fp8", "int8", "lr 1e-6", "lr 3e-6", "lr 1e-5"]
    assert found["1.20%"].lr not in updates.LEARNING_RATES
    assert np.isclose(found["lr 1e-5"].lr, 1e-5)
    assert [name for name, update in found.items() if update.peers_timed] == list(found)[1:4]


def test_limits_are_those_of_the_codes() -> None:
    _, _, fp8, _ = few(BASE)
    codes = [change for name, change in fp8.changes.items() if not name.endswith("_inv")]
    numel, nnz = (sum(getattr(one, field) for one in codes) for field in ("numel", "nnz"))
    share = nnz / numel
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    # One more bit at least: where a code moves to is its sign and how far.
    assert fp8.limits["limit without the base"] > entropy / share + 0.99
