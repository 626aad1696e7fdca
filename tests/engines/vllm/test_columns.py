"""What layers are packed into is compared with what was loaded, in a real vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.errors import TensorMismatchError
from tests.engines.families import checkpoint
from tests.engines.vllm.cpu import packed_linears
from tests.engines.vllm.fresh import known, load_in_context

pytestmark = pytest.mark.engine

UTILS: Final = "vllm.model_executor.layers.utils"


@pytest.fixture(scope="module")
def engine() -> Any:
    folder = checkpoint("qwen3_tied")
    with packed_linears(), load_in_context(folder, plain_linears=False) as (config, model):
        yield known(config, model)


def packed(engine: Any) -> str:
    modules: dict[str, nn.Module] = engine.modules()
    return next(name for name, layer in modules.items() if _keeps_nothing(layer))


def _keeps_nothing(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and not weight.numel() and hasattr(layer, "cpu_linear")


def weights() -> Any:
    return load_file(checkpoint("qwen3_tied") / WEIGHTS_FILE).items()


@pytest.mark.parametrize("way", ["reload", "repack"])
def test_layers_packed_from_another_weight_are_refused(
    engine: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = import_module(UTILS)
    pack, name = utils.dispatch_cpu_unquantized_gemm, packed(engine)
    wrong = engine.modules()[name]

    def pack_another(layer: Any, *, remove_weight: bool) -> None:
        if layer is wrong:
            layer.weight.data = torch.flip(layer.weight.data, [0])
        pack(layer, remove_weight=remove_weight)

    every = engine.modules().keys()
    bring = engine.reload if way == "reload" else lambda t: engine.repack(every, t)
    bring(weights())
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", pack_another)
    with pytest.raises(TensorMismatchError, match=f"{name} was packed from another weight"):
        bring(weights())
    monkeypatch.undo()
    bring(weights())
    assert "process_weights_after_loading" not in vars(wrong.quant_method)


def test_weights_too_small_for_a_product_are_no_other_weights(engine: Any) -> None:
    """CPUs flush subnormal numbers of bfloat16 to zero as they multiply."""
    tiny = [(name, torch.full_like(t, 1e-39)) for name, t in weights()]
    assert all(tensor.any() for _, tensor in tiny)
    engine.reload(tiny)
    engine.reload(weights())
