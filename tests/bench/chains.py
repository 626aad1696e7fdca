"""Synthetic chains: bf16 weights under Adam at the learning rates of RL, one pair a step.

Simulated for each element: an fp32 master, the momentum of Adam (beta1 0.9) over a normalised
gradient (the second moment is in its steady state, so gradient scales cancel), and the published
bf16 cast, rounded to nearest even. `SyntheticChain` lists the properties that make the published
bits resemble those of a real run.

Measured at 1.1 % density over five seeds, in brackets what a trained model and an earlier
simulation showed: 1 ULP 90.0 % (88 to 92 %), changed in the step before 21.1 % (about 20 %), of
these in the same direction 85.3 to 87.3 % (85 to 90 %). ``tests/unit/bench`` holds these, the
chance of a flip by old exponent, entropy limits and others' layouts against measurements.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.bridges.dialect import ElementChange
from deltachain.errors import ConfigError
from deltachain.kernels import host
from deltachain.types import Bits, TensorSpec


class TensorChange(ElementChange):
    __slots__ = ()

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def nnz(self) -> int:
        return int(self.indices.size)


ChangedTensors: TypeAlias = Mapping[str, TensorChange]
"""Changes by tensor name, in checkpoint order; a tensor may have none."""


def changes_of(
    step: Mapping[str, tuple[Bits, Bits]], specs: Iterable[TensorSpec]
) -> dict[str, TensorChange]:
    changes = {}
    for spec in specs:
        old, new = step[spec.name]
        indices = np.flatnonzero(old != new)
        changes[spec.name] = TensorChange(spec, indices, old[indices], new[indices])
    return changes


def count(changes: ChangedTensors) -> int:
    return sum(change.nnz for change in changes.values())


def dense_nbytes(changes: ChangedTensors) -> int:
    return sum(change.spec.nbytes for change in changes.values())


EMBEDDING: Final = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def specs(self) -> tuple[TensorSpec, ...]:
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes |= self._layer(f"model.layers.{layer}.")
        shapes["model.norm.weight"] = (self.hidden,)
        return tuple(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs())

    def _layer(self, prefix: str) -> dict[str, tuple[int, ...]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


TINY: Final = ModelLayout(
    hidden=256, intermediate=768, layers=2, heads=2, kv_heads=1, head_dim=128, vocab=2048
)
"""2.1 M elements: enough to exercise code, too few for statistics."""

SMALL: Final = ModelLayout(
    hidden=512, intermediate=1536, layers=4, heads=4, kv_heads=2, head_dim=128, vocab=12288
)
"""18.9 M elements, 38 MB in bf16: the size that the published measurements were taken at."""

LARGE: Final = ModelLayout(
    hidden=1024, intermediate=3072, layers=6, heads=8, kv_heads=4, head_dim=128, vocab=24576
)
"""100.7 M elements, 201 MB in bf16: larger than any cache, for speeds."""


U16: TypeAlias = npt.NDArray[np.uint16]
F32: TypeAlias = npt.NDArray[np.float32]

Step: TypeAlias = Mapping[str, tuple[U16, U16]]
"""Tensor name -> (old, new): bf16 bits, flat, read-only, every element of the tensor."""

BETA1: Final = 0.9

STATIONARY_STD: Final = ((1 - BETA1) / (1 + BETA1)) ** 0.5

BF16_SIGNIFICANT_BITS: Final = 8

SAMPLE_STRIDE: Final = 7

BLOCK: Final = 1 << 17
"""Elements worked on at a time: the arrays of one block stay in a core's second-level cache."""


@dataclass(frozen=True, slots=True)
class SyntheticChain:
    """A training run, given by its seed; every call of `steps` replays it from the start."""

    seed: int = 0
    lr: float = 2.9e-6
    layout: ModelLayout = SMALL
    warmup: int = 4
    weight_std: float = 0.025
    scale_sigma: float = 0.15
    update_scale: float = 0.5
    norm_sigma: float = 0.2
    activity_sigma: float = 0.3
    drift: float = 0.1

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.warmup < 0 or self.seed < 0:
            raise ConfigError(
                f"seed {self.seed}, lr {self.lr}, warmup {self.warmup}: "
                "seed and warmup may not be negative, lr must be positive"
            )

    def steps(self, count: int) -> Iterator[Step]:
        states = self._warm_states()
        bits = {state.spec.name: state.published() for state in states}
        for number in range(self.warmup, self.warmup + count):
            step = {}
            for state in states:
                state.advance(number)
                name = state.spec.name
                step[name] = (bits[name], state.published())
            bits = {name: new for name, (_, new) in step.items()}
            yield step

    def updates(
        self, densities: Sequence[float], lrs: Sequence[float] = ()
    ) -> Iterator[tuple[float, Step]]:
        """Yield the next update at several learning rates, all from one warmed-up state."""
        states = self._warm_states()
        ulps_per_lr = np.concatenate([state.ulps_per_lr() for state in states])
        found = [_learning_rate(ulps_per_lr, density) for density in densities]
        old = {state.spec.name: state.published() for state in states}
        for state in states:
            state.draw(self.warmup)
        for lr in (*found, *lrs):
            yield (
                lr,
                {s.spec.name: (old[s.spec.name], s.published_after(lr)) for s in states},
            )

    def with_density(self, density: float) -> "SyntheticChain":
        """The same run at the learning rate that changes ``density`` of all elements a step.

        Momentum does not depend on the learning rate, and where a master lies between two bf16
        values is uniform, so a step ``d`` changes the published bits with probability
        ``min(1, |d| / ulp)``. The learning rate is found by bisection on the mean of that over
        one warmed-up state; the density of a single step varies around it by a few percent.
        Costs as much as the warm-up of one chain."""
        states = self._warm_states()
        ulps_per_lr = np.concatenate([state.ulps_per_lr() for state in states])
        return replace(self, lr=_learning_rate(ulps_per_lr, density))

    def _warm_states(self) -> "list[_TensorState]":
        states = [_TensorState(self, index, spec) for index, spec in enumerate(self.layout.specs())]
        for number in range(self.warmup):
            for state in states:
                state.advance(number)
        return states


class _TensorState:
    def __init__(self, chain: SyntheticChain, index: int, spec: TensorSpec) -> None:
        self.spec = spec
        self._chain = chain
        self._index = index
        rng = self._rng(0)
        cols = spec.shape[-1]
        rows = spec.numel // cols
        self._master = rng.standard_normal((rows, cols), dtype=np.float32)
        self._scale_weights(rng)
        self._momentum = rng.standard_normal((rows, cols), dtype=np.float32)
        self._momentum *= np.float32(STATIONARY_STD)
        self._row_drift = chain.drift * rng.standard_normal((rows, 1), dtype=np.float32)
        self._col_drift = rng.standard_normal(cols, dtype=np.float32)
        self._touch = _touch_probability(rows) if spec.name == EMBEDDING else np.ones(rows)

    def advance(self, number: int) -> None:
        step_size = np.float32(-self._chain.lr * self._chain.update_scale)
        for block, gradient in self._momenta(number):
            np.multiply(self._momentum[block], step_size, out=gradient)
            self._master[block] += gradient

    def draw(self, number: int) -> None:
        for _ in self._momenta(number):
            pass

    def published_after(self, lr: float) -> U16:
        step_size = np.float32(-lr * self._chain.update_scale)
        bits = np.empty(self._master.shape, np.uint16)
        for block in self._blocks():
            moved = self._master[block] + self._momentum[block] * step_size
            bits[block] = host.cast_bf16(moved.reshape(-1)).reshape(moved.shape)
        flat: U16 = bits.reshape(-1)
        flat.flags.writeable = False
        return flat

    def _momenta(self, number: int) -> Iterator[tuple[slice, F32]]:
        rng = self._rng(number + 1)
        activity = self._activity(rng)
        cols = self._master.shape[1]
        for block in self._blocks():
            gradient = rng.standard_normal((block.stop - block.start, cols), dtype=np.float32)
            gradient += self._row_drift[block] * self._col_drift
            gradient *= activity[block]
            momentum = self._momentum[block]
            momentum *= np.float32(BETA1)
            momentum += gradient
            yield block, gradient

    def _blocks(self) -> Iterator[slice]:
        rows, cols = self._master.shape
        stride = max(1, BLOCK // cols)
        for start in range(0, rows, stride):
            yield slice(start, min(start + stride, rows))

    def published(self) -> U16:
        bits: U16 = host.cast_bf16(self._master.reshape(-1))
        bits.flags.writeable = False
        return bits

    def ulps_per_lr(self) -> F32:
        sample = slice(None, None, SAMPLE_STRIDE)
        momentum = np.abs(self._momentum.reshape(-1)[sample]) * np.float32(self._chain.update_scale)
        _, exponent = np.frexp(self._master.reshape(-1)[sample])
        ulps: F32 = np.ldexp(momentum, BF16_SIGNIFICANT_BITS - exponent)
        return ulps

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self._chain.seed, self._index, stream]))

    def _scale_weights(self, rng: np.random.Generator) -> None:
        sigma = self._chain.scale_sigma
        rows, cols = self._master.shape
        self._master *= self._chain.weight_std
        if len(self.spec.shape) == 1:
            self._master += 1.0
            return
        self._master *= np.exp(sigma * rng.standard_normal((rows, 1), dtype=np.float32))
        self._master *= np.exp(sigma * rng.standard_normal(cols, dtype=np.float32))

    def _activity(self, rng: np.random.Generator) -> F32:
        chain = self._chain
        rows = len(self._touch)
        log_scale = chain.activity_sigma * rng.standard_normal(rows)
        log_scale += chain.norm_sigma * rng.standard_normal()
        mean_square = np.exp(2 * (chain.activity_sigma**2 + chain.norm_sigma**2))
        scale = np.exp(log_scale) * (rng.random(rows) < self._touch)
        scale *= (1 - BETA1) / np.sqrt(mean_square * self._touch)
        return scale.astype(np.float32)[:, np.newaxis]


def _learning_rate(ulps_per_lr: F32, density: float) -> float:
    if not 0 < density <= 0.5:
        raise ConfigError(f"density {density} is not in (0, 0.5]")
    low, high = 1e-12, 1.0
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        reached = float(np.minimum(ulps_per_lr * np.float32(middle), 1).mean(dtype=np.float64))
        low, high = (middle, high) if reached < density else (low, middle)
    return low


def _touch_probability(rows: int) -> npt.NDArray[np.float64]:
    """Chance that one batch has a token of each embedding row: Zipf's law over token ids."""
    return 1.0 - np.exp(-0.15 * rows / np.arange(1, rows + 1))
