"""Scales of keys and values in a checkpoint are followed, in a real vLLM."""

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint
from deltachain.cli.push import push
from deltachain.errors import PartialApplyError, TensorMismatchError
from deltachain.replica.layout.runtime_tables import record_loaded_state
from deltachain.replica.rank import Rank
from tests.engines.families import checkpoint, with_tokenizer
from tests.engines.matrix import differences
from tests.engines.serving import answers, start
from tests.engines.vllm.fresh import has_fp8_cache, known, load_in_context, packed_linears
from tests.engines.vllm.repacked import Served, fresh, served

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


ONLINE: Final = "vllm.model_executor.layers.quantization.online.fp8"
KERNEL: Final = "vllm.model_executor.kernels.linear.scaled_mm.cpu"
WRONG: Final = "model.layers.1.mlp.down_proj"


Process: TypeAlias = Callable[[Any, Any], None]


def layer_of(here: Served) -> Any:
    return here.model.get_submodule(WRONG)


def stale_scale(process: Process, here: Served) -> Process:
    wrong, old = layer_of(here), layer_of(here).weight_scale.detach().clone()

    def keep(method: Any, layer: Any) -> None:
        process(method, layer)
        if layer is wrong:
            layer.weight_scale.data.copy_(old)

    return keep


def stale_row(process: Process, here: Served) -> Process:
    wrong, old = layer_of(here), layer_of(here).weight.detach()[:, 3].clone()

    def keep(method: Any, layer: Any) -> None:
        process(method, layer)
        if layer is wrong:
            layer.weight.data[:, 3] = old

    return keep


def packed_with_stale_scale(process: Process, here: Served) -> Process:
    wrong, old = layer_of(here), layer_of(here).weight_scale.detach().clone()

    def keep(kernel: Any, layer: Any) -> None:
        if layer is wrong:
            layer.weight_scale.data.copy_(old)
        process(kernel, layer)

    return keep


def packed_with_stale_row(process: Process, here: Served) -> Process:
    """A packing with the codes of one row as they were: nobody can read them afterwards."""
    codes = here.before.bits(f"{WRONG}.weight").reshape(here.before.specs[f"{WRONG}.weight"].shape)
    wrong, old = layer_of(here), codes[3].copy()

    def keep(kernel: Any, layer: Any) -> None:
        if layer is wrong:
            layer.weight.data[3] = torch.from_numpy(old).view(torch.int8)
        process(kernel, layer)

    return keep


@pytest.mark.parametrize("stale", [stale_scale, stale_row])
def test_wrong_codes_or_scales_of_online_quantisation_are_refused(
    stale: Callable[[Process, Served], Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = import_module(ONLINE).Fp8PtpcOnlineLinearMethod
    with served("llama", tmp_path, quantization="fp8_per_channel") as here:
        refused_once(here, method, stale, monkeypatch)
        now = here.everything()
    assert differences(fresh(here.after, quantization="fp8_per_channel"), now) == []


@pytest.mark.parametrize("stale", [packed_with_stale_scale, packed_with_stale_row])
def test_wrong_codes_or_scales_of_the_checkpoint_are_refused(
    stale: Callable[[Process, Served], Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = import_module(KERNEL).CPUInt8ScaledMMLinearKernel
    with served("llama_int8", tmp_path) as here:
        assert layer_of(here).weight is None, "its codes are where only a kernel reads them"
        assert {len(group.layers) for _, group in here.rank._attached.groups} == {1}
        refused_once(here, kernel, stale, monkeypatch)
        now = here.everything()
    assert differences(fresh(here.after), now) == []


def refused_once(
    here: Served,
    method: Any,
    stale: Callable[[Process, Served], Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = here.everything()
    with monkeypatch.context() as patched:
        process = stale(method.process_weights_after_loading, here)
        patched.setattr(method, "process_weights_after_loading", process)
        with pytest.raises(PartialApplyError, match=f"{WRONG} is not what a fresh load"):
            here.rank.swap(1, 1, back=False)
    assert differences(before, here.everything()) == []
    here.rank.swap(1, 1, back=False)
    assert differences(before, here.everything())


pytestmark = pytest.mark.engine

COMPRESSED: Final = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
ATTENTION: Final = "model.layers.1.self_attn.attn"

SCALES: Final = ("_k_scale_float", "_v_scale_float", "_k_scale", "_v_scale", "_k_scale_cpu")


def test_scales_of_keys_and_values_are_those_of_a_fresh_load(tmp_path: Path) -> None:
    """A CPU computes with keys and values of eight bits; its kernel takes the numbers."""
    with served("llama_kv_scales", tmp_path) as here:
        attention: Any = here.model.get_submodule(ATTENTION)
        assert attention.impl.is_fp8_kv_cache
        before = here.everything()
        here.rank.swap(1, 1, back=False)
        now = here.everything()
        changed = set(differences(before, now))
        assert {f"{ATTENTION}.{name}" for name in SCALES} <= changed
        here.rank.swap(1, 0, back=True)
        assert differences(before, here.everything()) == []
    assert differences(fresh(here.after), now) == []


@pytest.mark.parametrize("kind", SCALES)
def test_scales_of_keys_and_values_that_stay_stale_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = import_module(COMPRESSED).CompressedTensorsKVCacheMethod
    process = method.process_weights_after_loading
    with served("llama_kv_scales", tmp_path) as here:
        attention: Any = here.model.get_submodule(ATTENTION)
        before, old = here.everything(), getattr(attention, kind)
        old = old.clone() if isinstance(old, Tensor) else old

        def keep(method: Any, layer: Any) -> None:
            process(method, layer)
            if layer is attention and isinstance(old, float):
                setattr(layer, kind, old)
            elif layer is attention:
                getattr(layer, kind).copy_(old)

        with monkeypatch.context() as patched:
            patched.setattr(method, "process_weights_after_loading", keep)
            with pytest.raises(
                PartialApplyError, match=f"{ATTENTION} is not what a fresh .*{kind}"
            ):
                here.rank.swap(1, 1, back=False)
        assert differences(before, here.everything()) == []


@pytest.mark.parametrize("runs", [True, False])
def test_products_of_scales_that_a_backend_keeps_are_refused_by_name(runs: bool) -> None:
    """As FlashInfer keeps ``bmm1_scale`` from its first run on; no CPU runs it."""
    folder = checkpoint("llama_kv_scales")
    with load_in_context(folder, plain_linears=False) as (config, model):
        attention: Any = model.get_submodule(ATTENTION)
        attention.impl.bmm1_scale = None
        record_loaded_state(model)
        if runs:
            attention.impl.bmm1_scale = attention.impl.scale * attention._k_scale_float
        engine, specs = known(config, model), Checkpoint(folder).specs.values()
        if not runs:
            Rank(engine, specs, {})
            return
        with pytest.raises(TensorMismatchError, match=rf"computed {ATTENTION}\.impl\.bmm1_scale"):
            Rank(engine, specs, {})


def test_a_server_says_what_a_fresh_one_says_once_scales_changed(tmp_path: Path) -> None:
    """No weight changes, so only scales can make the difference."""
    if not has_fp8_cache():
        pytest.skip("vLLM has no cache of fp8 keys and values on a CPU without AVX-512")
    folder = Path(shutil.copytree(checkpoint("llama_kv_scales"), tmp_path / "before"))
    after = Path(shutil.copytree(with_tokenizer(folder), tmp_path / "after"))
    tensors = load_file(after / WEIGHTS_FILE)
    scaled = {n: t * 8 for n, t in tensors.items() if n.endswith((".k_scale", ".v_scale"))}
    save_file(tensors | scaled, after / WEIGHTS_FILE, metadata={"format": "pt"})
    url = (tmp_path / "chain").as_uri()
    push(folder, url)
    with start(folder, tmp_path / "server", url, requests=16) as server:
        first = answers(server)
        push(after, url)
        server.update(1)
        second = answers(server)
        assert second != first
        server.stop()
    with start(after, tmp_path / "fresh", requests=16) as fresh:
        assert answers(fresh) == second
