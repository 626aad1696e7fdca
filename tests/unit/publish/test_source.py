import json
import logging
from collections.abc import Callable
from functools import partial
from itertools import product
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
from deltachain.store import MemoryStore
from deltachain.types import TensorSpec
from tests.support.models import TinyModel, plain_model, recompute
from tests.unit.publish.chains import Attach
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


def published(model: Any, store: MemoryStore | None = None, **settings: Any) -> None:
    store = store or MemoryStore()
    with Publisher(PublishConfig(url=store.url, **settings), store=store) as publisher:
        publisher.attach(model, alone=True)
        assert publisher.version == 0


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("loaded", [True, False])
def test_a_model_of_other_weights_than_its_configuration_has_is_refused(
    tmp_path: Path, store: MemoryStore, edit: str, *, loaded: bool
) -> None:
    model = llama()
    if loaded:
        model.save_pretrained(tmp_path / "origin")
        model = LlamaForCausalLM.from_pretrained(tmp_path / "origin", dtype=torch.bfloat16)
    change, why = EDITS[edit]
    change(model)
    with pytest.raises(ConfigError, match=why) as caught:
        published(model, store)
    assert "num_hidden_layers" in caught.value.hint
    assert "PublishConfig.assets" in caught.value.hint
    assert not list(store.list(""))


def test_a_model_whose_class_ties_nothing_is_published() -> None:
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
    published(BigBirdPegasusForCausalLM(config))


def test_a_model_without_a_layer_whose_configuration_says_so_is_published() -> None:
    model = llama()
    prune(model)
    model.config.num_hidden_layers = 1
    published(model)


def test_a_head_of_its_own_beside_a_model_is_published_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = llama()
    model.v_head = nn.Linear(160, 1)
    published(model)
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


def no_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "pruned": ({"num_hidden_layers": 3}, r"'model\.layers\.2\.[a-z_.]*' is not among the weights"),
    "grown": ({"num_hidden_layers": 1}, r"'model\.layers\.1\.[a-z_.]*' is not in a model"),
    "no bias": ({"attention_bias": False}, r"bias' is not in a model"),
    "vocabulary": ({"vocab_size": 90}, r"has shape \(96, 160\), and by config\.json \(90, 160\)"),
    "class": ({"architectures": ["LlamaForSequenceClassification"]}, r"'score\.weight'"),
    "no norm": ({}, r"'model\.norm\.weight' is not among the weights"),
}


@pytest.mark.parametrize(("field", "recipe"), [*product(FIELDS, [None]), ("no norm", "fp8-row")])
def test_a_folder_whose_configuration_does_not_describe_its_weights_is_refused(
    tmp_path: Path, store: MemoryStore, field: str, recipe: str | None
) -> None:
    """Before it is quantised, too."""
    fields, why = FIELDS[field]
    folder = saved(tmp_path / "c", no_norm if field == "no norm" else keep, **fields)
    with pytest.raises(ConfigError, match=why) as caught:
        push(store, folder, PublishConfig(url=store.url, quantization=recipe))
    assert "config.json" in caught.value.hint
    assert not list(store.list(""))


def test_heads_for_later_tokens_in_a_folder_are_published_and_told(
    tmp_path: Path, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {
            name.replace("layers.1.", "layers.2."): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.1." in name
        }
        tensors["mtp.norm.weight"] = torch.ones(160)

    push(store, saved(tmp_path, add, num_nextn_predict_layers=1), PublishConfig(url="x"))
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
    store: MemoryStore,
    make: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make().save_pretrained(tmp_path / "c")
    capfd.readouterr()
    with caplog.at_level(logging.INFO):
        push(store, tmp_path / "c", PublishConfig(url="x"))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    said = "".join(capfd.readouterr())
    assert "LOAD REPORT" not in said
    assert "Loading weights" not in said


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
    tmp_path: Path, store: MemoryStore, fields: dict[str, Any]
) -> None:
    pushed = push(store, saved(tmp_path, keep, **fields), PublishConfig(url="x"))
    assert pushed.head.version == 0


def test_an_export_that_its_files_do_not_describe_is_refused(tmp_path: Path) -> None:
    model, folder = llama(), saved(tmp_path / "c", keep)
    wrong = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"config\.json"):
        published(wrong.items, assets=folder)
    published(lambda: model.state_dict().items(), assets=folder)


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
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


# What cannot be published


def one_weight(tensor: Tensor, name: str = "weight") -> nn.Module:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def offloaded() -> nn.Module:
    """As ZeRO-3 of DeepSpeed marks what is on NVMe."""
    module: Any = one_weight(torch.zeros(0))
    module.weight.ds_id, module.weight.ds_numel = 7, 6
    module.weight.ds_tensor = torch.zeros(3)
    module.weight.ds_tensor.status = SimpleNamespace(name="NOT_AVAILABLE")
    return module  # type: ignore[no-any-return]


def negated() -> nn.Module:
    model: Any = plain_model()
    model[0].weight.data = torch._neg_view(model[0].weight.data)
    return model  # type: ignore[no-any-return]


class WithHead(nn.DataParallel[nn.Module]):
    """A wrapper with weights of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weight = nn.Parameter(torch.zeros(2))


def twice_one_name() -> nn.Module:
    model = nn.Module()
    model.inner = WithHead(nn.Linear(2, 2, bias=False))
    return model


def saving(change: Callable[[dict[str, Any]], object]) -> nn.Module:
    """A model of whose second layer something else is saved."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    def saved(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        del module
        change(state)

    model[1].register_state_dict_post_hook(saved)
    return model


class Counting(nn.Linear):
    """Saves more than tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": 7}


NOT_THE_SAME = "is not the same in the model's"
STATE_DICT = ("model.state_dict().items()",)

REFUSED: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "on NVMe": (offloaded, "offloaded to NVMe", ("offload to the CPU",)),
    "without data": (lambda: nn.Linear(3, 2, device="meta"), "meta device", ("after loading",)),
    "strided": (
        lambda: one_weight(torch.zeros(4, 6).t()),
        "not contiguous",
        ("push", "its `.contiguous()`"),
    ),
    "channels last": (
        lambda: one_weight(torch.zeros(1, 3, 4, 4).to(memory_format=torch.channels_last)),
        "channels_last",
        ("contiguous",),
    ),
    "complex": (
        lambda: one_weight(torch.zeros(3, dtype=torch.complex64)),
        "complex64",
        ("view_as_real",),
    ),
    "another fp8": (
        lambda: one_weight(torch.zeros(3).to(torch.float8_e4m3fnuz)),
        "float8_e4m3fnuz",
        ("another dtype",),
    ),
    "sparse": (lambda: one_weight(torch.eye(3).to_sparse()), "sparse_coo", ("to_dense",)),
    "without a shape": (lambda: nn.LazyLinear(4), "has no shape yet", ("call the model once",)),
    "buffers without a shape": (
        lambda: nn.LazyBatchNorm1d(affine=False),
        "has no shape yet",
        ("call the model once",),
    ),
    "a name that no safetensors file can have": (
        lambda: one_weight(torch.zeros(3), "__metadata__"),
        "reserved key of safetensors",
        ("another name",),
    ),
    "a view of negated memory": (negated, r"'0\.weight' is a view of negated values", ()),
    "no weights": (nn.ReLU, "no weights", ()),
    "weights of a wrapper": (
        lambda: WithHead(plain_model()),
        "'weight' is a weight of WithHead, outside of the model",
        (),
    ),
    "one name twice": (twice_one_name, r"two weights .* called 'inner\.weight'", ()),
    "saved under another name": (
        lambda: saving(lambda state: state.update({"1.kernel": state.pop("1.weight")})),
        f"'1.kernel' {NOT_THE_SAME}",
        STATE_DICT,
    ),
    "saved as another tensor": (
        lambda: saving(lambda state: state.update({"1.weight": state["1.weight"].T})),
        f"'1.weight' {NOT_THE_SAME}",
        STATE_DICT,
    ),
    "not saved": (
        lambda: saving(lambda state: state.pop("1.bias")),
        f"'1.bias' {NOT_THE_SAME}",
        STATE_DICT,
    ),
    "function that was called": (
        lambda: plain_model().named_parameters(),
        "a generator is neither a module nor a function",
        ("without calling it",),
    ),
    "iterator that is used up": (
        lambda: partial(iter, plain_model().named_parameters()),
        "the export yielded no tensors",
        ("a new iterator each time",),
    ),
    "an export of one name twice": (lambda: lambda: 2 * [("w", torch.zeros(2))], "'w' twice", ()),
    "an export of nothing": (lambda: list, "no weights", ()),
    "more than tensors": (
        lambda: nn.Sequential(nn.Linear(3, 3), Counting(3, 2)),
        f"'1._extra_state' {NOT_THE_SAME}",
        STATE_DICT,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_such_a_model_is_refused_and_the_hint_says_what_to_do(
    case: str, store: MemoryStore
) -> None:
    make, message, hints = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as caught:
        published(make(), store)
    assert all(hint in caught.value.hint for hint in hints)
    assert not list(store.list(""))


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
def test_an_empty_weight_is_refused_before_anything_is_written(
    others: dict[str, Tensor], store: MemoryStore
) -> None:
    """No edge gives any of it, so nobody could pull the chain."""
    tensors = {"none": torch.zeros(0, 4)} | others
    with pytest.raises(ConfigError, match=r"'none' is empty: its shape is \(0, 4\)") as caught:
        published(tensors.items, store)
    assert "persistent=False" in caught.value.hint
    assert list(store.list("")) == []


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
    checkpointed: Any = plain_model()
    checkpointed[0] = checkpoint_wrapper(checkpointed[0])
    wrappers = (nn.DataParallel, DeepSpeedEngine, _FabricModule)
    for wrapped in (compiled, checkpointed, *(wrapper(compiled) for wrapper in wrappers)):
        assert [w.spec.name for w in collect_weights(wrapped).weights] == plain


@pytest.mark.parametrize("wrapper", [_FabricModule, torch.optim.swa_utils.AveragedModel])
def test_a_wrapper_that_hides_buffers_is_unwrapped(wrapper: Callable[..., nn.Module]) -> None:
    specs = collect_weights(wrapper(TinyModel())).specs
    assert specs == collect_weights(TinyModel()).specs
    assert "steps" in [spec.name for spec in specs]


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
    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    names = ["head.bias", "head.weight", "module.bias", "module.weight"]
    assert list(dtypes(DataParallel())) == names


def test_tied_weights_are_published_once_and_buffers_if_they_are_persistent() -> None:
    source = collect_weights(TinyModel())
    names = [w.spec.name for w in source.weights]
    assert source.aliases == source.table().aliases == {"head.weight": "embed.weight"}
    assert names.count("embed.weight") == 1
    assert "head.weight" not in names
    assert dtypes(TinyModel())["steps"] == "I64"
    assert "scratch" not in names


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


# What arrives in the chain


def test_special_values_arrive_with_their_bits(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publisher = attach(model)
    special = [0x8000, 0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x0000]
    with torch.no_grad():
        bits = next(model.parameters()).view(-1).view(torch.uint16)
        bits[: len(special)] = torch.tensor(special, dtype=torch.uint16)
    publisher.publish().result()
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


BF16, F32 = torch.bfloat16, torch.float32


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(*one.shape, 2, dtype=one.dtype) for name, one in tensors.items()}


def fewer_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"0.weight": tensors["0.weight"][:7].clone()}


def more_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"9.weight": torch.zeros(2, 2).bfloat16()}


TEACHER_AND_STUDENT = {"": state(1, BF16), "student": state(2, F32)}

FOLDERS: dict[str, tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], torch.dtype, str]] = {
    "a model of a subfolder": (TEACHER_AND_STUDENT, state(2, F32), F32, "F32"),
    "a model of the root": (TEACHER_AND_STUDENT, state(1, BF16), F32, "BF16"),
    "a model of a folder in a subfolder": (
        TEACHER_AND_STUDENT | {"student/bf16": state(3, BF16)},
        state(3, BF16),
        F32,
        "F32",
    ),
    "of a subfolder, and the root has other dtypes": (
        {"": state(1, F32), "student": state(2, BF16)},
        state(3, BF16),
        BF16,
        "BF16",
    ),
    "weights of another shape": ({"": wide(state(1, BF16))}, state(1, F32), F32, "F32"),
    "other rows": ({"": fewer_rows(state(1, BF16))}, state(1, F32), F32, "BF16"),
    "a subfolder with fewer layers": (
        {"": more_layers(state(2, BF16)), "student": state(1, F32)},
        state(3, F32),
        F32,
        "F32",
    ),
    "a resumed run": (
        {"": state(1, BF16), "checkpoint-500": state(2, F32)},
        state(2, F32),
        F32,
        "BF16",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_model_has_the_dtypes_of_the_folder_that_it_is_of(tmp_path: Path, case: str) -> None:
    folders, values, dtype, wire = FOLDERS[case]
    for name, tensors in folders.items():
        folder_of(tensors, tmp_path / name)
    assert set(dtypes(loaded(values, dtype, tmp_path)).values()) == {wire}


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
