"""Scales of keys and values in a checkpoint are followed, in a real vLLM."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

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


ATTENTION: Final = "model.layers.1.self_attn.attn"
SCALES: Final = ("_k_scale_float", "_v_scale_float", "_k_scale", "_v_scale", "_k_scale_cpu")

Spoil: TypeAlias = Callable[[Any], None]
Stale: TypeAlias = Callable[[Served, Any], Spoil]
"""Makes what gives a layer back something that it has now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    family: str
    process: str
    """What processes a layer once its weights are loaded."""
    layer: str = "model.layers.1.mlp.down_proj"
    packs: bool = False
    """Whether nobody can read afterwards what was processed: it is stale before."""
    arguments: Mapping[str, str] = field(default_factory=dict)


LAYERS: Final = "vllm.model_executor.layers.quantization"
ONLINE: Final = Case(
    family="llama",
    process=f"{LAYERS}.online.fp8.Fp8PtpcOnlineLinearMethod",
    arguments={"quantization": "fp8_per_channel"},
)
CODES: Final = Case(
    family="llama_int8",
    process="vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel",
    packs=True,
)
KEYS: Final = Case(
    family="llama_kv_scales",
    process=f"{LAYERS}.compressed_tensors.compressed_tensors.CompressedTensorsKVCacheMethod",
    layer=ATTENTION,
)


def member(kind: str) -> Stale:
    def stale(_: Served, layer: Any) -> Spoil:
        old = getattr(layer, kind)
        if isinstance(old, float):
            return lambda layer: setattr(layer, kind, old)
        kept = old.detach().clone()
        return lambda layer: getattr(layer, kind).data.copy_(kept)

    return stale


def row_of_weights(_: Served, layer: Any) -> Spoil:
    old = layer.weight.detach()[:, 3].clone()
    return lambda layer: layer.weight.data[:, 3].copy_(old)


def row_of_codes(here: Served, _: Any) -> Spoil:
    name = f"{CODES.layer}.weight"
    codes = here.before.bits(name).reshape(here.before.specs[name].shape)
    old = torch.from_numpy(codes[3].copy()).view(torch.int8)
    return lambda layer: layer.weight.data[3].copy_(old)


@pytest.mark.parametrize(
    ("case", "stale", "named"),
    [
        pytest.param(ONLINE, member("weight_scale"), "load", id="scale of the engine"),
        pytest.param(ONLINE, row_of_weights, "load", id="codes of the engine"),
        pytest.param(CODES, member("weight_scale"), "load", id="scale of the checkpoint"),
        pytest.param(CODES, row_of_codes, "load", id="codes of the checkpoint"),
        *(pytest.param(KEYS, member(kind), f".*{kind}", id=kind) for kind in SCALES),
    ],
)
def test_codes_and_scales_that_stay_stale_are_refused(
    case: Case, stale: Stale, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = resolve_name(case.process)
    process = kind.process_weights_after_loading
    with served(case.family, tmp_path, **case.arguments) as here:
        wrong: Any = here.model.get_submodule(case.layer)
        if case.packs:
            assert wrong.weight is None, "its codes are where only a kernel reads them"
            assert {len(group.layers) for _, group in here.rank._attached.groups} == {1}
        before, spoil = here.everything(), stale(here, wrong)

        def keep(method: Any, layer: Any) -> None:
            if layer is wrong and case.packs:
                spoil(layer)
            process(method, layer)
            if layer is wrong and not case.packs:
                spoil(layer)

        with monkeypatch.context() as patched:
            patched.setattr(kind, "process_weights_after_loading", keep)
            said = f"{case.layer} is not what a fresh {named}"
            with pytest.raises(PartialApplyError, match=said):
                here.rank.swap(1, 1, back=False)
        assert differences(before, here.everything()) == []
        here.rank.swap(1, 1, back=False)
        now = here.everything()
    assert differences(before, now)
    assert differences(fresh(here.after, **case.arguments), now) == []


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
