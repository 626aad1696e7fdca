"""Recipes of compressed-tensors: the checkpoints of LLM Compressor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from deltachain.publish.quantise.finegrained import SMALLEST
from deltachain.publish.quantise.recipe import Arithmetic, Margins, Recipe, Rounding, Stored

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme
    from torch import Tensor


LIBRARY: Final = "compressed-tensors"


BESIDE: Final = ("kv_cache_scheme", "sparsity_config", "transform_config")
"""What a configuration may ask for beside codes and scales, and no recipe makes."""

GLOBAL: Final = "weight_global_scale"  # name of the global scale in a layer


@dataclass(frozen=True, slots=True)
class _Preset:
    """A scheme of the library, with another strategy for its weights unless empty."""

    name: str
    strategy: str

    @property
    def scheme(self) -> QuantizationScheme:
        return _scheme(self.name, self.strategy)

    def parameters(self, amax: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return scales as floating point numbers, and zero points, of 0."""
        from compressed_tensors.quantization.utils import calculate_qparams  # noqa: PLC0415

        args = self.scheme.weights
        found: tuple[Tensor, Tensor] = calculate_qparams(-amax, amax, args, global_scale)
        return found[0].view(amax.shape), found[1].view(amax.shape)

    def scales(self, amax: Tensor, global_scale: Tensor | None = None) -> Tensor:
        import torch  # noqa: PLC0415

        scales, kind = self.parameters(amax, global_scale)[0], self.scheme.weights.scale_dtype
        if kind != torch.uint8:
            return scales if kind is None else scales.to(kind)
        from compressed_tensors.compressors.mx_utils import compress_mx_scale  # noqa: PLC0415

        exponents: Tensor = compress_mx_scale(scales, kind)
        return exponents

    def multipliers(
        self, amax: Tensor, scales: Tensor, global_scale: Tensor | None = None
    ) -> Tensor:
        del scales
        found = self.parameters(amax, global_scale)[0].float()
        return found if global_scale is None else found / global_scale

    def codes(
        self, weight: Tensor, amax: Tensor, margins: Margins, global_scale: Tensor | None = None
    ) -> Tensor:
        """Return the codes of a piece of a weight, filled up with zeros to whole blocks."""
        from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415

        above, below, left, right = margins
        rows, columns = weight.shape
        if any(margins):
            filled = weight.new_zeros((above + rows + below, left + columns + right))
            filled[above : above + rows, left : left + columns] = weight
            weight = filled
        scales, zeros = self.parameters(amax, global_scale)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        if global_scale is not None:
            state[GLOBAL] = global_scale
        compressor: Any = BaseCompressor.get_value_from_registry(self.scheme.format)
        made: dict[str, Tensor] = compressor.compress(state, self.scheme)
        codes = made["weight_packed"] if "weight_packed" in made else made["weight"]
        packed = weight.shape[1] // codes.shape[1]
        return codes[above : above + rows, left // packed : (left + columns) // packed]

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        from compressed_tensors import quantization  # noqa: PLC0415

        config = quantization.QuantizationConfig(
            config_groups={"group_0": self.scheme},
            format=self.scheme.format,
            quantization_status=quantization.QuantizationStatus.COMPRESSED,
            ignore=list(ignored),
        )
        dumped: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
        return dumped

    def ignored(self, config: Mapping[str, Any]) -> tuple[str, ...] | None:
        from compressed_tensors.quantization import QuantizationConfig  # noqa: PLC0415

        if config.get("quant_method") != LIBRARY or any(config.get(name) for name in BESIDE):
            return None
        try:
            found = QuantizationConfig.model_validate(dict(config))
        except (ValueError, KeyError):  # pydantic's errors are such
            return None
        schemes = list(found.config_groups.values())
        if len(schemes) != 1 or list(schemes[0].targets) != ["Linear"]:
            return None
        if schemes[0].output_activations or found.format != self.scheme.format:
            return None
        if _essence(schemes[0]) != _essence(self.scheme):
            return None
        entries = found.ignore or ()
        return tuple(one if one.startswith("re:") else f"re:{re.escape(one)}$" for one in entries)


@cache
def _scheme(preset: str, strategy: str) -> QuantizationScheme:
    from compressed_tensors import quantization  # noqa: PLC0415 - slow
    from compressed_tensors.compressors.format import infer_module_format  # noqa: PLC0415
    from torch.nn import Linear  # noqa: PLC0415

    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    changed = {"strategy": quantization.QuantizationStrategy(strategy)} if strategy else {}
    weights = scheme.weights.model_copy(update=changed)
    scheme = scheme.model_copy(update={"weights": weights})
    return scheme.model_copy(update={"format": infer_module_format(Linear, scheme).value})


def _essence(scheme: QuantizationScheme) -> list[Any]:
    """Return what decides the codes of weights and of activations."""
    names = ("type", "num_bits", "strategy", "group_size", "symmetric", "dynamic")
    both = scheme.weights, scheme.input_activations
    return [args and tuple(getattr(args, name) for name in names) for args in both]


def _global_scale(amax: Tensor) -> Tensor:
    from compressed_tensors.quantization.utils import generate_gparam  # noqa: PLC0415

    found: Tensor = generate_gparam(-amax, amax)
    return found


def _arithmetic(
    name: str,
    strategy: str = "",
    *,
    rounding: Rounding | None = None,
    global_scale: Callable[[Tensor], Tensor] | None = None,
) -> Arithmetic:
    preset = _Preset(name, strategy)
    return Arithmetic(
        scales=preset.scales,
        codes=preset.codes,
        config=preset.config,
        global_scale=global_scale,
        multipliers=preset.multipliers,
        rounding=rounding,
        ignored=preset.ignored,
    )


INT8_ROW: Final = Recipe(
    name="int8-row",
    library=LIBRARY,
    codes=Stored("weight", "I8"),
    scales=Stored("weight_scale", block=(1, 0)),
    smallest=1.0,
    arithmetic=_arithmetic("W8A8", "channel", rounding="int8-divide"),
)
"""W8A8: int8 weights with a scale a row, int8 activations with a scale a token."""

_fp8 = partial(Recipe, library=LIBRARY, codes=Stored("weight", "F8_E4M3"), smallest=SMALLEST)

FP8_ROW: Final = _fp8(
    name="fp8-row",
    scales=Stored("weight_scale", block=(1, 0)),
    arithmetic=_arithmetic("FP8_DYNAMIC", "channel", rounding="fp8-divide"),
)
"""fp8 weights with a scale a row, fp8 activations with a scale a token."""

FP8_TENSOR: Final = _fp8(
    name="fp8-tensor",
    scales=Stored("weight_scale", block=(0, 0), is_single=True),
    arithmetic=_arithmetic("FP8_DYNAMIC", "tensor", rounding="fp8-divide"),
)
"""fp8 weights with one scale, fp8 activations with a scale a token."""

MXFP8: Final = _fp8(
    name="mxfp8",
    scales=Stored("weight_scale", "U8", (1, 32)),
    whole_blocks=True,
    arithmetic=_arithmetic("MXFP8"),
)
"""fp8 weights and activations, both with a scale every 32 columns: the exponent of a power of 2."""

_PACKED: Final = Stored("weight_packed", "U8", (1, 2))
"""Two codes of fp4 e2m1 in a byte; that of the first column has the lower bits."""

_fp4 = partial(  # 0.5 is the smallest positive number of e2m1
    Recipe, library=LIBRARY, codes=_PACKED, smallest=0.5, whole_blocks=True
)

MXFP4: Final = _fp4(
    name="mxfp4",
    scales=Stored("weight_scale", "U8", (1, 32)),
    arithmetic=_arithmetic("MXFP4"),
)
"""fp4 weights and activations, both with a scale every 32 columns: the exponent of a power of 2."""

NVFP4A16: Final = _fp4(
    name="nvfp4a16",
    scales=Stored("weight_scale", "F8_E4M3", (1, 16)),
    global_scale=Stored(GLOBAL, "F32", (0, 0), is_single=True),
    arithmetic=_arithmetic("NVFP4A16", global_scale=_global_scale),
)
"""fp4 weights with an fp8 scale every 16 columns, over one fp32 scale; activations as they are."""
