"""Quantisation by the libraries alone: whole models and matrices, as their own users do it."""

from types import SimpleNamespace
from typing import Any, Final

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

COMPRESSED: Final = {
    "int8-row": ("int", "channel", "int-quantized"),
    "fp8-row": ("float", "channel", "float-quantized"),
    "fp8-tensor": ("float", "tensor", "float-quantized"),
}
PRESETS: Final = {
    "mxfp8": ("MXFP8", "mxfp8-quantized"),
    "mxfp4": ("MXFP4", "mxfp4-pack-quantized"),
    "nvfp4a16": ("NVFP4A16", "nvfp4-pack-quantized"),
}
FUSED: Final = [
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
]
BLOCKS: Final = {"fp8-block": "float", "fp8-block-ue8m0": "ue8m0"}


def llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A small model of bf16 weights, none of whose dimensions is a multiple of 128.

    All matrices have a multiple of 32 columns, which recipes of whole blocks need.
    """
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 160,
        "intermediate_size": 224,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "vocab_size": 96,
        "attention_bias": True,
        "architectures": ["LlamaForCausalLM"],
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings})).bfloat16()


def scheme(recipe: str) -> QuantizationScheme:
    if recipe in PRESETS:
        name, form = PRESETS[recipe]
        return preset_name_to_scheme(name, ["Linear"]).model_copy(update={"format": form})
    kind, strategy, form = COMPRESSED[recipe]
    common: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True}
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**common, strategy=strategy, dynamic=False),
        input_activations=QuantizationArgs(**common, strategy="token", dynamic=True),
        format=form,
    )


def compressed(model: nn.Module, recipe: str, ignore: tuple[str, ...]) -> dict[str, Tensor]:
    """The state of a model compressed by compressed-tensors; the model is changed."""
    chosen = scheme(recipe)
    groups: Any = {"group_0": chosen}
    config = QuantizationConfig(config_groups=groups, format=chosen.format, ignore=list(ignore))
    apply_quantization_config(model, config, show_progress=False)
    shared = fused_extremes(model)
    for name, layer in model.named_modules():
        if hasattr(layer, "weight_scale"):
            calibrate(layer, chosen.weights, shared[name])
    ModelCompressor.from_pretrained_model(model, chosen.format).compress_model(model)
    return dict(model.state_dict())


def calibrate(layer: Any, args: Any, whole: tuple[Tensor, Tensor]) -> None:
    """Give a layer the scales of its weight, as observers of least and largest values do."""
    weight: Tensor = layer.weight.data
    if args.group_size:
        low, high = weight.unflatten(1, (-1, args.group_size)).aminmax(dim=2)
    elif args.strategy == "channel":
        low, high = weight.aminmax(dim=1, keepdim=True)
    else:
        low, high = weight.aminmax()
    over = None
    if args.strategy == "tensor_group":
        over = generate_gparam(*(one.reshape(1) for one in whole))
        layer.weight_global_scale.data.copy_(over)
    layer.weight_scale.data.copy_(calculate_qparams(low, high, args, global_scale=over)[0])


def fused_extremes(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Least and largest weights of what engines load a layer into, as LLM Compressor links them."""
    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    found = {}
    for name in layers:
        # names of test modules may have / for the dots within
        parent, cut, last = name.rpartition("/" if "/" in name else ".")
        fused = next((names for names in FUSED if last in names), (last,))
        beside = [layers[f"{parent}{cut}{n}"].weight.data for n in fused]
        low, high = zip(*(weight.aminmax() for weight in beside), strict=True)
        found[name] = torch.stack(low).min(), torch.stack(high).max()
    return found


def blocks(weight: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a whole matrix by transformers, filled up with zeros to whole blocks."""
    config = FineGrainedFP8Config(weight_block_size=(128, 128), scale_fmt=BLOCKS[recipe])
    rows, columns = weight.shape
    whole = pad(weight, (0, -columns % 128, 0, -rows % 128))
    quantise: Any = Fp8Quantize(SimpleNamespace(quantization_config=config))
    found = quantise.convert({"a.weight": whole})
    return found["a.weight"][:rows, :columns], found["a.weight_scale_inv"]


def quantised_state(
    model: nn.Module, recipe: str, ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, Tensor]:
    """The state of a bf16 model as the recipe's library writes it; the model may be changed."""
    if recipe not in BLOCKS:
        return compressed(model, recipe, ignore)
    state = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name not in ignore:
            codes, scales = blocks(layer.weight.data, recipe)
            state[f"{name}.weight"], state[f"{name}.weight_scale_inv"] = codes, scales
    return state


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> set[str]:
    """Names of tensors of which dtype, shape or a bit differ, or that one of the two lacks."""
    return {
        name
        for name in found.keys() | expected.keys()
        if not (name in found and name in expected and _equal(found[name], expected[name]))
    }


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )
