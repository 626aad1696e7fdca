"""A fresh load is an oracle: it has every tensor, and two of them agree in every bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.replica.layout.runtime_tables import made_by_running
from tests.engines.families import FAMILIES, checkpoint, make
from tests.engines.matrix import copied, differences, live
from tests.engines.two_ranks import run, two_ranks
from tests.engines.vllm.cpu import packs_linears
from tests.engines.vllm.fresh import load_fresh, load_in_context

pytestmark = pytest.mark.engine

SPLIT = ("qwen3", "qwen3_v1000", "llama_v500", "gemma3", "gpt2", "bloom", "phi3", "mixtral")
SPLIT_ODDLY = ("gpt_oss", "deepseek_v3", "qwen3_next", "mamba2")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_loads_of_a_checkpoint_agree_in_every_bit(name: str) -> None:
    folder = checkpoint(name)
    assert differences(live(load_fresh(folder)), live(load_fresh(folder))) == []


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe", "mamba2"])
def test_one_bit_of_a_tensor_of_a_checkpoint_shows(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / "one")
    before = live(load_fresh(folder))
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    tensors = load_file(folder / WEIGHTS_FILE)
    for changed in sorted(tensors)[::4]:  # a load each
        now = {key: tensor.clone() for key, tensor in tensors.items()}
        now[changed].view(-1)[-1:].view(torch.int16).bitwise_xor_(1)
        save_file(now, other / WEIGHTS_FILE, metadata={"format": "pt"})
        assert differences(before, live(load_fresh(other))), changed


def test_packed_linears_are_what_a_cpu_serves_from(tmp_path: Path) -> None:
    folder = make("qwen3", tmp_path)
    packed, plain = load_fresh(folder, plain_linears=False), load_fresh(folder)
    assert plain.get_parameter("model.layers.0.mlp.down_proj.weight").shape == (128, 256)
    if not packs_linears():
        assert differences(live(packed), live(plain)) == []
        return
    assert packed.get_parameter("model.layers.0.mlp.down_proj.weight").numel() == 0
    assert "model.layers.0.mlp.down_proj.weight" in differences(live(packed), live(plain))


def test_a_context_is_one_in_which_weights_can_be_loaded_again(tmp_path: Path) -> None:
    folder = make("qwen3", tmp_path)
    tensors = load_file(folder / WEIGHTS_FILE)
    with load_in_context(folder) as (config, model):
        assert config.model_config.model == str(folder)
        before = copied(live(model))
        model.load_weights((name, -tensor) for name, tensor in tensors.items())  # type: ignore[operator]
        assert "model.layers.1.self_attn.qkv_proj.weight" in differences(before, live(model))
        model.load_weights(tensors.items())  # type: ignore[operator]
        assert differences(before, live(model)) == []


def test_tied_weights_are_there_under_every_name(tmp_path: Path) -> None:
    found = live(load_fresh(make("qwen3_tied", tmp_path)))
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()


def test_nan_bits_and_zeros_are_told_apart() -> None:
    nans = torch.tensor([0x7FC0, 0x7FC1, 0], dtype=torch.int16).view(torch.bfloat16)
    zeros = torch.tensor([0x7FC0, 0x7FC1, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    assert differences({"a": nans}, {"a": nans.clone()}) == []
    assert differences({"a": nans}, {"a": zeros}) == ["a"]
    assert differences({"a": nans}, {"a": nans.view(1, 3)}) == ["a"]
    assert differences({"a": nans}, {"a": nans.view(torch.float16), "b": nans}) == ["a", "b"]
    assert differences({"a.inv": nans, "a._tensor_constant0": nans}, {"a.inv": nans}) == []


def test_both_ranks_have_their_share(tmp_path: Path) -> None:
    for name in (*SPLIT, *SPLIT_ODDLY):
        make(name, tmp_path / name)
    names = ",".join((*SPLIT, *SPLIT_ODDLY))
    ranks: list[dict[str, Any]] = two_ranks(f"{__name__}:twice", tmp_path, names)
    for name in (*SPLIT, *SPLIT_ODDLY):
        assert [rank[name]["differences"] for rank in ranks] == [[], []], name
    assert ranks[0]["qwen3"]["qkv"] == ranks[1]["qwen3"]["qkv"] == [128, 128]
    assert ranks[0]["qwen3"]["first"] != ranks[1]["qwen3"]["first"]


def test_ranks_that_fail_or_hang_are_reported_and_ended() -> None:
    one, other = run(f"{__name__}:fail", deadline_s=120.0)
    assert "ValueError: rank 0 will not" in one.error
    assert other.error.startswith("killed, it took too long")


def twice(rank: int, folder: str, names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names.split(","):
        one, other = (live(load_fresh(Path(folder) / name, tp=2, rank=rank)) for _ in range(2))
        found[name] = {"differences": differences(one, other)}
        qkv = one.get("model.layers.0.self_attn.qkv_proj.weight")
        if qkv is not None:
            found[name] |= {"qkv": list(qkv.shape), "first": float(qkv[0, 0])}
    return found


def fail(rank: int) -> None:
    if rank == 0:
        raise ValueError("rank 0 will not")
    while True:
        torch.empty(0)


def test_what_a_model_holds_before_it_runs_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: PLC0415

    from deltachain_vllm import register  # noqa: PLC0415

    monkeypatch.setattr(BaseModelLoader, "load_model", BaseModelLoader.load_model)
    register()
    hooked = BaseModelLoader.load_model
    register()
    assert BaseModelLoader.load_model is hooked
    model = load_fresh(checkpoint("llama"))
    assert made_by_running(model) == frozenset()
    vars(model.get_submodule("model.norm"))["table"] = torch.ones(3)
    assert made_by_running(model) == {"model.norm.table"}
