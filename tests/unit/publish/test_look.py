import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BlipImageProcessor,
    InstructBlipProcessor,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from deltachain.chain.chain import Chain
from deltachain.checkpoint import ASSET_NBYTES
from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.assets import collect_assets
from deltachain.publish.model.kept_files import with_dtype_of
from deltachain.publish.model.refusals import MemoryRange, ModelForm, TensorForm
from deltachain.publish.model.source import collect_weights
from deltachain.publish.push import push
from deltachain.store import FileStore, MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.subscribe.targets.folder import OwnFolder, write_assets
from deltachain.types import TensorSpec
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same
from tests.support.values import present
from tests.unit.publish.library import llama

UNKNOWN = "<unk>"

OTHERS = (
    "source.spm",
    "qwen.tiktoken",
    "vocab.bpe",
    "tokenizer.model.v3",
    "additional_chat_templates/tools.jinja",
    "1_Pooling/config.json",
    "modules.json",
    "qformer_tokenizer/tokenizer_config.json",
    "language_model/unigrams.txt",
    "prophetnet.tokenizer",
)
NO_FILES = ("trainer_state.json", "modeling_x.py", "2_Dense/x.py", "checkpoint-5/config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a model and a tokenizer, with files of other kinds beside them."""
    there = tmp_path / "origin"
    llama().save_pretrained(there)
    words = {f"t{n}": n for n in range(63)} | {UNKNOWN: 63}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token=UNKNOWN)), unk_token=UNKNOWN
    )
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(there)
    for name in (*OTHERS, *NO_FILES):
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_text("{}")
    return there


def pull(url: Path, out: Path) -> Path:
    store = FileStore(url)
    with Subscriber(str(url), OwnFolder(out), store=store) as subscriber:
        subscriber.update()
        write_assets(subscriber.chain, out)
    return out


def publish(model: nn.Module, url: Path, *others: object) -> None:
    config = PublishConfig(url=str(url))
    with Publisher(config) as publisher:
        publisher.attach(model, assets=collect_assets(model, config, *others), alone=True)


def test_files_of_every_kind_come_with_the_checkpoint(tmp_path: Path, folder: Path) -> None:
    push(FileStore(tmp_path / "chain"), folder, PublishConfig(url="x"))
    pulled = pull(tmp_path / "chain", tmp_path / "out")
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    for name in there - {"model.safetensors", *NO_FILES}:
        assert (pulled / name).read_bytes() == (folder / name).read_bytes(), name
    assert not any((pulled / name).exists() for name in NO_FILES)


def test_small_files_that_are_not_carried_are_named_in_one_line(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("README.md", ".gitattributes", "onnx/model.onnx", "my_tokenizer/v2/a.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    with (folder / "large.json").open("wb") as file:
        file.truncate(ASSET_NBYTES + 1)
    named = ["2_Dense/x.py", "large.json", "modeling_x.py", "my_tokenizer/v2/", "onnx/"]
    push(FileStore(tmp_path / "chain"), folder, PublishConfig(url="x"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    collect_assets(model, PublishConfig(url="x"), AutoTokenizer.from_pretrained(folder))
    lines = [line for line in caplog.messages if "not published" in line]
    assert lines == [f"{folder}: not published, followers lack them: {', '.join(named)}"] * 2


def test_a_tokenizer_of_a_processor_comes_in_its_folder(tmp_path: Path, folder: Path) -> None:
    shutil.rmtree(folder / "additional_chat_templates")
    main, other = (AutoTokenizer.from_pretrained(folder) for _ in range(2))
    other.add_tokens(["[DEC]"])
    processor = InstructBlipProcessor(BlipImageProcessor(), main, other)
    model = llama()
    publish(model, tmp_path / "chain", processor)
    processor.save_pretrained(folder)
    push(FileStore(tmp_path / "pushed"), folder, PublishConfig(url="x"))
    for name in ("chain", "pushed"):
        pulled = pull(tmp_path / name, tmp_path / f"{name}-out")
        found: Any = InstructBlipProcessor.from_pretrained(pulled)
        assert found.qformer_tokenizer.convert_tokens_to_ids("[DEC]") == 64


def test_nothing_is_written_through_a_link_in_the_followers_folder(
    tmp_path: Path, folder: Path
) -> None:
    push(FileStore(tmp_path / "chain"), folder, PublishConfig(url="x"))
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out/1_Pooling").symlink_to(tmp_path / "elsewhere")
    pull(tmp_path / "chain", tmp_path / "out")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_model_that_is_as_it_was_loaded_has_the_files_of_its_origin(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    files = collect_assets(model, PublishConfig(url="x"), AutoTokenizer.from_pretrained(folder))
    assert files == {name: (folder / name).read_bytes() for name in files}
    assert set(OTHERS) | {"config.json", "tokenizer.json"} <= set(files)


@pytest.mark.parametrize(
    ("wire", "saved"), [(None, torch.bfloat16), ("F32", torch.float32), ("F16", torch.float16)]
)
def test_the_pulled_folder_loads_in_the_dtype_that_was_published(
    tmp_path: Path, folder: Path, wire: str | None, saved: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight += 1e-4
    with Publisher(PublishConfig(url=str(tmp_path / "chain"), dtype=wire)) as publisher:
        publisher.attach(model, alone=True)
    loaded = AutoModelForCausalLM.from_pretrained(pull(tmp_path / "chain", tmp_path / "out"))
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(saved))


def test_a_configuration_without_a_folder_states_the_dtype_of_its_model(tmp_path: Path) -> None:
    model = llama().float()
    model.config.dtype = torch.bfloat16
    publish(model, tmp_path / "chain")
    pulled = pull(tmp_path / "chain", tmp_path / "out")
    assert json.loads((pulled / "config.json").read_bytes())["dtype"] == "float32"


ROWS = (("F32", 30), ("BF16", 20), ("I64", 90))


@pytest.mark.parametrize(
    ("stated", "then"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"torch_dtype": "float16", "a": 1}, {"torch_dtype": "float32", "a": 1}),
        ({"text_config": {"dtype": "float16"}}, {"text_config": {"dtype": "float32"}}),
    ],
)
def test_the_stated_dtype_is_that_of_most_elements(
    stated: dict[str, Any], then: dict[str, Any]
) -> None:
    specs = [TensorSpec(str(n), dtype, (numel,)) for n, (dtype, numel) in enumerate(ROWS)]
    files = {"config.json": json.dumps(stated).encode(), "tokenizer.json": b"{}"}
    made = with_dtype_of(files, specs)
    assert json.loads(made["config.json"]) == then
    assert made["tokenizer.json"] == b"{}"


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"dtype": "float32", "vision_config": {"dtype": "bfloat16"}}, "F32"),
        ({"dtype": None}, "F32"),
        ({"vocab_config": {"dtype": 7}}, "F32"),
        ({"dtype": "bfloat16"}, "F8_E4M3"),
        ({"dtype": "bfloat16", "quantization_config": {}}, "F32"),
    ],
)
def test_what_states_no_other_dtype_stays_as_it_is(stated: dict[str, Any], dtype: str) -> None:
    files = {"config.json": json.dumps(stated).encode()}
    specs = [TensorSpec("a", dtype, (30,)), TensorSpec("b", "BF16", (20,))]
    assert with_dtype_of(files, specs) == files


def test_after_a_resize_the_pulled_folder_loads(tmp_path: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.chat_template = "{{ messages }} now"
    model.resize_token_embeddings(len(tokenizer))
    publish(model, tmp_path / "chain", tokenizer)
    pulled = pull(tmp_path / "chain", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(pulled)
    name = "model.embed_tokens.weight"
    there = loaded.state_dict()[name]
    assert there.shape[0] == len(tokenizer)
    assert torch.equal(there, model.state_dict()[name].bfloat16())
    again = AutoTokenizer.from_pretrained(pulled)
    assert again.convert_tokens_to_ids("</tool>") == tokenizer.convert_tokens_to_ids("</tool>")
    assert again.chat_template == "{{ messages }} now"
    origin = json.loads((folder / "config.json").read_bytes())
    assert json.loads((pulled / "config.json").read_bytes()).get("dtype") == origin.get("dtype")
    assert (pulled / "source.spm").exists()


def test_a_template_that_was_removed_is_not_published(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    model = AutoModelForCausalLM.from_pretrained(folder)
    files = collect_assets(model, PublishConfig(url="x"), tokenizer)
    assert "chat_template.jinja" not in files
    assert not json.loads(files["tokenizer_config.json"])["chat_template"]


def test_another_head_is_named_in_the_configuration(tmp_path: Path, folder: Path) -> None:
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=5)
    model.config.pad_token_id = 0
    publish(model, tmp_path / "chain")
    pulled = pull(tmp_path / "chain", tmp_path / "out")
    loaded = LlamaForSequenceClassification.from_pretrained(pulled)
    assert torch.equal(loaded.score.weight, model.score.weight.to(loaded.score.weight.dtype))
    named = json.loads((pulled / "config.json").read_bytes())["architectures"]
    assert named == ["LlamaForSequenceClassification"]


def test_a_head_that_the_configuration_does_not_describe_is_refused(
    tmp_path: Path, folder: Path
) -> None:
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=5)
    model.score = nn.Linear(model.config.hidden_size, 7, bias=False)
    with pytest.raises(ConfigError, match=r"'score\.weight' has shape") as caught:
        publish(model, tmp_path / "chain")
    assert "num_labels" in caught.value.hint
    assert not (tmp_path / "chain").exists()


@pytest.mark.parametrize("told", [True, False])
def test_a_tie_that_the_configuration_denies_is_refused(tmp_path: Path, *, told: bool) -> None:
    model = llama(tie_word_embeddings=not told)
    model.config.tie_word_embeddings = told
    with pytest.raises(ConfigError, match=f"tie_word_embeddings={told}") as caught:
        publish(model, tmp_path / "chain")
    assert f"tie_word_embeddings = {not told}" in caught.value.hint


def edit(folder: Path, name: str, **fields: Any) -> None:
    document = json.loads((folder / name).read_bytes())
    (folder / name).write_text(json.dumps(document | fields))


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


CHANGES = {
    "rope_theta": lambda f: edit(f, "config.json", rope_parameters={"rope_theta": 77.0}),
    "eps": lambda f: edit(f, "config.json", rms_norm_eps=0.5),
    "generation": lambda f: edit(f, "generation_config.json", eos_token_id=5),
    "template": lambda f: write(f, "chat_template.jinja", "{{ other }}"),
    "spm": lambda f: write(f, "source.spm", "other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_changed_between_two_pushes_are_refused(
    tmp_path: Path, folder: Path, change: str
) -> None:
    store, config = FileStore(tmp_path / "chain"), PublishConfig(url="x")
    push(store, folder, config)
    CHANGES[change](folder)
    more(folder)
    with pytest.raises(ChainMismatchError, match=r"config\.json|jinja|spm") as caught:
        push(store, folder, config)
    assert "another URL" in caught.value.hint
    head = present(Chain.open(store).head())
    assert head.version == 0


def more(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight += 1
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(model.state_dict(), folder / "model.safetensors")


def test_files_that_only_another_run_wrote_are_no_change(tmp_path: Path, folder: Path) -> None:
    store, config = FileStore(tmp_path / "chain"), PublishConfig(url="x")
    push(store, folder, config)
    edit(folder, "config.json", transformers_version="9.9", use_cache=False, _name_or_path="x")
    (folder / "source.spm").unlink()
    more(folder)
    assert push(store, folder, config).head.version == 1


def test_a_trainer_that_starts_again_with_another_configuration_is_refused(
    tmp_path: Path, folder: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    publish(model, tmp_path / "chain")
    publish(model, tmp_path / "chain")
    model.config.rms_norm_eps = 0.5
    with pytest.raises(ChainMismatchError, match=r"rms_norm_eps"):
        publish(model, tmp_path / "chain")


def test_a_configuration_that_changes_between_two_publishes_is_refused(
    tmp_path: Path, folder: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))) as publisher:
        publisher.attach(model, alone=True)
        model.config.use_cache, known = False, model.config.rms_norm_eps
        model.config.attention_dropout = 0.25  # of training alone
        model.config.router_aux_loss_coef = 0.5
        publisher.publish(step=1).result()
        model.config.rms_norm_eps = 0.5
        with pytest.raises(ConfigError, match="rms_norm_eps"):
            publisher.publish(step=2).result()
        model.config.rms_norm_eps = known


def test_generation_settings_that_change_while_a_model_is_trained_are_told_once(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))) as publisher:
        publisher.attach(model, alone=True)
        publisher.publish(step=1).result()
        assert "generation settings" not in caplog.text
        model.generation_config.eos_token_id = model.config.eos_token_id = 5
        for step in (2, 3):
            publisher.publish(step=step).result()
        assert caplog.text.count("generation settings changed in 'eos_token_id'") == 1
        model.generation_config.temperature = 0.25
        publisher.publish(step=4).result()
        assert "changed in 'eos_token_id', 'temperature'" in caplog.text


def test_the_configuration_of_a_dequantised_model_says_its_own_dtype(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    model = llama().float()
    model.config._name_or_path = str(folder)
    model.config.dtype = torch.float32
    files = collect_assets(model, PublishConfig(url="memory://x"))
    written = json.loads(files["config.json"])
    assert "quantization_config" not in written
    assert written["dtype"] == "float32"


@pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id"])
def test_a_token_that_changes_in_the_configuration_alone_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    model = llama(eos_token_id=2, pad_token_id=0)
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))) as publisher:
        publisher.attach(model, alone=True)
        setattr(model.config, field, 7)
        publisher.publish(step=1).result()
    assert f"generation settings changed in {field!r}" in caplog.text


Attach = Callable[..., Publisher]


def frozen_first(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Return a plain model whose first weight does not require a gradient."""
    model: Any = plain_model(dtype=dtype)
    model[0].weight.requires_grad_(False)
    found: nn.Sequential = model
    return found


@pytest.fixture
def quantising(store: MemoryStore) -> Iterator[Attach]:
    """Attach a publisher that quantises, or does not."""
    made: list[Publisher] = []

    def build(model: nn.Module, quantization: str | None, **settings: Any) -> Publisher:
        config = PublishConfig(url=store.url, quantization=quantization, **settings)
        made.append(Publisher(config, store=store))
        return made[-1].attach(model, assets={"config.json": b"{}"})

    yield build
    for publisher in made:
        with suppress(ConfigError):
            publisher.close()


def changed_(model: nn.Module) -> None:
    with torch.no_grad():
        list(model.parameters())[-1].add_(1)


def refused(publisher: Publisher, store: MemoryStore, message: str) -> ConfigError:
    """Publish, and see the refusal; nothing is committed, and the refusal is always the same."""
    version = publisher.version
    for _ in range(2):
        with pytest.raises(ConfigError, match=message) as caught:
            publisher.publish()
    assert max(recompute(store)) == version
    assert caught.value.hint
    return caught.value


# Memory


def smaller(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(2, 24, dtype=weight.dtype)


def empty(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(0, dtype=weight.dtype)


def freed(weight: nn.Parameter) -> None:
    """As offloaders do: the tensor stays, its storage goes."""
    weight.data = weight.data.clone()
    weight.untyped_storage().resize_(0)


def cut(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()
    weight.untyped_storage().resize_(weight.untyped_storage().nbytes() // 2)


def swapped(weight: nn.Parameter) -> None:
    weight.data = weight.data.t().contiguous().t()


def halved(weight: nn.Parameter) -> None:
    weight.data = weight.data.half()


OTHER_DATA = [
    (smaller, r"is torch.bfloat16\(2, 24\), and was torch.bfloat16\(40, 24\)"),
    (empty, r"is torch.bfloat16\(0,\), and was torch.bfloat16\(40, 24\)"),
    (freed, "needs 1920 bytes of memory, of which 0 are there"),
    (cut, "needs 1920 bytes of memory, of which 960 are there"),
    (swapped, "not contiguous"),
    (halved, r"is torch.float16\(40, 24\), and was torch.bfloat16"),
]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("quantization", [None, "fp8-block"])
@pytest.mark.parametrize(("change", "message"), OTHER_DATA)
def test_other_data_of_a_weight_is_refused_before_it_is_read(
    change: Callable[[nn.Parameter], None],
    message: str,
    quantization: str | None,
    frozen: bool,
    store: MemoryStore,
    quantising: Attach,
) -> None:
    model: Any = frozen_first() if frozen else plain_model()
    publisher = quantising(model, quantization)
    change(model[0].weight)
    refused(publisher, store, rf"'0.weight'.* {message}")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantization", [None, "fp8-block", "int8-row"])
def test_the_trainer_may_resize_what_was_published(
    quantization: str | None, dtype: torch.dtype, frozen: bool, quantising: Attach
) -> None:
    model: Any = frozen_first(dtype) if frozen else plain_model(dtype=dtype)
    publisher = quantising(model, quantization, dtype="BF16")
    changed_(model)
    publisher.publish().result()
    publisher.flush()
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
        parameter.data.resize_(1000, 1000)


def test_freed_memory_that_is_back_is_followed(store: MemoryStore, attach: Attach) -> None:
    model: Any = frozen_first()
    publisher = attach(model)
    kept = [(p, p.detach().clone()) for p in model.parameters()]
    for parameter, _ in kept:
        parameter.untyped_storage().resize_(0)
    refused(publisher, store, "are there")
    for parameter, values in kept:
        parameter.untyped_storage().resize_(values.untyped_storage().nbytes())
        parameter.data.copy_(values)
    changed_(model)
    assert publisher.publish().result().version == 1
    assert same(recompute(store)[1].state, bits_of(model))


def test_a_model_that_is_on_the_meta_device_is_refused(store: MemoryStore, attach: Attach) -> None:
    model = plain_model()
    publisher = attach(model)
    model.to("meta")
    refused(publisher, store, r"'0.weight' has no data \(meta device\)")


def test_an_export_whose_tensor_has_no_memory_is_refused(
    store: MemoryStore, attach: Attach
) -> None:
    tensors = {"a": torch.ones(4, 6), "b": torch.ones(3)}
    publisher = attach(tensors.items)
    tensors["a"] = torch.ones(4, 6)
    tensors["a"].untyped_storage().resize_(0)
    refused(publisher, store, "'a' needs 96 bytes of memory")


def test_an_anchor_of_freed_frozen_weights_is_refused(attach: Attach) -> None:
    model: Any = frozen_first()
    publisher = attach(model)
    model[0].weight.untyped_storage().resize_(0)
    session = present(publisher._session)
    with pytest.raises(ConfigError, match=r"'0.weight' needs 1920 bytes"):
        session.add_anchor(session.begin_anchor(), topic="")


# Names and ties


def test_a_head_that_is_untied_is_refused(store: MemoryStore, attach: Attach) -> None:
    model: Any = TinyModel()
    publisher = attach(model)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    caught = refused(publisher, store, "'head.weight' and 'embed.weight' were one tensor")
    assert "tie_weights" in caught.hint
    model.head.weight = model.embed.weight
    changed_(model)
    assert publisher.publish().result().version == 1


def test_tied_names_may_be_two_tensors_of_one_memory(store: MemoryStore, attach: Attach) -> None:
    model: Any = TinyModel()
    publisher = attach(model)
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    with torch.no_grad():
        model.head.weight.add_(1)
    publisher.publish().result()
    assert same(recompute(store)[1].state, bits_of(model))


def add_buffer(model: nn.Module) -> None:
    model.register_buffer("scores", torch.zeros(3))


def add_parameter(model: nn.Module) -> None:
    model.register_parameter("scores", nn.Parameter(torch.zeros(3)))


@pytest.mark.parametrize("add", [add_buffer, add_parameter])
def test_a_tensor_that_is_new_is_refused(
    add: Callable[[nn.Module], None], store: MemoryStore, attach: Attach
) -> None:
    model = plain_model()
    publisher = attach(model)
    add(model)
    caught = refused(publisher, store, "'scores' was not there")
    assert "URL of its own" in caught.hint


def test_a_buffer_that_is_not_saved_may_come(attach: Attach) -> None:
    model = plain_model()
    publisher = attach(model)
    model.register_buffer("scores", torch.zeros(3), persistent=False)
    changed_(model)
    assert publisher.publish().result().version == 1


def test_a_state_dict_that_has_other_tensors_since_is_refused(
    store: MemoryStore, attach: Attach
) -> None:
    model = plain_model()
    publisher = attach(model)

    def halved(_: nn.Module, state: dict[str, Tensor], prefix: str, *__: object) -> None:
        state[f"{prefix}0.weight"] = state[f"{prefix}0.weight"] * 0.5

    model.register_state_dict_post_hook(halved)
    refused(publisher, store, r"'0\.weight' is not the same in the model's state_dict")


def test_a_tensor_that_is_gone_is_refused(store: MemoryStore, attach: Attach) -> None:
    model: Any = TinyModel()
    publisher = attach(model)
    del model.head
    assert "URL of its own" in refused(publisher, store, "'head.weight' is gone").hint


@pytest.mark.parametrize("convert", ["half", "double"])
def test_another_dtype_is_refused(convert: str, store: MemoryStore, attach: Attach) -> None:
    model = plain_model()
    publisher = attach(model)
    getattr(model, convert)()
    refused(publisher, store, r"is torch.float(16|64)\(40, 24\), and was torch.bfloat16\(40, 24\)")


# Frozen weights


def assigned(model: Any, values: Tensor) -> None:
    model[0].weight = nn.Parameter(values, requires_grad=False)


def given(model: Any, values: Tensor) -> None:
    model[0].weight.data = values


def loaded(model: Any, values: Tensor) -> None:
    model.load_state_dict(model.state_dict() | {"0.weight": values}, assign=True)
    model[0].weight.requires_grad_(False)


def copied(model: Any, values: Tensor) -> None:
    """As target networks are averaged: torch counts no write."""
    model[0].weight.data.copy_(values)


@pytest.mark.parametrize("quantization", [None, "fp8-block"])
@pytest.mark.parametrize("replace", [assigned, given, loaded, copied])
def test_a_frozen_weight_is_replaced(
    replace: Callable[[Any, Tensor], None],
    quantization: str | None,
    store: MemoryStore,
    quantising: Attach,
) -> None:
    """By equal bits as often as one likes; by others never, unless it is quantised: compared."""
    model: Any = frozen_first()
    publisher = quantising(model, quantization)
    for _ in range(3):
        replace(model, model[0].weight.detach().clone())
        changed_(model)
        publisher.publish().result()
    replace(model, model[0].weight.detach() + 1)
    if quantization is None:
        refused(publisher, store, "'0.weight' did not require a gradient .* changed since")
    else:
        assert publisher.publish().result().nnz > 0


def test_a_frozen_weight_in_the_memory_of_a_trained_one_is_compared(
    store: MemoryStore, attach: Attach
) -> None:
    model: Any = TinyModel()
    model.head.weight = nn.Parameter(model.embed.weight.data, requires_grad=False)
    publisher = attach(model)
    with torch.no_grad():
        model.embed.weight.add_(1)
    publisher.publish().result()
    assert same(recompute(store)[1].state, bits_of(model))


def test_a_frozen_weight_that_moves_into_such_memory_is_refused(
    store: MemoryStore, attach: Attach
) -> None:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].weight.requires_grad_(False)
    publisher = attach(model)
    model[0].weight.data = model[1].weight.data
    refused(publisher, store, "'0.weight' was frozen .* in the memory of a weight that is trained")


def form(start: int, stop: int, device: str = "cpu") -> TensorForm:
    return TensorForm(
        torch.int8, (stop - start,), (stop - start,), None, False, MemoryRange(device, start, stop)
    )


@pytest.mark.parametrize("seed", range(50))
def test_shared_memory_is_found_wherever_it_is(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(end: int) -> int:
        return int(torch.randint(end, (), generator=draw))

    forms = {}
    for name in "abcdefgh":
        start = number(30)
        forms[name] = form(start, start + number(6), "cpu" if number(2) else "cuda:0")
    frozen = {name for name in forms if number(2)}

    def meet(one: MemoryRange, other: MemoryRange) -> bool:
        both = max(one.start, other.start) < min(one.stop, other.stop)
        return one.device == other.device and both

    expected = {
        name
        for name in frozen
        if any(meet(forms[name].memory, forms[o].memory) for o in forms.keys() - frozen)
    }
    assert ModelForm(forms).shared(frozen) == expected


# Subclasses


def test_a_tensor_subclass_is_refused() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    with pytest.raises(ConfigError, match="'weight' is a TwoTensor, a tensor subclass") as caught:
        collect_weights(module)
    assert "dequantize" in caught.value.hint


def test_a_model_that_is_only_looked_at_is_not_kept() -> None:
    source = collect_weights(plain_model())
    assert all(weight.tensor.is_meta for weight in source.weights)
