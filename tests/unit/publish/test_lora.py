"""What a real PEFT model publishes, against PEFT itself."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.peft
from peft import (
    AdaLoraConfig,
    BdLoraConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import Qwen3Config, Qwen3ForCausalLM

from deltachain.chain.chain import Chain
from deltachain.cli.pull import pull
from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.lora import adapter_assets, adapter_tensors, merged_tensors
from deltachain.publish.model.source import collect_weights
from deltachain.publish.push import push
from deltachain.store import FileStore, MemoryStore, Store
from deltachain.torch_names import TORCH_DTYPES
from tests.support.models import recompute

TOKENS = torch.arange(12).view(2, 6)


def base() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, **sizes, **heads)).bfloat16().eval()


def adapted(model: Any = None, **settings: Any) -> Any:
    """A model with LoRA factors of two layers, or of others."""
    chosen: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
    } | settings
    return get_peft_model(model or base(), LoraConfig(**chosen)).eval()


def published(model: Any, store: Store) -> Publisher:
    """Publish the adapter of a model."""
    publisher = Publisher(PublishConfig(url=store.url), store=store)
    return publisher.attach(lambda: adapter_tensors(model), assets=adapter_assets(model))


def train_(model: Any, step: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 40, (2, 8), generator=generator)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def bits(tensors: Any) -> dict[str, bytes]:
    return {n: t.detach().contiguous().view(torch.uint8).numpy().tobytes() for n, t in tensors}


def test_versions_of_an_adapter_load_into_peft(tmp_path: Path, store: MemoryStore) -> None:
    model = adapted()
    logits = [model(TOKENS).logits]
    with published(model, store) as publisher:
        for step in range(3):
            train_(model, step)
            logits.append(model(TOKENS).logits)
            receipt = publisher.publish(step=step).result(60)
            assert receipt.numel == sum(p.numel() for p in model.parameters() if p.requires_grad)
    chain = Chain.open(store)
    for number, found in recompute(store).items():
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, data in chain.assets():
            (folder / name).write_bytes(data)
        tensors = {
            spec.name: torch.from_numpy(found.state[spec.name].copy())
            .view(TORCH_DTYPES[spec.dtype])
            .view(spec.shape)
            for spec in chain.table.specs()
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        loaded = PeftModel.from_pretrained(base(), folder).eval()
        assert torch.equal(loaded(TOKENS).logits, logits[number])


def alpha(model: Any, by: float) -> None:
    model.peft_config["default"].lora_alpha = 8 * by


def scale(model: Any, by: float) -> None:
    for layer in model.modules():
        if "default" in getattr(layer, "lora_A", ()):
            layer.set_scale("default", by)


@pytest.mark.parametrize(
    ("start", "told"), [("pissa_niter_2", 1), ("olora", 1), ("orthogonal", 0), (True, 0)]
)
def test_an_adapter_whose_initialisation_changed_its_base_is_told(
    start: Any, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    adapter_assets(adapted(base().float(), init_lora_weights=start))
    assert caplog.text.count("fits only the base") == told
    assert caplog.text.count("path_initial_model_for_weight_conversion") == told


@pytest.mark.parametrize("change", [alpha, scale])
def test_an_adapter_that_computes_otherwise_than_its_configuration_says_is_refused(
    change: Callable[[Any, float], None], store: MemoryStore
) -> None:
    model = adapted()
    with published(model, store) as publisher:
        train_(model, 0)
        publisher.publish(step=0).result(60)
        change(model, 0.5)
        with pytest.raises(ConfigError, match="lora_alpha") as caught:
            publisher.publish(step=1).result(60)
        assert caught.value.hint
        assert publisher.version == 1
        change(model, 1)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    "more",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 5}, "rank_pattern": {"down_proj": 2}},
        {"target_modules": ["embed_tokens"]},
        {"use_dora": True},
    ],
)
def test_an_adapter_of_any_scale_that_its_configuration_says_is_published(
    more: dict[str, Any],
) -> None:
    assert list(adapter_tensors(adapted(**more)))


def test_a_merged_publish_is_what_peft_merges_and_leaves_the_live_model_alone(
    store: MemoryStore,
) -> None:
    model = adapted()
    frozen = bits((n, p) for n, p in model.named_parameters() if not p.requires_grad)
    publisher = Publisher(PublishConfig(url=store.url), store=store)
    with publisher.attach(lambda: merged_tensors(model)):
        for step in range(3):
            train_(model, step)
            publisher.publish(step=step).result(60)
    assert bits((n, p) for n, p in model.named_parameters() if not p.requires_grad) == frozen
    merged = bits(copy.deepcopy(model).merge_and_unload().state_dict().items())
    *_, newest = recompute(store).values()
    published = {name: data.tobytes() for name, data in newest.state.items()}
    del merged["lm_head.weight"], published["lm_head.weight"]
    assert published == merged


@pytest.mark.parametrize("casts", [True, False])
def test_merging_rounds_once(casts: bool) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    model: Any = get_peft_model(base(), config, autocast_adapter_dtype=casts)
    train_(model, 0)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == (torch.float32 if casts else torch.bfloat16)
    exact: Tensor = layer.base_layer.weight.float() + 2.0 * (b.float() @ a.float())
    merged = dict(merged_tensors(model))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": ["embed_tokens"]}, "an embedding"),
        ({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, "ALora"),
        ({"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)}, "BdLora"),
    ],
)
def test_an_adapter_that_does_more_than_add_is_not_merged(more: dict[str, Any], name: str) -> None:
    model = adapted(**{"target_modules": ["q_proj"], **more})
    with pytest.raises(ConfigError, match=name):
        list(merged_tensors(model))


def test_another_method_is_not_merged() -> None:
    model = get_peft_model(base(), AdaLoraConfig(target_modules=["q_proj"], total_step=9))
    with pytest.raises(UnsupportedModelError, match="ADALORA"):
        list(merged_tensors(model))


@pytest.mark.parametrize("name", ["lora_bias", "target_parameters"])
def test_what_an_adapter_adds_elsewhere_is_not_merged(name: str) -> None:
    model = adapted()
    setattr(model.peft_config["default"], name, True)
    with pytest.raises(ConfigError, match=name):
        list(merged_tensors(model))


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"modules_to_save": ["lm_head"]}, "'lm_head' is a ModulesToSaveWrapper"),
        (
            {"trainable_token_indices": {"embed_tokens": [1, 2]}},
            r"'model\.embed_tokens' is a TrainableTokensWrapper",
        ),
    ],
)
def test_weights_that_another_adapter_replaces_are_not_merged(
    more: dict[str, Any], name: str
) -> None:
    model = adapted()
    model.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj"], **more))
    with pytest.raises(UnsupportedModelError, match=name) as caught:
        list(merged_tensors(model, "default"))
    assert "merged copy" in caught.value.hint
    with pytest.raises(UnsupportedModelError, match=next(iter(more))):
        list(merged_tensors(model, "ref"))


def test_names_of_the_base_model_stay_as_they_are() -> None:
    model = base()
    attention = model.model.layers[0].self_attn
    attention.register_parameter("lora_w", nn.Parameter(torch.ones(2)))
    attention.base_layer = nn.Linear(2, 2)
    names = set(model.state_dict())
    peft = adapted(model, target_modules=["q_proj"])
    assert {name for name, _ in merged_tensors(peft)} == names


def test_layers_in_wrappers_are_merged() -> None:
    model = adapted()
    train_(model, 0)
    expected = bits(merged_tensors(model))
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    assert bits(merged_tensors(model)) == expected


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_an_adapter_of_a_tied_layer_is_not_merged() -> None:
    tied = base()
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    with pytest.raises(ConfigError, match="share"):
        list(merged_tensors(adapted(tied, target_modules=["lm_head"])))


def test_an_adapter_that_is_merged_already_is_not_added_again() -> None:
    model = adapted()
    train_(model, 0)
    model.merge_adapter()
    with pytest.raises(ConfigError, match="merged into the live weights already"):
        list(merged_tensors(model))
    model.unmerge_adapter()
    assert list(merged_tensors(model))


def test_a_merged_weight_that_its_dtype_cannot_have_is_refused() -> None:
    model = adapted(base().half())
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(1e6)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.q_proj.*F16 cannot have"):
        list(merged_tensors(model))


def test_an_adapter_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no adapter 'other'; the model has \['default'\]"):
        list(adapter_tensors(adapted(), "other"))
    with pytest.raises(ConfigError, match="no adapter"):
        list(merged_tensors(base()))


def test_one_of_several_adapters_must_be_named() -> None:
    model = adapted()
    model.add_adapter("trained", LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj"]))
    model.set_adapter("trained")
    train_(model, 0)
    for export in (adapter_tensors, merged_tensors):
        with pytest.raises(ConfigError, match=r"which adapter; .*'default', 'trained'"):
            list(export(model))
    with pytest.raises(ConfigError, match="which adapter"):
        adapter_assets(model)
    expected = copy.deepcopy(model).merge_and_unload(adapter_names=["trained"])
    name = "model.layers.0.self_attn.v_proj.weight"
    assert torch.equal(dict(merged_tensors(model, "trained"))[name], expected.get_parameter(name))


METHODS = {
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "vera": VeraConfig(target_modules=["q_proj"]),
    "lora": LoraConfig(target_modules=["q_proj"]),
    "lora that transformers added": LoraConfig(target_modules=["q_proj"]),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_pulled_adapter_of_any_method_is_what_peft_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(transformers.integrations.peft, "check_peft_version", lambda **_: None)
    model, config = base(), copy.deepcopy(METHODS[method])
    if method == "lora that transformers added":
        model.add_adapter(config)
    else:
        model = get_peft_model(model, config)
    published(model, FileStore(tmp_path / "chain")).close()
    saved = tmp_path / "saved"
    model.save_pretrained(str(saved))
    push(FileStore(tmp_path / "pushed"), saved, PublishConfig(url="x"))
    for name in ("chain", "pushed"):
        found = tmp_path / "out" / name
        pull((tmp_path / name).as_uri(), out=found)
        one, other = (json.loads((f / "adapter_config.json").read_bytes()) for f in (found, saved))
        assert one == other
        one, other = (load_file(f / "adapter_model.safetensors") for f in (found, saved))
        assert bits(one.items()) == bits(other.items())
        PeftModel.from_pretrained(base(), found)


class Lora(nn.Linear):
    """Factors of an own kind, beside a weight that is trained as well."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lora_A, self.lora_B = nn.Linear(4, 2), nn.Linear(2, 4)
        self.magnitude = nn.Parameter(torch.ones(4))  # as torchtune's DoRA


def test_own_factors_are_refused_if_they_are_all_that_is_trained() -> None:
    model = nn.Sequential(Lora())
    assert "0.lora_A.weight" in {spec.name for spec in collect_weights(model).specs}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "magnitude" in name)
    with pytest.raises(ConfigError, match="is an adapter") as caught:
        collect_weights(model)
    assert "what its library saves" in caught.value.hint
