"""Tensor names and shapes of the simulated models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deltachain.types import TensorSpec

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
