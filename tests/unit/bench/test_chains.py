from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.bench.chains import SMALL, TINY, U16, Step, SyntheticChain
from tests.bench.updates import (
    EntropyLimits,
    biased_exponents,
    code_limits,
    entropy_limits,
    fp8_blocks,
    int8_rows,
)

pytestmark = pytest.mark.full

# Bits a change measured at 1.25 % density on a synthetic chain of 52 M elements, and at 1.07 % on a
# trained model of 18 M: ours, at 1.2 %, has to lie near both.
PUBLISHED = {
    "positions": (7.76, 7.99),
    "positions_given_exponent": (5.23, 5.37),
    "sign": (1.0, 1.0),
    "magnitude": (0.81, 0.81),
    "magnitude_given_exponent": (0.44, 0.45),
    "stateless": (6.68, 6.80),
}


@pytest.fixture(scope="module")
def limits(steps: list[Step]) -> EntropyLimits:
    return entropy_limits(steps[-1])


@pytest.mark.parametrize("term", PUBLISHED)
def test_terms_are_those_measured_on_real_updates(limits: EntropyLimits, term: str) -> None:
    low, high = PUBLISHED[term]
    # 3 %: what remains between chains of one density is how their weights spread over binades.
    assert low * 0.97 <= getattr(limits, term) <= high * 1.03


def test_a_fair_coin_for_each_element_costs_two_bits_a_change() -> None:
    old = np.full(1000, 0x3F80, np.uint16)
    new = old.copy()
    new[::4] += 1
    new[2::4] -= 1
    limits = entropy_limits({"w": (old, new)})
    assert limits.density == 0.5
    assert limits.positions == limits.positions_given_exponent == pytest.approx(2.0)
    assert limits.sign == pytest.approx(1.0)
    assert limits.magnitude == limits.magnitude_given_exponent == 0.0


def test_an_exponent_that_tells_all_leaves_nothing_to_say() -> None:
    old = np.repeat(np.array([0x3F80, 0x3C00], np.uint16), 500)
    new = old.copy()
    new[:500] += 3
    new[:250] -= 6
    new[500:] += 1
    limits = entropy_limits({"w": (old[:600], np.concatenate([new[:500], old[500:600]]))})
    assert limits.positions > 0.5
    assert limits.positions_given_exponent == pytest.approx(0.0)
    assert limits.stateless == pytest.approx(1.0)


def test_codes_that_tell_all_leave_nothing_to_say_and_moves_are_counted_given_them() -> None:
    old = np.repeat(np.array([3, 200], np.uint8), 512)
    new = old.copy()
    new[:512] += 1
    limits = code_limits({"codes": (old, new), "scales": (np.zeros(2, np.uint32),) * 2})
    assert (limits.density, limits.move) == (0.5, 0.0)
    assert limits.positions == limits.without_base == pytest.approx(2.0)
    assert limits.stateless == pytest.approx(0.0)
    new[256:512] -= 1
    new[512:768] -= 1
    limits = code_limits({"codes": (old, new)})
    assert limits.positions == limits.positions_given_code == pytest.approx(2.0)
    assert (limits.move, limits.move_given_code) == pytest.approx((1.0, 0.0))


def weight(rows: int, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, cols, generator=generator).mul_(0.02).to(torch.bfloat16)


def test_fp8_blocks_come_back_within_half_a_step() -> None:
    exact = weight(256, 384)
    codes, scales = fp8_blocks(exact)
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, exact.shape)
    assert (scales.dtype, tuple(scales.shape)) == (torch.float32, (2, 3))
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    # Three mantissa bits: a sixteenth of the value, or half of the smallest step (2 ** -9).
    allowed = torch.maximum(exact.float().abs() / 16, spread * 2**-10) * 1.001
    assert torch.all((codes.float() * spread - exact.float()).abs() <= allowed)
    largest = codes.float().abs().reshape(2, 128, 3, 128).amax((1, 3))
    assert torch.all(largest == 448)
    exact = weight(100, 200)  # the last blocks may be smaller
    whole = torch.zeros(128, 256, dtype=torch.bfloat16)
    whole[:100, :200] = exact
    codes, scales = fp8_blocks(exact)
    expected, same = fp8_blocks(whole)
    assert torch.equal(codes.view(torch.uint8), expected[:100, :200].view(torch.uint8))
    assert torch.equal(scales, same)
    assert (tuple(codes.shape), tuple(scales.shape)) == ((100, 200), (1, 2))


def test_int8_rows_come_back_within_half_a_step() -> None:
    exact = weight(5, 77)
    codes, scales = int8_rows(exact)
    assert (codes.dtype, tuple(scales.shape)) == (torch.int8, (5, 1))
    assert torch.all((codes.float() * scales - exact.float()).abs() <= scales * 0.5001)
    assert torch.all(codes.abs().amax(1) == 127)


CHAIN = SyntheticChain(seed=3, layout=TINY, warmup=1)

# Chance that an element flips and share of flips by one unit, by old exponent: measured on a chain
# of 52 M elements whose statistics were held against those of a trained model, at 1.25 % density.
PUBLISHED_FLIPS = {
    -16: (0.89, 0.28),
    -15: (0.76, 0.52),
    -14: (0.56, 0.83),
    -13: (0.33, 0.987),
    -8: (0.0104, 1.0),
    -7: (0.0052, 1.0),
    -6: (0.0026, 1.0),
}


def moved(step: Step) -> tuple[U16, npt.NDArray[np.int32]]:
    """Old bits of all elements, and by how many units in the last place each changed."""
    old, new = (np.concatenate(side) for side in zip(*step.values(), strict=True))
    return old, (new - old).view(np.int16).astype(np.int32)


def density_of(steps: Iterable[Step]) -> float:
    return float(np.mean([np.mean(moved(step)[1] != 0) for step in steps]))


def test_statistics_are_those_of_a_real_run(steps: list[Step]) -> None:
    weights = np.sort(moved(steps[0])[0] & 0x7FFF)  # magnitudes of bf16 order as their bits do
    middle = weights[weights.size // 2 : weights.size // 2 + 1].astype(np.uint32) << 16
    assert 0.010 <= middle.view(np.float32)[0] <= 0.018
    moves = np.array([moved(step)[1] for step in steps])
    sizes = np.abs(moves[moves != 0])
    assert 0.010 <= density_of(steps) <= 0.013
    assert 0.88 <= np.mean(sizes == 1) <= 0.92
    assert 0.92 <= np.mean(sizes <= 2) <= 0.96
    before, now = moves[:-1][moves[1:] != 0], moves[1:][moves[1:] != 0]
    assert 0.18 <= np.mean(before != 0) <= 0.24
    assert 0.85 <= np.mean((before > 0) == (now > 0), where=before != 0) <= 0.90


def test_flips_by_old_exponent_have_the_published_shape(steps: list[Step]) -> None:
    old, moves = (np.concatenate(side) for side in zip(*map(moved, steps), strict=True))
    exponents = biased_exponents(old).astype(int) - 127
    for exponent, (probability, ulp1) in PUBLISHED_FLIPS.items():
        found = moves[exponents == exponent]
        # Our chain is at 1.2 %, which alone lowers the chances by 4 %; a class of tiny weights has
        # a few hundred to a few thousand elements.
        assert np.mean(found != 0) == pytest.approx(probability, rel=0.15)
        assert np.mean(np.abs(found[found != 0]) == 1) == pytest.approx(ulp1, abs=0.08)


def test_embedding_rows_are_touched_unevenly(steps: list[Step]) -> None:
    def dispersion(name: str) -> float:
        old, new = steps[0][name]
        flips = np.count_nonzero((old != new).reshape(-1, SMALL.hidden), axis=1)
        return float(np.var(flips) / np.mean(flips))

    mlp = dispersion("model.layers.0.mlp.up_proj.weight")
    assert dispersion("model.embed_tokens.weight") > 1.5 * mlp


@pytest.mark.parametrize("density", [0.0013, 0.012, 0.035])
def test_a_density_asked_for_is_reached(density: float) -> None:
    chain = SyntheticChain(seed=5, layout=TINY).with_density(density)
    # Within 10 %: the norm of the gradient fluctuates from step to step.
    assert density_of(chain.steps(3)) == pytest.approx(density, rel=0.1)


def test_updates_at_the_learning_rate_of_the_chain_are_its_first_step() -> None:
    (step,) = CHAIN.steps(1)
    ((lr, update), (_, faster)) = CHAIN.updates((), (CHAIN.lr, 10 * CHAIN.lr))
    assert lr == CHAIN.lr
    for name, (old, new) in update.items():
        np.testing.assert_array_equal(old, step[name][0])
        np.testing.assert_array_equal(new, step[name][1])
        np.testing.assert_array_equal(old, faster[name][0])
        assert not new.flags.writeable


def test_updates_reach_the_densities_asked_for() -> None:
    base = SyntheticChain(seed=5, layout=TINY)
    (rare_lr, rare), (lr, update) = base.updates((0.0007, 0.012))
    assert lr == pytest.approx(base.with_density(0.012).lr)
    assert rare_lr < lr
    assert density_of([rare]) == pytest.approx(0.0007, rel=0.1)
    assert density_of([update]) == pytest.approx(0.012, rel=0.1)
