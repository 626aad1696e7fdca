from dataclasses import replace

import pytest

from deltachain.delta import TensorDelta
from tests.bench import codec
from tests.bench.chains import Step, SyntheticChain
from tests.bench.changes import ChangedTensors, changes_of
from tests.bench.shapes import TINY

BASE = SyntheticChain(seed=3, layout=TINY, warmup=1)


@pytest.fixture(scope="module")
def step() -> Step:
    return next(BASE.steps(1))


@pytest.fixture(scope="module")
def update(step: Step) -> ChangedTensors:
    return changes_of(step, TINY.specs())


@pytest.fixture(scope="module")
def old(step: Step) -> codec.Old:
    return {name: bits for name, (bits, _) in step.items()}


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
