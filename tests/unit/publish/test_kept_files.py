# ruff: noqa: S106 - tokens of text
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BlipImageProcessor,
    InstructBlipProcessor,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from deltachain.checkpoint import ASSET_NBYTES
from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.hf_trainer import DeltaChainCallback
from deltachain.publish.model.assets import collect_assets
from deltachain.publish.model.kept_files import with_dtype_of
from deltachain.publish.push import push
from deltachain.store import FileStore, MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.subscribe.targets.folder import OwnFolder, write_assets
from deltachain.types import TensorSpec
from tests.unit.publish.chains import head_of
from tests.unit.publish.library import llama

WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(
        BPE({word: n for n, word in enumerate(WORDS)}, [("a", "b"), ("b", "c")], unk_token="<unk>")
    )
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    found.chat_template = "{{ messages }}"
    return found


ADAPTER = {
    "peft_type": "LORA",
    "base_model_name_or_path": "one",
    "lora_alpha": 8,
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "inference_mode": True,
}
PICTURES = {
    "image_processor_type": "CLIPImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "size": {"height": 8, "width": 8},
    "processor_class": "OneProcessor",
}


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A checkpoint of a model and a tokenizer, with files that describe other parts."""
    there = tmp_path / "c"
    llama().save_pretrained(there)
    tokenizer().save_pretrained(there)
    put(there, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "word_dimension": 8})
    put(there, "modules.json", [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}])
    put(there, "preprocessor_config.json", PICTURES)
    put(there, "added_tokens.json", {"<s>": 1, "</s>": 2})
    put(there, "adapter_config.json", ADAPTER)
    put(there, "training_log.json", [{"loss": 3.0}])
    write(there, "source.spm", "x")
    return there


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return tmp_path / "chain"


def put(folder: Path, name: str, document: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(document))


def edit(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    document = json.loads((folder / name).read_bytes())
    change(document)
    put(folder, name, document)


def fields(name: str, **new: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, name, lambda document: document.update(new))


def saved(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def again(folder: Path) -> None:
        found = AutoTokenizer.from_pretrained(folder)
        change(found)
        (folder / "chat_template.jinja").unlink()
        found.save_pretrained(folder)

    return again


def train(folder: Path) -> None:
    tensors = {n: t + 1 for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pushed_twice(folder: Path, change: Callable[[Path], object]) -> MemoryStore:
    store = MemoryStore()
    push(store, folder, PublishConfig(url=store.url))
    change(folder)
    train(folder)
    push(store, folder, PublishConfig(url=store.url))
    return store


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def new_generation(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: put(folder, "generation_config.json", settings)


def other_merges(folder: Path) -> None:
    edit(folder, "tokenizer.json", lambda one: one["model"]["merges"].reverse())


def other_normalizer(folder: Path) -> None:
    edit(folder, "tokenizer.json", lambda one: one.update(normalizer={"type": "Lowercase"}))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "rotation": (fields("config.json", rope_parameters={"rope_theta": 77.0}), r"config\.json"),
    "norm": (fields("config.json", rms_norm_eps=0.5), r"config\.json"),
    "end of generation": (fields("generation_config.json", eos_token_id=5), r"config\.json"),
    "spm": (lambda f: write(f, "source.spm", "other"), r"spm"),
    "merges": (other_merges, r"tokenizer\.json"),
    "normalizer": (other_normalizer, r"tokenizer\.json"),
    "more tokens": (saved(lambda t: t.add_tokens(["<tool>"])), r"tokenizer\.json"),
    "beginning": (saved(lambda t: setattr(t, "bos_token", "a")), r"'bos_token'|'added_tokens'"),
    "beginning by hand": (
        fields("tokenizer_config.json", bos_token="a"),
        r"'bos_token'|'added_tokens'",
    ),
    "template": (saved(lambda t: setattr(t, "chat_template", "other")), r"chat template"),
    "template by hand": (lambda f: write(f, "chat_template.jinja", "{{ other }}"), r"template"),
    "no template": (saved(lambda t: setattr(t, "chat_template", None)), r"chat template"),
    "template removed": (lambda f: (f / "chat_template.jinja").unlink(), r"chat template"),
    "added tokens": (fields("added_tokens.json", more=9), r"added_tokens\.json"),
    "pooling": (fields("1_Pooling/config.json", pooling_mode_mean_tokens=False), r"1_Pooling"),
    "modules": (lambda f: edit(f, "modules.json", list.pop), r"modules\.json"),
    "another module": (lambda f: put(f, "2_Dense/config.json", {"in": 3}), r"2_Dense.*not in"),
    "pictures": (fields("preprocessor_config.json", image_mean=[0.0] * 3), r"image_mean"),
    "no rescaling": (fields("preprocessor_config.json", do_rescale=False), r"do_rescale"),
    "no prompt": (fields("1_Pooling/config.json", include_prompt=False), r"include_prompt"),
    "new limit": (new_generation(top_k=0), r"generation_config\.json.*top_k"),
    "new end": (new_generation(eos_token_id=0), r"generation_config\.json.*eos_token_id"),
    "new temperature": (
        new_generation(temperature=0.5, eos_token_id=2),
        r"generation_config\.json.*temperature",
    ),
    "sounds": (lambda f: put(f, "processor_config.json", {"rate": 9}), r"processor_config.*not in"),
    "alpha": (fields("adapter_config.json", lora_alpha=64), r"adapter_config\.json.*lora_alpha"),
    "targets": (fields("adapter_config.json", target_modules=["q_proj"]), r"target_modules"),
    "scaling": (fields("adapter_config.json", use_rslora=True), r"use_rslora"),
    "unreadable": (lambda f: write(f, "modules.json", "{"), r"modules\.json"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_files_of_another_meaning_are_refused_by_name(described: Path, change: str) -> None:
    if change.startswith("new "):
        (described / "generation_config.json").unlink()
    store, (do, why) = MemoryStore(), REFUSED[change]
    push(store, described, PublishConfig(url=store.url))
    before = sorted(info.key for info in store.list(""))
    do(described)
    train(described)
    with pytest.raises(ChainMismatchError, match=why) as caught:
        push(store, described, PublishConfig(url=store.url))
    assert "another URL" in caught.value.hint
    assert sorted(info.key for info in store.list("")) == before


def test_a_template_where_the_chain_has_none_is_refused(described: Path) -> None:
    (described / "chat_template.jinja").unlink()
    with pytest.raises(ChainMismatchError, match="chat template"):
        pushed_twice(described, lambda f: write(f, "chat_template.jinja", "{{ x }}"))


def reordered(folder: Path) -> None:
    for file in folder.rglob("*.json"):
        document = json.loads(file.read_bytes())
        if isinstance(document, dict):
            document = dict(reversed(document.items()))
        file.write_text(json.dumps(document, indent=7))


def of_another_release(folder: Path) -> None:
    """Files as releases before transformers 5 wrote them."""
    edit(folder, "tokenizer.json", lambda one: one["model"].pop("ignore_merges"))
    edit(folder, "tokenizer.json", lambda one: one["model"].update(merges=["a b", "b c"]))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    fields(
        "tokenizer_config.json",
        chat_template=template,
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
        name_or_path="x",
        added_tokens_decoder={"1": {"content": "<s>", "special": True}},
    )(folder)
    put(folder, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    (folder / "added_tokens.json").unlink()
    put(folder, "vocab.json", {word: n for n, word in enumerate(WORDS)})
    (folder / "merges.txt").write_text("#version: 0.2\na b\nb c\n")
    fields("preprocessor_config.json", processor_class="Two", data_format=None)(folder)


def used(found: Any) -> None:
    found.padding_side, found.pad_token = "left", "</s>"
    found(["a b", "c"], padding=True, truncation=True, max_length=7)


def no_words(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()


def of_another_run(folder: Path) -> None:
    fields("config.json", transformers_version="9.9", use_cache=False, _name_or_path="x")(folder)
    (folder / "source.spm").unlink()


SAME: dict[str, Callable[[Path], object]] = {
    "reordered": reordered,
    "saved again": saved(lambda _: None),
    "saved after use": saved(used),
    "another release": of_another_release,
    "another run": of_another_run,
    "adapter": fields(
        "adapter_config.json",
        base_model_name_or_path="two",
        target_modules=["v_proj", "q_proj"],
        inference_mode=False,
        peft_version="9",
        use_dora=False,
        corda_config=None,
        revision="x",
    ),
    "generation that the configuration has": new_generation(
        _from_model_config=True, transformers_version="9"
    ),
    "read me": lambda f: write(f, "README.md", "other"),
    "no words": no_words,
}


def pictures_in_another_file(folder: Path) -> None:
    """As another release describes them."""
    (folder / "preprocessor_config.json").unlink()
    put(folder, "processor_config.json", {"image_processor": PICTURES})


def files_that_come_and_go(folder: Path) -> None:
    shutil.rmtree(folder / "1_Pooling")
    (folder / "source.spm").unlink()
    write(folder, "target.spm", "x")  # tokenizer.json says it all
    put(folder, "training_log.json", [{"loss": 2.0}])
    put(folder, "labels.json", ["a"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            pictures_in_another_file,
            ("none of preprocessor_config.json:", "others of processor_config.json:"),
        ),
        (
            files_that_come_and_go,
            (
                "none of 1_Pooling/config.json, source.spm:",
                "others of labels.json, target.spm, training_log.json:",
            ),
        ),
        (other_normalizer, ("tokenizer.json differs from the chain's in 'normalizer'",)),
    ],
)
def test_a_change_that_only_others_read_is_told(
    described: Path,
    change: Callable[[Path], None],
    told: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if change is other_normalizer:  # that of this class counts, whatever the file says
        fields("tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")(described)
    pushed_twice(described, change)
    assert all(line in caplog.text for line in told)


@pytest.mark.parametrize("change", SAME)
def test_files_of_the_same_meaning_are_no_difference(described: Path, change: str) -> None:
    assert head_of(pushed_twice(described, SAME[change])).version == 1


def test_a_folder_of_another_release_is_continued_by_this_one(described: Path) -> None:
    other = described.with_name("other")
    shutil.copytree(described, other)
    of_another_release(other)
    store = MemoryStore()
    push(store, other, PublishConfig(url=store.url))
    train(described)
    assert push(store, described, PublishConfig(url=store.url)).head.version == 1


def test_a_tokenizer_that_the_model_outgrew_before_it_was_attached_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, grown = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    collect_assets(model, PublishConfig(url="x"))
    model.resize_token_embeddings(128)
    collect_assets(model, PublishConfig(url="x"), grown)
    assert "vocab_size is" not in caplog.text
    collect_assets(model, PublishConfig(url="x"))
    assert "vocab_size is 128, and was 96 in" in caplog.text
    assert "PublishConfig.assets" in caplog.text


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.add_tokens(["<tool>"]), "number of tokens"),
        (lambda t: setattr(t, "chat_template", "x"), "chat_template"),
        (lambda t: setattr(t, "eos_token", "a"), "eos_token"),
        (
            lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.Lowercase()),
            "normalizer",
        ),
        (
            lambda t: setattr(
                t.backend_tokenizer,
                "post_processor",
                TemplateProcessing("<s> $A", None, [("<s>", 1)]),
            ),
            "post_processor",
        ),
    ],
)
def test_a_tokenizer_that_changes_while_a_trainer_runs_is_refused(
    tmp_path: Path, change: Callable[[Any], object], what: str
) -> None:
    words, model = tokenizer(), llama()
    callback = DeltaChainCallback(str(tmp_path / "chain"))
    state, control = TrainerState(global_step=1), TrainerControl()
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[])
    callback.on_train_begin(arguments, state, control, model=model, processing_class=words)
    words.padding_side, words.pad_token = "left", "</s>"
    callback.on_step_end(arguments, state, control)
    change(words)
    state.global_step = 2
    for event in (callback.on_step_end, callback.on_train_end):
        with pytest.raises(ConfigError, match=f"the tokenizer changed in .*{what}") as caught:
            event(arguments, state, control)
        assert "another" in caught.value.hint
    assert callback.publisher is None


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
    tokenizer().save_pretrained(there)
    for name in (*OTHERS, *NO_FILES):
        put(there, name, {})
    return there


def pull(chain: Path) -> Path:
    out = chain.with_name(f"{chain.name}-out")
    with Subscriber(str(chain), OwnFolder(out), store=FileStore(chain)) as subscriber:
        subscriber.update()
        write_assets(subscriber.chain, out)
    return out


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return found


def publish(model: nn.Module, url: Path, *others: object) -> None:
    config = PublishConfig(url=str(url))
    with Publisher(config) as publisher:
        publisher.attach(model, assets=collect_assets(model, config, *others), alone=True)


def test_files_of_every_kind_come_with_the_checkpoint(chain: Path, folder: Path) -> None:
    push(FileStore(chain), folder, PublishConfig(url="x"))
    pulled = pull(chain)
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    for name in there - {"model.safetensors", *NO_FILES}:
        assert (pulled / name).read_bytes() == (folder / name).read_bytes(), name
    assert not any((pulled / name).exists() for name in NO_FILES)


def test_small_files_that_are_not_carried_are_named_in_one_line(
    chain: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "my_tokenizer").mkdir()
    for name in ("README.md", ".gitattributes", "onnx/model.onnx", "my_tokenizer/v2/a.json"):
        put(folder, name, {})
    with (folder / "large.json").open("wb") as file:
        file.truncate(ASSET_NBYTES + 1)
    named = ["2_Dense/x.py", "large.json", "modeling_x.py", "my_tokenizer/v2/", "onnx/"]
    push(FileStore(chain), folder, PublishConfig(url="x"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    collect_assets(model, PublishConfig(url="x"), AutoTokenizer.from_pretrained(folder))
    lines = [line for line in caplog.messages if "not published" in line]
    assert lines == [f"{folder}: not published, followers lack them: {', '.join(named)}"] * 2


def test_a_tokenizer_of_a_processor_comes_in_its_folder(chain: Path, folder: Path) -> None:
    shutil.rmtree(folder / "additional_chat_templates")
    main, other = (AutoTokenizer.from_pretrained(folder) for _ in range(2))
    other.add_tokens(["[DEC]"])
    processor = InstructBlipProcessor(BlipImageProcessor(), main, other)
    publish(llama(), chain, processor)
    processor.save_pretrained(folder)
    pushed = chain.with_name("pushed")
    push(FileStore(pushed), folder, PublishConfig(url="x"))
    for one in (chain, pushed):
        found: Any = InstructBlipProcessor.from_pretrained(pull(one))
        assert found.qformer_tokenizer.convert_tokens_to_ids("[DEC]") == len(WORDS)


def test_nothing_is_written_through_a_link_in_the_followers_folder(
    chain: Path, folder: Path, tmp_path: Path
) -> None:
    push(FileStore(chain), folder, PublishConfig(url="x"))
    (tmp_path / "chain-out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "chain-out/1_Pooling").symlink_to(tmp_path / "elsewhere")
    pull(chain)
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
    chain: Path, folder: Path, wire: str | None, saved: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight += 1e-4
    with Publisher(PublishConfig(url=str(chain), dtype=wire)) as publisher:
        publisher.attach(model, alone=True)
    loaded = AutoModelForCausalLM.from_pretrained(pull(chain))
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(saved))


def test_a_configuration_without_a_folder_states_the_dtype_of_its_model(chain: Path) -> None:
    model = llama().float()
    model.config.dtype = torch.bfloat16
    publish(model, chain)
    assert config_of(pull(chain))["dtype"] == "float32"


@pytest.mark.parametrize(
    ("most", "stated", "then"),
    [
        ("F32", {"dtype": "bfloat16"}, {"dtype": "float32"}),
        ("F32", {"torch_dtype": "float16", "a": 1}, {"torch_dtype": "float32", "a": 1}),
        ("F32", {"text_config": {"dtype": "float16"}}, {"text_config": {"dtype": "float32"}}),
        ("F32", {"dtype": "float32", "vision_config": {"dtype": "bfloat16"}}, None),
        ("F32", {"dtype": None}, None),
        ("F32", {"vocab_config": {"dtype": 7}}, None),
        ("F8_E4M3", {"dtype": "bfloat16"}, None),
        ("F32", {"dtype": "bfloat16", "quantization_config": {}}, None),
    ],
)
def test_the_stated_dtype_is_that_of_most_elements(
    most: str, stated: dict[str, Any], then: dict[str, Any] | None
) -> None:
    """Where a file states no other one, it stays as it is."""
    specs = [
        TensorSpec(dtype, dtype, (numel,))
        for dtype, numel in ((most, 30), ("BF16", 20), ("I64", 90))
    ]
    files = {"config.json": json.dumps(stated).encode(), "tokenizer.json": b"{}"}
    made = with_dtype_of(files, specs)
    assert made == files if then is None else json.loads(made["config.json"]) == then
    assert made["tokenizer.json"] == b"{}"


def test_after_a_resize_the_pulled_folder_loads(chain: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)
    words.add_tokens(["<tool>", "</tool>"])
    words.chat_template = "{{ messages }} now"
    model.resize_token_embeddings(len(words))
    publish(model, chain, words)
    pulled = pull(chain)
    name = "model.embed_tokens.weight"
    found = AutoModelForCausalLM.from_pretrained(pulled).state_dict()[name]
    assert found.shape[0] == len(words)
    assert torch.equal(found, model.state_dict()[name].bfloat16())
    again = AutoTokenizer.from_pretrained(pulled)
    assert again.convert_tokens_to_ids("</tool>") == words.convert_tokens_to_ids("</tool>")
    assert again.chat_template == "{{ messages }} now"
    assert config_of(pulled).get("dtype") == config_of(folder).get("dtype")
    assert (pulled / "source.spm").exists()


def test_a_template_that_was_removed_is_not_published(folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    words.chat_template = None
    model = AutoModelForCausalLM.from_pretrained(folder)
    files = collect_assets(model, PublishConfig(url="x"), words)
    assert "chat_template.jinja" not in files
    assert not json.loads(files["tokenizer_config.json"])["chat_template"]


def test_another_head_is_named_in_the_configuration(chain: Path, folder: Path) -> None:
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=5)
    model.config.pad_token_id = 0
    publish(model, chain)
    pulled = pull(chain)
    loaded = LlamaForSequenceClassification.from_pretrained(pulled)
    assert torch.equal(loaded.score.weight, model.score.weight.to(loaded.score.weight.dtype))
    assert config_of(pulled)["architectures"] == ["LlamaForSequenceClassification"]


def test_a_head_that_the_configuration_does_not_describe_is_refused(
    chain: Path, folder: Path
) -> None:
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=5)
    model.score = nn.Linear(model.config.hidden_size, 7, bias=False)
    with pytest.raises(ConfigError, match=r"'score\.weight' has shape") as caught:
        publish(model, chain)
    assert "num_labels" in caught.value.hint
    assert not chain.exists()


@pytest.mark.parametrize("told", [True, False])
def test_a_tie_that_the_configuration_denies_is_refused(chain: Path, *, told: bool) -> None:
    model = llama(tie_word_embeddings=not told)
    model.config.tie_word_embeddings = told
    with pytest.raises(ConfigError, match=f"tie_word_embeddings={told}") as caught:
        publish(model, chain)
    assert f"tie_word_embeddings = {not told}" in caught.value.hint


def test_a_trainer_that_starts_again_with_another_configuration_is_refused(
    chain: Path, folder: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    publish(model, chain)
    publish(model, chain)
    model.config.rms_norm_eps = 0.5
    with pytest.raises(ChainMismatchError, match=r"rms_norm_eps"):
        publish(model, chain)


def test_a_configuration_that_changes_between_two_publishes_is_refused(chain: Path) -> None:
    model = llama()
    with Publisher(PublishConfig(url=str(chain))) as publisher:
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
    chain: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with Publisher(PublishConfig(url=str(chain))) as publisher:
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


@pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id"])
def test_a_token_that_changes_in_the_configuration_alone_is_told(
    chain: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    model = llama(eos_token_id=2, pad_token_id=0)
    with Publisher(PublishConfig(url=str(chain))) as publisher:
        publisher.attach(model, alone=True)
        setattr(model.config, field, 7)
        publisher.publish(step=1).result()
    assert f"generation settings changed in {field!r}" in caplog.text


def test_the_configuration_of_a_dequantised_model_says_its_own_dtype(folder: Path) -> None:
    fields("config.json", dtype="bfloat16", quantization_config={"quant_method": "fp8"})(folder)
    model = llama().float()
    model.config._name_or_path = str(folder)
    model.config.dtype = torch.float32
    written = json.loads(collect_assets(model, PublishConfig(url="memory://x"))["config.json"])
    assert "quantization_config" not in written
    assert written["dtype"] == "float32"
