import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    CamembertConfig,
    CamembertForCausalLM,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.source import collect_weights, specs_of
from deltachain.publish.push import push
from deltachain.store import FileStore, MemoryStore
from deltachain.types import TensorSpec
from tests.support.models import TinyModel, plain_model, recompute
from tests.unit.publish.library import llama


def prune(model: LlamaForCausalLM) -> None:
    del model.model.layers[1]


def grow(model: LlamaForCausalLM) -> None:
    model.model.layers.append(llama(1).model.layers[0])


def head_bias(model: LlamaForCausalLM) -> None:
    model.lm_head.bias = nn.Parameter(torch.ones(96, dtype=torch.bfloat16))


def no_attention_bias(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias = None


def inner_norm(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(40).bfloat16()


EDITS: dict[str, tuple[Callable[[LlamaForCausalLM], None], str]] = {
    "pruned": (prune, r"'model\.layers\.1\.[a-z_.]*' is not among the weights"),
    "grown": (grow, r"'model\.layers\.2\.[a-z_.]*' is not in a model"),
    "head bias": (head_bias, r"'lm_head\.bias' is not in a model"),
    "attention bias": (no_attention_bias, r"'model\.layers\.0\.self_attn\.q_proj\.bias' is not am"),
    "inner norm": (inner_norm, r"'model\.layers\.0\.self_attn\.q_norm\.bias' is not in a model"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("loaded", [True, False])
def test_a_model_of_other_weights_than_its_configuration_has_is_refused(
    tmp_path: Path, edit: str, *, loaded: bool
) -> None:
    model = llama()
    if loaded:
        model.save_pretrained(tmp_path / "origin")
        model = LlamaForCausalLM.from_pretrained(tmp_path / "origin", dtype=torch.bfloat16)
    change, why = EDITS[edit]
    change(model)
    with pytest.raises(ConfigError, match=why) as caught:
        Publisher(PublishConfig(url=str(tmp_path / "chain"))).attach(model, alone=True)
    assert "num_hidden_layers" in caught.value.hint
    assert "PublishConfig.assets" in caught.value.hint
    assert not (tmp_path / "chain").exists()


def test_a_model_whose_class_ties_nothing_is_published(tmp_path: Path) -> None:
    config = BigBirdPegasusConfig(
        vocab_size=20,
        d_model=8,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    assert config.tie_word_embeddings
    model = BigBirdPegasusForCausalLM(config)
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))).attach(model) as publisher:
        assert publisher.version == 0


def test_a_model_without_a_layer_whose_configuration_says_so_is_published(tmp_path: Path) -> None:
    model = llama()
    prune(model)
    model.config.num_hidden_layers = 1
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))) as publisher:
        assert publisher.attach(model, alone=True).version == 0


def test_a_head_of_its_own_beside_a_model_is_published_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    model.v_head = nn.Linear(160, 1)
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))) as publisher:
        publisher.attach(model, alone=True)
    assert "'v_head.weight'" in caplog.text
    assert "from_pretrained leaves" in caplog.text


def saved(folder: Path, edit: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
    """A folder whose weights or configuration were edited."""
    llama().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(document | fields))
    return folder


def keep(_: dict[str, Tensor]) -> None:
    pass


def refused(folder: Path, why: str) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match=why) as caught:
        push(store, folder, PublishConfig(url=store.url))
    assert "config.json" in caught.value.hint
    assert not list(store.list(""))


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "pruned": ({"num_hidden_layers": 3}, r"'model\.layers\.2\.[a-z_.]*' is not among the weights"),
    "grown": ({"num_hidden_layers": 1}, r"'model\.layers\.1\.[a-z_.]*' is not in a model"),
    "no bias": ({"attention_bias": False}, r"bias' is not in a model"),
    "vocabulary": ({"vocab_size": 90}, r"has shape \(96, 160\), and by config\.json \(90, 160\)"),
    "class": ({"architectures": ["LlamaForSequenceClassification"]}, r"'score\.weight'"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_folder_whose_configuration_does_not_describe_its_weights_is_refused(
    tmp_path: Path, field: str
) -> None:
    fields, why = FIELDS[field]
    refused(saved(tmp_path / "c", keep, **fields), why)


@pytest.mark.parametrize("recipe", [None, "fp8-row"])
def test_a_folder_is_refused_before_it_is_quantised(tmp_path: Path, recipe: str | None) -> None:
    folder, store = saved(tmp_path / "c", lambda t: t.pop("model.norm.weight")), MemoryStore()
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' is not among the weights"):
        push(store, folder, PublishConfig(url=store.url, quantization=recipe))
    assert not list(store.list(""))


def test_heads_for_later_tokens_in_a_folder_are_published_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {
            name.replace("layers.1.", "layers.2."): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.1." in name
        }
        tensors["mtp.norm.weight"] = torch.ones(160)

    folder = saved(tmp_path / "c", add, num_nextn_predict_layers=1)
    push(FileStore(tmp_path / "chain"), folder, PublishConfig(url="x"))
    assert "from_pretrained leaves" in caplog.text
    assert "'mtp.norm.weight'" in caplog.text


def moe() -> nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


@pytest.mark.parametrize("make", [llama, tied, moe])
def test_what_transformers_saved_is_pushed_without_a_word(
    tmp_path: Path,
    make: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make().save_pretrained(tmp_path / "c")
    capfd.readouterr()
    with caplog.at_level(logging.INFO):
        push(FileStore(tmp_path / "chain"), tmp_path / "c", PublishConfig(url="x"))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "LOAD REPORT" not in "".join(capfd.readouterr())
    assert "Loading weights" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "of_another_library"},
        {"architectures": ["OfAnotherLibrary"]},
        {"architectures": None},
        {"num_hidden_layers": 7, "quantization_config": {"quant_method": "unheard"}},
    ],
)
def test_a_configuration_that_transformers_makes_no_model_of_is_published_as_it_is(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = saved(tmp_path / "c", keep, **fields)
    pushed = push(FileStore(tmp_path / "chain"), folder, PublishConfig(url="x"))
    assert pushed.head.version == 0


def test_an_export_that_its_files_do_not_describe_is_refused(tmp_path: Path) -> None:
    model = llama()
    folder = saved(tmp_path / "c", keep)
    wrong = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    config = PublishConfig(url=str(tmp_path / "wrong"), assets=folder)
    with Publisher(config) as publisher, pytest.raises(ConfigError, match=r"config\.json"):
        publisher.attach(wrong.items, alone=True)
    config = PublishConfig(url=str(tmp_path / "right"), assets=folder)
    with Publisher(config) as publisher:
        publisher.attach(lambda: model.state_dict().items(), alone=True)


class _FabricModule(nn.Module):
    """Holds its module as that of Lightning Fabric does: its state dict is the module's."""

    __module__ = "lightning.fabric.wrappers"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = nn.DataParallel(module)
        self._original_module = module

    def state_dict(self, **settings: Any) -> dict[str, Any]:  # type: ignore[override]
        return self._original_module.state_dict(**settings)


class DeepSpeedEngine(nn.Module):
    """Holds its module as DeepSpeed's engine does."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def dtypes(model: nn.Module, **settings: str) -> dict[str, str]:
    return {w.spec.name: w.spec.dtype for w in collect_weights(model, **settings).weights}  # type: ignore[arg-type]


def folder_of(tensors: dict[str, Tensor], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


# What cannot be published


def one_weight(parameter: nn.Parameter, name: str = "weight") -> nn.Module:
    module = nn.Module()
    module.register_parameter(name, parameter)
    return module


def test_what_deepspeed_partitions_is_refused() -> None:
    parameter: Any = nn.Parameter(torch.zeros(0))
    parameter.ds_id = 7  # as ZeRO marks what it took apart; it needs compilers that CI lacks
    with pytest.raises(ConfigError, match="DeepSpeed") as caught:
        collect_weights(one_weight(parameter))
    assert "push" in caught.value.hint
    assert "iterator" in caught.value.hint


def test_a_model_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="meta device") as caught:
        collect_weights(nn.Linear(3, 2, device="meta"))
    assert "after loading" in caught.value.hint


def test_strided_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="not contiguous") as caught:
        collect_weights(one_weight(nn.Parameter(torch.zeros(4, 6).t())))
    assert "push" in caught.value.hint


@pytest.mark.parametrize(
    ("tensor", "message", "hint"),
    [
        (torch.zeros(3, dtype=torch.complex64), "complex64", "view_as_real"),
        (torch.zeros(3).to(torch.float8_e4m3fnuz), "float8_e4m3fnuz", "another dtype"),
        (torch.eye(3).to_sparse(), "sparse_coo", "to_dense"),
        (torch.zeros(4, 6).t(), "not contiguous", "its `.contiguous()`"),
        (
            torch.zeros(1, 3, 4, 4).to(memory_format=torch.channels_last),
            "channels_last",
            "contiguous",
        ),
    ],
)
def test_the_hint_says_what_to_do_with_such_a_weight(
    tensor: Tensor, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        collect_weights(one_weight(nn.Parameter(tensor, requires_grad=False)))
    assert hint in caught.value.hint


@pytest.mark.parametrize("module", [nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False)])
def test_weights_without_a_shape_are_refused(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match="has no shape yet") as caught:
        collect_weights(module)
    assert "call the model once" in caught.value.hint


def test_a_name_that_no_safetensors_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="reserved key of safetensors") as caught:
        Publisher("memory://reserved").attach(
            one_weight(nn.Parameter(torch.zeros(3)), "__metadata__")
        )
    assert "another name" in caught.value.hint


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        ([(5, torch.zeros(3))], r"yielded \(5, tensor"),
        ([("a", [1, 2])], "not a name and a tensor"),
        ({"a": torch.zeros(3)}, "yielded 'a'"),
        (None, "returned a NoneType"),
    ],
)
def test_an_export_of_something_else_is_refused(yielded: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        collect_weights(lambda: yielded)
    assert "names and torch tensors" in caught.value.hint


@pytest.mark.parametrize("others", [{}, {"full": torch.zeros(3)}])
def test_an_empty_weight_is_refused_before_anything_is_written(others: dict[str, Tensor]) -> None:
    """No edge gives any of it, so nobody could pull the chain."""
    store, tensors = MemoryStore(), {"none": torch.zeros(0, 4)} | others
    with pytest.raises(ConfigError, match=r"'none' is empty: its shape is \(0, 4\)") as caught:
        Publisher("memory://empty", store=store).attach(tensors.items)
    assert "persistent=False" in caught.value.hint
    assert list(store.list("")) == []


def test_a_view_of_negated_memory_is_refused() -> None:
    model = plain_model()
    model[0].weight.data = torch._neg_view(model[0].weight.data)  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"'0\.weight' is a view of negated values"):
        collect_weights(model)


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="no weights"):
        Publisher("memory://nothing").attach(nn.ReLU())


class WithHead(nn.DataParallel[nn.Module]):
    """A wrapper with weights of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weight = nn.Parameter(torch.zeros(2))


def test_weights_of_a_wrapper_are_refused() -> None:
    with pytest.raises(ConfigError, match="'weight' is a weight of WithHead, outside of the model"):
        collect_weights(WithHead(plain_model()))


def test_two_weights_of_one_name_are_refused() -> None:
    model = nn.Module()
    model.inner = WithHead(nn.Linear(2, 2, bias=False))
    with pytest.raises(ConfigError, match=r"two weights .* called 'inner\.weight'"):
        collect_weights(model)


class Renamed(nn.Linear):
    """Saves its weight under another name."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_state_dict_post_hook(self.rename)  # type: ignore[no-untyped-call]

    @staticmethod
    def rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        del module
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


class Transposed(Renamed):
    """Saves another tensor under its name."""

    @staticmethod
    def rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        del module
        state[f"{prefix}weight"] = state[f"{prefix}weight"].T


class Forgetful(Renamed):
    """Saves no bias."""

    @staticmethod
    def rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        del module
        del state[f"{prefix}bias"]


class Counting(nn.Linear):
    """Saves more than tensors."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def get_extra_state(self) -> Any:
        return {"calls": 7}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Renamed, "1.kernel"),
        (Transposed, "1.weight"),
        (Forgetful, "1.bias"),
        (Counting, "1._extra_state"),
    ],
)
def test_a_state_dict_that_is_not_the_tensors_of_the_model_is_refused(
    kind: type[nn.Module], name: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), kind())
    with pytest.raises(ConfigError, match=f"'{name}' is not the same in the model's") as caught:
        collect_weights(model)
    assert "model.state_dict().items()" in caught.value.hint


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "VERA", "OFT", "LORA", "LN_TUNING"])
def test_adapters_of_each_kind_are_refused(kind: str) -> None:
    settings: dict[str, Any] = {"target_modules": ["0"]}
    settings |= {"feedforward_modules": []} if kind == "IA3" else {}
    settings |= {"oft_block_size": 8} if kind == "OFT" else {}
    of_kind = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    made = peft.get_peft_model(plain_model(dtype=torch.float32), of_kind(**settings))
    for model in (made, made.get_base_model()):
        with pytest.raises(ConfigError, match="is an adapter") as caught:
            collect_weights(model)
        assert "adapter_tensors" in caught.value.hint
        assert "merged_tensors" in caught.value.hint


# Names


def test_wrappers_do_not_show_in_names() -> None:
    plain = [w.spec.name for w in collect_weights(plain_model()).weights]
    assert plain == ["0.bias", "0.weight", "1.bias", "1.weight"]
    compiled: nn.Module = torch.compile(plain_model(), backend="eager")  # type: ignore[assignment]
    assert [w.spec.name for w in collect_weights(compiled).weights] == plain
    for wrapper in (nn.DataParallel, DeepSpeedEngine, _FabricModule):
        wrapped = wrapper(compiled)
        assert [w.spec.name for w in collect_weights(wrapped).weights] == plain
    checkpointed = plain_model()
    checkpointed[0] = checkpoint_wrapper(checkpointed[0])  # type: ignore[operator,index]
    assert [w.spec.name for w in collect_weights(checkpointed).weights] == plain


def test_a_wrapper_that_hides_buffers_is_unwrapped() -> None:
    wrapped, plain = _FabricModule(TinyModel()), collect_weights(TinyModel())
    assert collect_weights(wrapped).specs == plain.specs
    assert "steps" in dtypes(wrapped)
    averaged = torch.optim.swa_utils.AveragedModel(TinyModel())
    assert collect_weights(averaged).specs == plain.specs


@pytest.mark.parametrize(
    "name", ["module", "_module", "_orig_mod", "my_orig_mod", "_checkpoint_wrapped_module"]
)
def test_a_child_keeps_its_name_whatever_it_is(name: str) -> None:
    model = nn.Module()
    model.add_module(name, nn.Linear(2, 2))
    assert list(dtypes(model)) == [f"{name}.bias", f"{name}.weight"]


def test_a_wrapper_that_is_not_known_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    collect_weights(model)
    assert "weights are published as 'module.*'" in caplog.text
    caplog.clear()
    model.head = nn.Linear(2, 2)
    collect_weights(model)
    assert "has nothing but" not in caplog.text


def test_a_model_that_is_called_as_a_wrapper_keeps_all_of_its_weights() -> None:
    def made(self: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    model = type("DataParallel", (nn.Module,), {"__init__": made})()
    assert list(dtypes(model)) == ["head.bias", "head.weight", "module.bias", "module.weight"]


def test_tied_weights_are_published_once_under_their_first_name() -> None:
    source = collect_weights(TinyModel())
    assert source.aliases == {"head.weight": "embed.weight"}
    assert [w.spec.name for w in source.weights].count("embed.weight") == 1
    assert "head.weight" not in {w.spec.name for w in source.weights}
    assert source.table().aliases == {"head.weight": "embed.weight"}


def test_tied_weights_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    config = CamembertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    model = CamembertForCausalLM(config)  # its head, whose names are left out, comes first
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    source = collect_weights(model)
    assert {spec.name for spec in source.specs} == set(saved)
    assert source.aliases == {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


def test_persistent_buffers_are_weights_and_others_are_not() -> None:
    assert dtypes(TinyModel())["steps"] == "I64"
    assert "scratch" not in dtypes(TinyModel())


# What arrives in the chain


def test_special_values_arrive_with_their_bits(
    attach: Callable[..., Publisher], store: MemoryStore
) -> None:
    model = plain_model()
    publisher = attach(model)
    special = [0x8000, 0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x0000]
    with torch.no_grad():
        bits = next(model.parameters()).view(-1).view(torch.uint16)
        bits[: len(special)] = torch.tensor(special, dtype=torch.uint16)
    publisher.publish()
    publisher.flush()
    assert recompute(store)[1].state["0.weight"][: len(special)].tolist() == special


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' is both"):
        specs_of([TensorSpec("a", "F32", (1,)), TensorSpec("a", "BF16", (1,))])


def state(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    found = plain_model().state_dict().items()
    return {name: torch.randn(one.shape).to(dtype) for name, one in found}


def loaded(tensors: dict[str, Tensor], dtype: torch.dtype, origin: Path) -> nn.Module:
    """Return a model with the values of a file, that names another folder as its origin."""
    model = plain_model(dtype=dtype)
    model.load_state_dict(tensors)
    model.config = SimpleNamespace(_name_or_path=str(origin))  # type: ignore[assignment]
    return model


def test_a_model_of_a_subfolder_has_the_dtypes_of_that_folder(tmp_path: Path) -> None:
    teacher, student = state(1, torch.bfloat16), state(2, torch.float32)
    folder_of(teacher, tmp_path)
    folder_of(student, tmp_path / "student")
    assert set(dtypes(loaded(student, torch.float32, tmp_path)).values()) == {"F32"}
    assert set(dtypes(loaded(teacher, torch.float32, tmp_path)).values()) == {"BF16"}
    folder_of(state(3, torch.bfloat16), tmp_path / "student" / "bf16")
    masters = loaded(state(3, torch.bfloat16), torch.float32, tmp_path)
    assert set(dtypes(masters).values()) == {"BF16"}


def test_a_model_of_a_subfolder_is_not_refused_for_the_dtypes_of_the_root(tmp_path: Path) -> None:
    folder_of(state(1, torch.float32), tmp_path)
    folder_of(state(2, torch.bfloat16), tmp_path / "student")
    trained = loaded(state(3, torch.bfloat16), torch.bfloat16, tmp_path)
    assert set(dtypes(trained).values()) == {"BF16"}


def test_dtypes_are_the_models_where_several_folders_may_be_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of(state(1, torch.bfloat16), tmp_path)
    trained = loaded(state(3, torch.float32), torch.float32, tmp_path)
    assert set(dtypes(trained).values()) == {"BF16"}
    folder_of(state(2, torch.bfloat16), tmp_path / "checkpoint-1")
    assert set(dtypes(trained).values()) == {"BF16"}
    assert not caplog.text
    folder_of(state(2, torch.float32), tmp_path / "student")
    assert set(dtypes(trained).values()) == {"F32"}
    assert "several sets of weights that may be the model's" in caplog.text
    assert "dtype='BF16'" in caplog.text


def test_weights_of_another_shape_say_nothing_of_dtypes(tmp_path: Path) -> None:
    wide = {
        name: torch.zeros(*one.shape, 2).bfloat16()
        for name, one in state(1, torch.bfloat16).items()
    }
    folder_of(wide, tmp_path)
    assert set(dtypes(loaded(state(1, torch.float32), torch.float32, tmp_path)).values()) == {"F32"}


def test_a_model_with_other_rows_keeps_the_dtypes_of_its_origin(tmp_path: Path) -> None:
    saved = state(1, torch.bfloat16)
    saved["0.weight"] = torch.zeros(7, saved["0.weight"].shape[1]).bfloat16()
    folder_of(saved, tmp_path)
    model = loaded(state(1, torch.float32), torch.float32, tmp_path)
    assert set(dtypes(model).values()) == {"BF16"}


def test_a_subfolder_with_fewer_layers_is_no_other_models(tmp_path: Path) -> None:
    student = state(1, torch.float32)
    folder_of(state(2, torch.bfloat16) | {"9.weight": torch.zeros(2, 2).bfloat16()}, tmp_path)
    folder_of(student, tmp_path / "student")
    trained = loaded(state(3, torch.float32), torch.float32, tmp_path)
    assert set(dtypes(trained).values()) == {"F32"}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_variant_is_not_refused_for_the_dtypes_of_the_other_weights(
    tmp_path: Path, shards: int
) -> None:
    folder_of(state(1, torch.bfloat16), tmp_path)
    half = {name: one.half() for name, one in state(1, torch.bfloat16).items()}
    if shards == 1:
        save_file(half, tmp_path / "model.fp16.safetensors")
    else:
        for at, name in enumerate(half):
            file = f"model.fp16-{at + 1:05}-of-{len(half):05}.safetensors"
            save_file({name: half[name]}, tmp_path / file)
    assert set(dtypes(loaded(half, torch.float16, tmp_path)).values()) == {"F16"}
    trained = loaded(state(3, torch.float16), torch.float16, tmp_path)
    assert set(dtypes(trained).values()) == {"F16"}


def test_a_dtype_that_no_set_of_weights_has_is_refused(tmp_path: Path) -> None:
    folder_of(state(1, torch.bfloat16), tmp_path)
    save_file(state(1, torch.float32), tmp_path / "model.fp32.safetensors")
    with pytest.raises(ConfigError, match="F16 in the model and BF16 in its checkpoint"):
        collect_weights(loaded(state(1, torch.float16), torch.float16, tmp_path))


def test_a_resumed_run_keeps_the_dtypes_of_its_folder(tmp_path: Path) -> None:
    folder_of(state(1, torch.bfloat16), tmp_path)
    masters = state(2, torch.float32)
    folder_of(masters, tmp_path / "checkpoint-500")
    assert set(dtypes(loaded(masters, torch.float32, tmp_path)).values()) == {"BF16"}
