"""Recipes of compressed-tensors: the checkpoints of LLM Compressor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from deltachain.publish.quantise.finegrained import SMALLEST
from deltachain.publish.quantise.recipe import Arithmetic, Margins, Recipe
from deltachain.publish.quantise.stored import Stored

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme
    from torch import Tensor

LIBRARY: Final = "compressed-tensors"


@cache
def _scheme(preset: str, strategy: str) -> QuantizationScheme:
    """Return a preset of the library, with another strategy for its weights."""
    from compressed_tensors.config import CompressionFormat  # noqa: PLC0415 - takes seconds
    from compressed_tensors.quantization import (  # noqa: PLC0415
        QuantizationStrategy,
        preset_name_to_scheme,
    )

    scheme = preset_name_to_scheme(preset, ["Linear"])
    is_int = scheme.weights.type == "int"
    form = CompressionFormat.int_quantized if is_int else CompressionFormat.float_quantized
    weights = scheme.weights.model_copy(update={"strategy": QuantizationStrategy(strategy)})
    return scheme.model_copy(update={"weights": weights, "format": form.value})


def _parameters(preset: str, strategy: str, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, of 0."""
    from compressed_tensors.quantization.utils import calculate_qparams  # noqa: PLC0415

    found: tuple[Tensor, Tensor]
    found = calculate_qparams(-amax, amax, _scheme(preset, strategy).weights)
    return found


def _scales(preset: str, strategy: str, amax: Tensor) -> Tensor:
    return _parameters(preset, strategy, amax)[0].view(amax.shape)


def _codes(preset: str, strategy: str, weight: Tensor, amax: Tensor, margins: Margins) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import quantize  # noqa: PLC0415

    del margins  # every code depends on its element and scale alone
    scales, zeros = _parameters(preset, strategy, amax)
    args = _scheme(preset, strategy).weights
    codes: Tensor = quantize(weight, scales, zeros, args, dtype=args.pytorch_dtype())
    return codes


def _config(preset: str, strategy: str, ignored: Sequence[str]) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus  # noqa: PLC0415

    scheme = _scheme(preset, strategy)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(ignored),
    )
    dumped: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    return dumped


def _arithmetic(preset: str, strategy: str) -> Arithmetic:
    return Arithmetic(
        scales=partial(_scales, preset, strategy),
        codes=partial(_codes, preset, strategy),
        rounding="int8-divide" if preset == "W8A8" else "fp8-divide",
        config=partial(_config, preset, strategy),
    )


INT8_ROW: Final = Recipe(
    name="int8-row",
    library=LIBRARY,
    codes=Stored("weight", "I8"),
    scales=Stored("weight_scale", block=(1, 0)),
    smallest=1.0,
    arithmetic=_arithmetic("W8A8", "channel"),
)
"""W8A8: int8 weights with a scale a row, int8 activations with a scale a token."""

FP8_ROW: Final = Recipe(
    name="fp8-row",
    library=LIBRARY,
    codes=Stored("weight", "F8_E4M3"),
    scales=Stored("weight_scale", block=(1, 0)),
    smallest=SMALLEST,
    arithmetic=_arithmetic("FP8_DYNAMIC", "channel"),
)
"""fp8 weights with a scale a row, fp8 activations with a scale a token."""

FP8_TENSOR: Final = Recipe(
    name="fp8-tensor",
    library=LIBRARY,
    codes=Stored("weight", "F8_E4M3"),
    scales=Stored("weight_scale", block=(0, 0), is_single=True),
    smallest=SMALLEST,
    arithmetic=_arithmetic("FP8_DYNAMIC", "tensor"),
)
"""fp8 weights with one scale, fp8 activations with a scale a token."""
