"""Recipes of transformers' fine-grained fp8: the checkpoints of DeepSeek and Qwen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from deltachain.publish.quantise.recipe import Arithmetic, Margins, Recipe, Stored

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY: Final = "transformers"

BLOCK: Final = (128, 128)  # rows and columns of a block

OUTPUT: Final = ("lm_head",)  # layers that are left where a configuration names none

LARGEST: Final = 448.0  # largest number of fp8 e4m3

SMALLEST: Final = 2.0**-9  # smallest positive number of fp8 e4m3

_WEIGHT: Final = "layer.weight"
_SCALES: Final = "layer.weight_scale_inv"


@dataclass(frozen=True, slots=True)
class _Blocks:
    scale_fmt: str

    def quantised(self, block: tuple[int, int], weight: Tensor) -> dict[str, Tensor]:
        from transformers import FineGrainedFP8Config  # noqa: PLC0415 - takes seconds
        from transformers.integrations.finegrained_fp8 import Fp8Quantize  # noqa: PLC0415

        config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=self.scale_fmt)
        quantise: Any = Fp8Quantize(SimpleNamespace(quantization_config=config))
        found: dict[str, Tensor] = quantise.convert({_WEIGHT: weight})
        return found

    def scales(self, amax: Tensor, global_scale: Tensor | None = None) -> Tensor:
        del global_scale
        return self.quantised((1, 1), amax)[_SCALES]

    def codes(
        self, weight: Tensor, amax: Tensor, margins: Margins, global_scale: Tensor | None = None
    ) -> Tensor:
        """Return the codes of a piece of a weight.

        The library computes scales itself, of whole blocks: what a piece lacks is filled with zeros
        and, once a block, with its largest magnitude.
        """
        del global_scale
        if not any(margins):
            return self.quantised(BLOCK, weight)[_WEIGHT]
        above, below, left, right = margins
        (rows, columns), (height, width) = weight.shape, BLOCK
        filled = weight.new_zeros((above + rows + below, left + columns + right))
        filled[above : above + rows, left : left + columns] = weight
        if above:
            filled[0, ::width] = amax[0]
        if below:
            filled[-1, ::width] = amax[-1]
        if left:
            filled[::height, 0] = amax[:, 0]
        if right:
            filled[::height, -1] = amax[:, -1]
        codes = self.quantised(BLOCK, filled)[_WEIGHT]
        return codes[above : above + rows, left : left + columns]

    def factors(self, amax: Tensor, scales: Tensor) -> Tensor:
        """Return what the library multiplies by: not quite the inverse of an fp32 scale."""
        if self.scale_fmt == "ue8m0":
            return 1.0 / scales.float()
        largest = amax.float()
        return (LARGEST / largest).masked_fill_(largest == 0, 1.0)

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        from transformers import FineGrainedFP8Config  # noqa: PLC0415

        config = FineGrainedFP8Config(
            weight_block_size=BLOCK, modules_to_not_convert=list(ignored), scale_fmt=self.scale_fmt
        )
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": config.activation_scheme,
            "weight_block_size": list(config.weight_block_size),
            "modules_to_not_convert": config.modules_to_not_convert,
            **({} if self.scale_fmt == "float" else {"scale_fmt": self.scale_fmt}),
        }

    def ignored(self, config: Mapping[str, Any]) -> tuple[str, ...] | None:
        """Return the layers that a configuration leaves, if it has these blocks and scales.

        An entry is a regular expression that matches up to the end of a module's name, or the end
        of a layer's name. Without entries, the output layer is left.
        """
        said = {"fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": None, **config}
        known = (said["fmt"], said["activation_scheme"], said["scale_fmt"] or "float")
        if said.get("quant_method") != "fp8" or said.get("weight_block_size") != list(BLOCK):
            return None
        if known != ("e4m3", "dynamic", self.scale_fmt):
            return None
        entries = config.get("modules_to_not_convert", config.get("ignored_layers"))
        if entries is None:
            return OUTPUT
        if not isinstance(entries, list) or not all(isinstance(one, str) for one in entries):
            return None
        return tuple(rf"re:(?:{one})(?:(?<=\.)|(?=\.|$))|.*{re.escape(one)}$" for one in entries)


def _arithmetic(scale_fmt: str) -> Arithmetic:
    blocks = _Blocks(scale_fmt)
    return Arithmetic(
        scales=blocks.scales,
        codes=blocks.codes,
        factors=blocks.factors,
        rounding="fp8-multiply",
        config=blocks.config,
        ignored=blocks.ignored,
    )


FP8_BLOCK: Final = Recipe(
    name="fp8-block",
    library=LIBRARY,
    codes=Stored("weight", "F8_E4M3"),
    scales=Stored("weight_scale_inv", "F32", BLOCK),
    smallest=SMALLEST,
    arithmetic=_arithmetic("float"),
)
"""fp8 weights with an fp32 scale a block of 128 by 128, as DeepSeek-V3 and Qwen3 have them."""

FP8_BLOCK_UE8M0: Final = Recipe(
    name="fp8-block-ue8m0",
    library=LIBRARY,
    codes=Stored("weight", "F8_E4M3"),
    scales=Stored("weight_scale_inv", "F8_E8M0", BLOCK),
    smallest=SMALLEST,
    arithmetic=_arithmetic("ue8m0"),
)
"""The same with scales that are powers of two, of 8 bits."""
