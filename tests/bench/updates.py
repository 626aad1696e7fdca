"""Updates to measure: of bf16 weights by density and learning rate, and of quantised ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.errors import ConfigError
from deltachain.types import Bits, TensorSpec
from tests.bench.chains import EMBEDDING, U16, ChangedTensors, Step, SyntheticChain, changes_of


def biased_exponents(bits: U16) -> npt.NDArray[np.uint8]:
    return ((bits >> 7) & 0xFF).astype(np.uint8)


Counts: TypeAlias = npt.NDArray[np.int64]

CLASSES: Final = 16


@dataclass(frozen=True, slots=True)
class EntropyLimits:
    """Limits in bits a change."""

    density: float
    positions: float
    positions_given_exponent: float
    sign: float
    magnitude: float
    magnitude_given_exponent: float

    @property
    def stateless(self) -> float:
        return self.positions_given_exponent + self.sign + self.magnitude_given_exponent

    @property
    def without_base(self) -> float:
        return self.positions + self.sign + self.magnitude


def entropy_limits(step: Step) -> EntropyLimits:
    elements = np.zeros(256, np.int64)
    exponents, moves = [], []
    for old, new in step.values():
        difference = (new - old).view(np.int16)
        changed = np.flatnonzero(difference)
        elements += np.bincount(biased_exponents(old), minlength=256)
        exponents.append(biased_exponents(old[changed]))
        moves.append(difference[changed])
    move = np.concatenate(moves).astype(np.int32)
    if not move.size:
        raise ConfigError("an update that changes nothing has no bits a change")
    lowest = _lowest_class(elements)
    numel = np.bincount(_classes(np.arange(256), lowest), weights=elements, minlength=CLASSES)
    kind = _classes(np.concatenate(exponents), lowest)
    changes = np.bincount(kind, minlength=CLASSES)
    magnitude = np.abs(move)
    return EntropyLimits(
        density=move.size / float(elements.sum()),
        positions=_position_bits(changes.sum(keepdims=True), numel.sum(keepdims=True)) / move.size,
        positions_given_exponent=_position_bits(changes, numel) / move.size,
        sign=_symbol_bits(np.bincount(move > 0)) / move.size,
        magnitude=_symbol_bits(np.bincount(magnitude)) / move.size,
        magnitude_given_exponent=sum(
            _symbol_bits(np.bincount(magnitude[kind == one])) for one in range(CLASSES)
        )
        / move.size,
    )


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Limits of updates of 8-bit codes, in bits a changed code."""

    density: float
    positions: float
    positions_given_code: float
    move: float
    move_given_code: float

    @property
    def stateless(self) -> float:
        return self.positions_given_code + self.move_given_code

    @property
    def without_base(self) -> float:
        return self.positions + self.move


def code_limits(step: Mapping[str, tuple[Bits, Bits]]) -> CodeLimits:
    numel = np.zeros(256, np.int64)
    moved = np.zeros((256, 256), np.int64)
    for old, new in step.values():
        if old.itemsize == 1:
            numel += np.bincount(old, minlength=256)
            changed = np.flatnonzero(old != new)
            pair = old[changed].astype(np.int64) << 8 | (new[changed] - old[changed])
            moved += np.bincount(pair, minlength=1 << 16).reshape(256, 256)
    changes = moved.sum(1)
    total = int(changes.sum())
    if not total:
        raise ConfigError("an update that changes nothing has no bits a change")
    return CodeLimits(
        density=total / float(numel.sum()),
        positions=_position_bits(changes.sum(keepdims=True), numel.sum(keepdims=True)) / total,
        positions_given_code=_position_bits(changes, numel) / total,
        move=_symbol_bits(moved.sum(0)) / total,
        move_given_code=sum(map(_symbol_bits, moved)) / total,
    )


def _lowest_class(elements: Counts) -> int:
    """Biased exponent of class 0, so that 0.1 % of the elements lie above the last but one."""
    top = int(np.searchsorted(np.cumsum(elements), 0.999 * elements.sum()))
    return max(0, top - (CLASSES - 2))


def _classes(exponents: npt.NDArray[Any], lowest: int) -> npt.NDArray[np.int64]:
    return np.clip(exponents.astype(np.int64) - lowest, 0, CLASSES - 1)


def _position_bits(changes: npt.NDArray[Any], numel: npt.NDArray[Any]) -> float:
    """Bits that say which elements of each class changed: the sum of ``n H(k / n)``."""
    stays = numel - changes
    return float(_plogp(numel) - _plogp(changes) - _plogp(stays))


def _symbol_bits(counts: Counts) -> float:
    return float(_plogp(counts.sum(keepdims=True)) - _plogp(counts))


def _plogp(counts: npt.NDArray[Any]) -> float:
    positive = counts[counts > 0].astype(np.float64)
    return float(np.sum(positive * np.log2(positive)))


FP8: Final = "F8_E4M3"
INT8: Final = "I8"

BLOCK: Final = 128

FP8_MAX: Final = 448.0
INT8_MAX: Final = 127.0

QuantisedStep: TypeAlias = Mapping[str, tuple[Bits, Bits]]

Quantise: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Weight, bf16 [rows, columns] -> codes of the same shape, and float32 scales."""


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Fp8 e4m3 with a float32 scale a block of 128 x 128, as DeepSeek's checkpoints."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = _scales(blocks.abs().amax((1, 3), keepdim=True), FP8_MAX)
    codes = (blocks / scales).clamp_(-FP8_MAX, FP8_MAX).reshape(padded.shape)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn), scales[:, 0, :, 0]


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 with a float32 scale a row, as compressed-tensors' W8A8."""
    values = weight.float()
    scales = _scales(values.abs().amax(1, keepdim=True), INT8_MAX)
    codes = (values / scales).round_().clamp_(-INT8_MAX - 1, INT8_MAX)
    return codes.to(torch.int8), scales


SCHEMES: Final[dict[str, tuple[Quantise, str]]] = {
    FP8: (fp8_blocks, "_scale_inv"),
    INT8: (int8_rows, "_scale"),
}


def quantised(
    step: Step, specs: Iterable[TensorSpec], dtype: str
) -> tuple[QuantisedStep, list[TensorSpec]]:
    quantise, suffix = SCHEMES[dtype]
    out: dict[str, tuple[Bits, Bits]] = {}
    found: list[TensorSpec] = []
    for spec in specs:
        if len(spec.shape) != 2 or spec.name == EMBEDDING:
            continue
        old, new = (quantise(_weight(bits, spec.shape)) for bits in step[spec.name])
        out[spec.name] = (_bits(old[0], np.uint8), _bits(new[0], np.uint8))
        out[spec.name + suffix] = (_bits(old[1], np.uint32), _bits(new[1], np.uint32))
        found.append(TensorSpec(spec.name, dtype, spec.shape))
        found.append(TensorSpec(spec.name + suffix, "F32", tuple(old[1].shape)))
    return out, found


def _scales(amax: Tensor, largest: float) -> Tensor:
    return torch.where(amax > 0, amax / largest, torch.ones_like(amax))


def _weight(bits: Bits, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).reshape(shape)


def _bits(tensor: Tensor, dtype: type[np.unsignedinteger]) -> Bits:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1).view(dtype)


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
