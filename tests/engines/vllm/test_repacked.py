"""Layers packed again are, bit by bit, those of a fresh load: experts, convolutions, MLA, ties."""

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaModel

from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint
from deltachain.delta import changes
from deltachain.errors import (
    BaseMismatchError,
    ConfigError,
    EngineDamagedError,
    TensorMismatchError,
)
from deltachain.replica.layout.runtime_tables import made_by_running
from deltachain.replica.rank import Rank
from deltachain_vllm.compat import computes_alike, own_loader
from deltachain_vllm.model import VllmModel
from tests.engines.families import checkpoint
from tests.engines.matrix import attached, changed, copied, deltas, differences, live
from tests.engines.two_ranks import two_ranks
from tests.engines.vllm.fresh import known, load_fresh, load_in_context
from tests.engines.vllm.repacked import everything, examine
from tests.support.spools import spool_of


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


@pytest.mark.parametrize("mode", ["enable_eplb", "enable_elastic_ep"])
def test_experts_without_a_map_are_refused_in_each_worker(mode: str) -> None:
    from vllm.config import ParallelConfig  # noqa: PLC0415

    assert getattr(ParallelConfig(), mode) is False
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**{mode: True}))
    with pytest.raises(ConfigError, match=f"--{mode.replace('_', '-')}"):
        VllmModel(nn.Linear(1, 1), config)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_version_is_not_written_over_experts_that_moved(is_mapped: bool, tmp_path: Path) -> None:
    before = checkpoint("qwen3_moe")
    specs = dict(Checkpoint(before).specs)
    with load_in_context(before, plain_linears=False) as (config, model):
        engine = known(config, model)
        layer: Any = next(m for m in model.modules() if hasattr(m, "w13_weight"))
        if is_mapped:
            count = len(layer.w13_weight)
            layer.register_buffer("_expert_map", layer.w13_weight.new_tensor(range(count)).int())
        rank = Rank(engine, specs.values(), {})
        agreement = attached(rank, specs, 0, 1)
        after = changed(specs, agreement, before, tmp_path / "after")
        spool = spool_of(tmp_path / "spool", deltas(specs, before, after))
        rank.stage(1, spool.folder, 1 << 30)
        rank.check_addresses()
        turned: list[Tensor] = [layer.w13_weight, layer.w2_weight]
        for tensor in turned + [layer._expert_map] * is_mapped:
            tensor.data.copy_(tensor.data.flip(0).clone())
        held = {name: tensor.clone() for name, tensor in engine.tensors().items()}
        with pytest.raises(EngineDamagedError if is_mapped else BaseMismatchError):
            rank.swap(1, 1, back=False)
        assert all(tensor.equal(held[name]) for name, tensor in engine.tensors().items())
        if is_mapped:
            assert not rank.loads_the_same()  # the experts are where they were, their map is not
            with pytest.raises(EngineDamagedError):
                rank.check_addresses()


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def saved(folder: Path, weights: Mapping[str, Tensor]) -> Path:
    shutil.copytree(checkpoint("llama"), folder)
    save_file(dict(weights), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


@pytest.fixture
def own_class() -> Iterator[None]:
    """Put the class of transformers back: vLLM compiles it in place, and so for later tests."""
    bases, members = LlamaModel.__bases__, dict(vars(LlamaModel))
    yield
    LlamaModel.__bases__ = bases
    for name in vars(LlamaModel).keys() - members.keys():
        delattr(LlamaModel, name)
    LlamaModel.__init__ = members["__init__"]  # type: ignore[method-assign]


@pytest.mark.usefixtures("own_class")
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_a_version_that_parts_a_head_from_the_embedding_is_refused(
    implementation: str, tmp_path: Path
) -> None:
    weights = load_file(checkpoint("llama") / WEIGHTS_FILE)
    embedding = weights[EMBEDDING]
    before = saved(tmp_path / "before", {**weights, HEAD: embedding.clone()})
    new = torch.where(torch.rand(embedding.shape) < 0.1, embedding + 1, embedding)
    alike = saved(tmp_path / "alike", {**weights, EMBEDDING: new, HEAD: new.clone()})
    head, both = (saved(tmp_path / name, one) for name, one in {
        "head": {**weights, EMBEDDING: embedding, HEAD: new},
        "both": {**weights, EMBEDDING: new, HEAD: new + 1},
    }.items())  # fmt: skip
    more: dict[str, Any] = {"model_impl": implementation}
    with load_in_context(before, **more) as (config, model):
        specs = dict(Checkpoint(before).specs)
        rank = Rank(known(config, model), specs.values(), {})
        attached(rank, specs, 0, 1)
        at_first = copied(live(model))
        assert model.get_parameter(HEAD) is model.get_parameter(EMBEDDING)
        for ticket, parted in enumerate((head, both)):
            with pytest.raises(TensorMismatchError, match="keeps them as one"):
                staged(rank, ticket, before, parted, tmp_path)
        assert not rank.staged
        assert all(torch.equal(at_first[name], t) for name, t in copied(live(model)).items())
        staged(rank, 3, before, alike, tmp_path)
        rank.swap(3, 1, back=False)
        now = copied(live(model))
    fresh = copied(live(load_fresh(alike))) if implementation == "auto" else {EMBEDDING: new}
    assert all(torch.equal(now[name], tensor) for name, tensor in fresh.items())


@pytest.mark.parametrize("way", ["reload", "repack"])
def test_a_head_tied_to_its_embedding_is_packed_once(way: str) -> None:
    folder = checkpoint("qwen3_tied")
    tensors = load_file(folder / WEIGHTS_FILE)
    with load_in_context(folder, plain_linears=False) as (config, model):
        engine = known(config, model)
        layers = [model.get_submodule(name.removesuffix(".weight")) for name in (HEAD, EMBEDDING)]
        packed = [vars(layer)["cpu_linear"] for layer in layers]
        assert packed[0] is not packed[1]
        at_first, other = everything(engine, model), {n: t * 2 for n, t in tensors.items()}
        for loaded in (other, tensors):
            if way == "reload":
                engine.reload(loaded.items())
            else:
                names = frozenset(one.removesuffix(".weight") for one in (HEAD, EMBEDDING))
                engine.repack(names, [(n, t) for n, t in loaded.items() if n == EMBEDDING])
            new = [vars(layer)["cpu_linear"] for layer in layers]
            assert new[0] is new[1]
            assert new[0] not in packed
            is_changed = bool(differences(at_first, everything(engine, model)))
            assert is_changed is (loaded is other)


def test_tied_layers_with_biases_of_their_own_are_packed_apart() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    assert not computes_alike(one, other)


def staged(rank: Rank, ticket: int, before: Path, after: Path, folder: Path) -> None:
    old, new = Checkpoint(before), Checkpoint(after)
    found = [changes(spec, old.bits(name), new.bits(name)) for name, spec in old.specs.items()]
    spool = spool_of(folder / f"spool {ticket}", [delta for delta in found if delta.nnz])
    rank.stage(ticket, spool.folder, 1 << 30)


pytestmark = pytest.mark.engine

FIRST = ("qwen3_tied", "qwen3_moe", "deepseek_v3", "mamba2")
REST = (
    "mixtral", "olmoe", "deepseek_v2", "glm4_moe", "qwen3_next", "mamba", "jamba", "gpt_oss",
    "granitemoe", "llama4_text", "phimoe", "qwen2_moe",
)  # fmt: skip


def expect_no_difference(found: dict[str, Any]) -> None:
    assert (found["all"], found["some"], found["back"]) == ([], [], [])
    assert found["tried"] > 0


@pytest.mark.parametrize(
    ("family", "plain"),
    [
        *((family, False) for family in FIRST),
        *(pytest.param(family, False, marks=pytest.mark.slow) for family in REST),
        *(pytest.param(family, True, marks=pytest.mark.slow) for family in (*FIRST, *REST)),
    ],
)
def test_layers_packed_again_are_those_of_a_fresh_load(family: str, plain: bool) -> None:
    expect_no_difference(examine(0, family, plain=plain))


@pytest.mark.slow
def test_both_ranks_of_two() -> None:
    for rank in two_ranks("tests.engines.vllm.repacked:examine_two", *FIRST, *REST, deadline_s=900):
        for found in rank.values():
            expect_no_difference(found)


def test_a_loader_without_a_name_stays_that_of_its_tensor() -> None:
    """MiniMax-M2 has such loaders; vLLM's reload raises over them."""
    tensor: Any = torch.nn.Parameter(torch.zeros(2))
    tensor.weight_loader = loader = partial(print, "loaded")
    own_loader(tensor)
    assert tensor.weight_loader is loader
