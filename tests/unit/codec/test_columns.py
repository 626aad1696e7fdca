"""Rows that are checked together are refused, and placed, as those that are checked one by one."""

import numpy as np
import pytest

from deltachain.codec import Change, Part, columns, encode_part
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.errors import FormatError
from deltachain.types import StateDigest, TensorSpec
from tests.format.forgeries import FORGERIES, PARTS, forged


def said(data: bytes) -> str:
    try:
        Part.from_bytes(data, key="part").verify()
    except FormatError as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


@pytest.mark.parametrize("name", FORGERIES)
def test_the_same_is_refused_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = said(forged(name))
    monkeypatch.setattr(columns, "FEW", 0)
    assert said(forged(name)) == alone


def placed(data: bytes) -> list[object]:
    found = Part.from_bytes(data).columns
    return [*map(found.placed, found.number), found.ends]


def many() -> bytes:
    """Three hundred small tensors in two widths, with steps and with bits, few and many."""
    rng = np.random.default_rng(0)
    changes = []
    for number in range(300):
        spec = TensorSpec(f"layer.{number}", ("BF16", "F32")[number % 2], (5, 20))
        indices = np.flatnonzero(rng.random(100) < rng.choice([0.0, 0.01, 0.5]))
        values = np.ones(indices.size, spec.bits_dtype)
        kind = ABSOLUTE if number % 3 else STEP
        delta = TensorDelta(spec=spec, indices=indices, values=values, absolute=kind)
        changes.append(Change(delta, StateDigest()))
    return encode_part(changes).data


def test_rows_have_the_same_places_together(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [many(), *PARTS.values()]
    alone = [placed(data) for data in parts]
    monkeypatch.setattr(columns, "FEW", 0)
    assert [placed(data) for data in parts] == alone
