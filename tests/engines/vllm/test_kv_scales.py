"""Scales of keys and values in a checkpoint are followed, in a real vLLM."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint
from deltachain.cli.push import push
from deltachain.errors import PartialApplyError, TensorMismatchError
from deltachain.replica.layout.runtime_tables import record_loaded_state
from deltachain.replica.rank import Rank
from tests.engines.compare import differences
from tests.engines.families import checkpoint, with_tokenizer
from tests.engines.serving import start
from tests.engines.vllm.cpu import has_fp8_cache
from tests.engines.vllm.fresh import known, load_in_context
from tests.engines.vllm.served import fresh, served
from tests.engines.vllm.test_server_quantised import answers

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
