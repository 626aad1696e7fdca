"""Updates to measure: of bf16 weights by density and learning rate, and of quantised ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from deltachain.types import Bits
from tests.bench.chains import Step, SyntheticChain
from tests.bench.changes import ChangedTensors, changes_of
from tests.bench.limits import CodeLimits, EntropyLimits, code_limits, entropy_limits
from tests.bench.quantised import FP8, INT8, quantised

DENSITIES: Final = (0.0002, 0.0007, 0.0013, 0.007, 0.012, 0.025)
LEARNING_RATES: Final = (1e-6, 3e-6, 1e-5)

QUANTISED_DENSITY: Final = 0.012
"""Density in bf16 of the update that is quantised, and at which speeds of layouts are measured."""

QUANTISED: Final = {FP8: "fp8", INT8: "int8"}

WITHOUT_BASE: Final = "limit without the base"
GIVEN_BASE: Final = "limit given the base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update of one model."""

    label: str
    lr: float
    dtype: str
    old: Mapping[str, Bits]
    changes: ChangedTensors
    limits: Mapping[str, float]
    peers_timed: bool = False


def updates(base: SyntheticChain) -> Iterator[Update]:
    labels = [f"{density:.2%}" for density in DENSITIES]
    labels += [f"lr {lr:.0e}".replace("e-0", "e-") for lr in LEARNING_RATES]
    steps = base.updates(DENSITIES, LEARNING_RATES)
    for label, (lr, step) in zip(labels, steps, strict=True):
        chosen = label == f"{QUANTISED_DENSITY:.2%}"
        yield bf16_update(base, label, lr, step, peers_timed=chosen)
        if chosen:
            yield from quantised_updates(base, lr, step)


def bf16_update(
    base: SyntheticChain, label: str, lr: float, step: Step, *, peers_timed: bool = False
) -> Update:
    return Update(
        label=label,
        lr=lr,
        dtype="BF16",
        old={name: bits for name, (bits, _) in step.items()},
        changes=changes_of(step, base.layout.specs()),
        limits=_named(entropy_limits(step)),
        peers_timed=peers_timed,
    )


def quantised_updates(base: SyntheticChain, lr: float, step: Step) -> Iterator[Update]:
    for dtype, label in QUANTISED.items():
        codes, specs = quantised(step, base.layout.specs(), dtype)
        yield Update(
            label=label,
            lr=lr,
            dtype=dtype,
            old={name: bits for name, (bits, _) in codes.items()},
            changes=changes_of(codes, specs),
            limits=_named(code_limits(codes)),
            peers_timed=True,
        )


def _named(limits: EntropyLimits | CodeLimits) -> dict[str, float]:
    return {WITHOUT_BASE: limits.without_base, GIVEN_BASE: limits.stateless}
