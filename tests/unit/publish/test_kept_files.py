# ruff: noqa: S106 - tokens of text
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from deltachain.chain.chain import Chain
from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.hf_trainer import DeltaChainCallback
from deltachain.publish.model.assets import collect_assets
from deltachain.publish.model.source import collect_weights
from deltachain.publish.push import push
from deltachain.publish.snapshot import (
    Memory,
    Slabs,
    Snapshot,
    SnapshotPlace,
    choose_place,
    read,
    reserve_nbytes,
)
from deltachain.publish.wire_form import Diff
from deltachain.store import MemoryStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_
from tests.unit.publish.library import llama


def snapshot_of(
    model: nn.Module,
    *,
    on_device: bool = False,
    dtype: str | None = None,
    where: SnapshotPlace | None = None,
) -> Snapshot:
    return Snapshot(collect_weights(model, dtype=dtype), where=where, on_device=on_device)


def kept(snapshot: Snapshot, model: nn.Module) -> dict[str, object]:
    return {w.spec.name: snapshot.bits(w).tolist() for w in collect_weights(model).weights}


def listed(diff: Diff) -> dict[str, list[list[int]]]:
    return {name: [part.tolist() for part in changes] for name, changes in diff.live.items()}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [None, "BF16"])
@pytest.mark.parametrize("model", [TinyModel, lambda: plain_model(dtype=torch.float32)])
def test_the_device_path_finds_what_the_host_path_finds(
    model: type[TinyModel], dtype: str | None, where: SnapshotPlace
) -> None:
    live = model()
    host = snapshot_of(live, dtype=dtype)
    device = snapshot_of(live, on_device=True, dtype=dtype, where=where)
    assert device.kernel == "device" != host.kernel
    for step in range(3):
        train_(live, step)
        found = host.diff_()
        assert listed(found) == listed(device.diff_())
        assert found.live
        assert host.state == device.state
        weights = collect_weights(live, dtype=dtype).weights
        assert all(np.array_equal(host.bits(w), device.bits(w)) for w in weights)


@pytest.mark.parametrize("where", [None, "host", "device"])
def test_a_diff_that_is_restored_is_found_again(where: SnapshotPlace | None) -> None:
    model = TinyModel()
    snapshot = snapshot_of(model, on_device=where is not None, where=where)
    before, state = kept(snapshot, model), snapshot.state
    train_(model, 1)
    diff = snapshot.diff_()
    after, moved = kept(snapshot, model), snapshot.state
    assert moved != state
    snapshot.restore(diff)
    assert (kept(snapshot, model), snapshot.state) == (before, state)
    assert listed(snapshot.diff_()) == listed(diff)
    snapshot.restore(diff)
    snapshot.redo(diff)
    assert (kept(snapshot, model), snapshot.state) == (after, moved)
    assert snapshot.diff_().live == {}


@pytest.mark.parametrize("where", [None, "host", "device"])
def test_a_diff_that_fails_moves_nothing(where: SnapshotPlace | None) -> None:
    model, last = plain_model(), torch.ones(1)
    model.register_buffer("last_scale", last)
    snapshot = snapshot_of(model, on_device=where is not None, where=where)
    before, state = kept(snapshot, model), snapshot.state
    train_(model, 1, share=0.5)
    last.fill_(torch.nan)
    with pytest.raises(ConfigError, match="'last_scale' is a scale that is not finite"):
        snapshot.diff_()
    last.fill_(1)
    assert (kept(snapshot, model), snapshot.state) == (before, state)
    assert set(snapshot.diff_().live) == {"0.bias", "0.weight", "1.bias", "1.weight"}


def test_tensors_that_a_load_replaced_are_found() -> None:
    model, other = plain_model(0), plain_model(1)
    snapshot = snapshot_of(model)
    model.load_state_dict(other.state_dict(), assign=True)
    snapshot.diff_()
    weights = collect_weights(model).weights
    assert same({w.spec.name: snapshot.bits(w) for w in weights}, bits_of(other))


def test_a_frozen_weight_that_is_trained_later_is_refused() -> None:
    model = TinyModel()
    snapshot = snapshot_of(model)
    model.frozen.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="was frozen"):
        snapshot.diff_()


def test_a_frozen_weight_that_is_written_to_is_refused() -> None:
    model = TinyModel()
    snapshot = snapshot_of(model)
    with torch.no_grad():
        model.frozen.weight[3, 2] += 1
    for _ in range(2):  # as long as it is so
        with pytest.raises(ConfigError, match=r"frozen\.weight.*changed since") as caught:
            snapshot.diff_()
    assert "state_dict" in caught.value.hint
    with torch.no_grad():
        model.frozen.weight[3, 2] -= 1
        model.frozen.weight.copy_(TinyModel().frozen.weight)
    assert listed(snapshot.diff_()) == {}


def test_a_vector_without_a_gradient_is_compared() -> None:
    """As biases of experts, which trainers move by hand."""
    model, store = plain_model(), MemoryStore()
    model[1].bias.requires_grad_(False)  # type: ignore[index]
    with Publisher("memory://x", store=store).attach(model) as publisher:
        model[1].bias.data += 1  # type: ignore[index]
        publisher.publish().result()
        assert same(recompute(store)[1].state, bits_of(model))


def test_a_frozen_inference_tensor_is_no_obstacle() -> None:
    with torch.inference_mode():
        model = TinyModel()
    assert listed(snapshot_of(model).diff_()) == {}


def test_empty_tensors_have_no_changes() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(3, 0))
    for on_device in (False, True):
        snapshot = snapshot_of(model, on_device=on_device)
        assert snapshot.diff_().live == {}


def test_a_batch_that_failed_to_be_enqueued_leaves_the_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier batches have updated a snapshot on the device by then: they are put back."""
    model = plain_model()
    snapshot = snapshot_of(model, on_device=True, where="device")
    before, state = kept(snapshot, model), snapshot.state
    train_(model, 1, share=0.5)
    live, given = snapshot._source.live, []

    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(live()):
            if number == 3:
                raise MemoryError("no memory")
            given.append(name)
            yield name, tensor

    monkeypatch.setattr("deltachain.kernels.device_diff.BATCH_NBYTES", 1)
    monkeypatch.setattr(snapshot, "_source", replace(snapshot._source, live=fails))
    with pytest.raises(MemoryError):
        snapshot.diff_()
    assert len(given) == 3
    monkeypatch.undo()
    assert (kept(snapshot, model), snapshot.state) == (before, state)
    assert snapshot.diff_().live


@pytest.mark.parametrize("where", ["host", "device"])
def test_an_export_may_use_the_memory_of_its_tensors_again(where: SnapshotPlace) -> None:
    values = {
        name: torch.full((100,), number, dtype=torch.bfloat16) for number, name in enumerate("abc")
    }

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        room = torch.empty(100, dtype=torch.bfloat16)
        for name, value in values.items():
            yield name, room.copy_(value)

    snapshot = Snapshot(collect_weights(export), where=where, on_device=True)
    for name in "ac":
        values[name][7] += 1
    found = listed(snapshot.diff_())
    assert {name: indices for name, (indices, *_) in found.items()} == {"a": [7], "c": [7]}


def test_a_snapshot_is_on_the_host_or_on_the_device() -> None:
    with pytest.raises(ConfigError, match="snapshot='disk': expected one of"):
        PublishConfig(url="memory://x", snapshot="disk")  # type: ignore[arg-type]


def test_a_publisher_says_that_a_snapshot_cannot_be_on_the_device(tmp_path: Path) -> None:
    config = PublishConfig(url=str(tmp_path), snapshot="device")
    with pytest.raises(ConfigError, match="all weights are compared on the host"):
        Publisher(config).attach(plain_model())


def test_a_snapshot_goes_where_it_fits() -> None:
    reserve = reserve_nbytes(80, 4)
    assert reserve == 40 + 24
    assert choose_place(None, Memory(4 + reserve, 80), 4) == "device"
    assert choose_place(None, Memory(3 + reserve, 80), 4) == "host"
    assert choose_place("host", Memory(80, 80), 4) == "host"
    assert choose_place("device", Memory(0, 80), 4) == "device"


def test_tensors_of_a_snapshot_lie_side_by_side() -> None:
    slabs, host = Slabs({2: 24, 8: 2}), torch.device("cpu")
    taken = [slabs.take(n, 2, host, resident=False, pinned=False) for n in (9, 8)]
    assert [kept.at for kept in taken] == [0, 16]
    assert taken[0].slab is taken[1].slab
    assert taken[0].slab.numel() == 24
    assert slabs.take(1, 8, host, resident=False, pinned=False).slab.dtype == torch.int64
    more = slabs.take(30, 2, host, resident=False, pinned=False)
    assert (more.at, more.numel, more.slab.numel()) == (0, 30, 32)


def test_bits_on_a_device_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltachain.publish.snapshot.READ_NUMEL", 7)
    for numel in (0, 6, 7, 30):
        bits = torch.arange(numel, dtype=torch.int16)
        assert torch.equal(read(bits), bits)


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
def folder(tmp_path: Path) -> Path:
    there = tmp_path / "c"
    llama().save_pretrained(there)
    tokenizer().save_pretrained(there)
    put(there, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "word_dimension": 8})
    put(there, "modules.json", [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}])
    put(there, "preprocessor_config.json", PICTURES)
    put(there, "added_tokens.json", {"<s>": 1, "</s>": 2})
    put(there, "adapter_config.json", ADAPTER)
    put(there, "training_log.json", [{"loss": 3.0}])
    return there


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


def other_merges(folder: Path) -> None:
    edit(folder, "tokenizer.json", lambda one: one["model"]["merges"].reverse())


def other_normalizer(folder: Path) -> None:
    edit(folder, "tokenizer.json", lambda one: one.update(normalizer={"type": "Lowercase"}))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "merges": (other_merges, r"tokenizer\.json"),
    "normalizer": (other_normalizer, r"tokenizer\.json"),
    "more tokens": (saved(lambda t: t.add_tokens(["<tool>"])), r"tokenizer\.json"),
    "beginning": (saved(lambda t: setattr(t, "bos_token", "a")), r"'bos_token'|'added_tokens'"),
    "beginning by hand": (
        fields("tokenizer_config.json", bos_token="a"),
        r"'bos_token'|'added_tokens'",
    ),
    "template": (saved(lambda t: setattr(t, "chat_template", "other")), r"chat template"),
    "no template": (saved(lambda t: setattr(t, "chat_template", None)), r"chat template"),
    "template removed": (lambda f: (f / "chat_template.jinja").unlink(), r"chat template"),
    "added tokens": (fields("added_tokens.json", more=9), r"added_tokens\.json"),
    "pooling": (fields("1_Pooling/config.json", pooling_mode_mean_tokens=False), r"1_Pooling"),
    "modules": (lambda f: edit(f, "modules.json", list.pop), r"modules\.json"),
    "another module": (lambda f: put(f, "2_Dense/config.json", {"in": 3}), r"2_Dense.*not in"),
    "pictures": (fields("preprocessor_config.json", image_mean=[0.0] * 3), r"image_mean"),
    "no rescaling": (fields("preprocessor_config.json", do_rescale=False), r"do_rescale"),
    "no prompt": (fields("1_Pooling/config.json", include_prompt=False), r"include_prompt"),
    "no limit": (
        lambda f: put(f, "generation_config.json", {"top_k": 0}),
        r"generation_config\.json.*top_k",
    ),
    "end": (
        lambda f: put(f, "generation_config.json", {"eos_token_id": 0}),
        r"generation_config\.json.*eos_token_id",
    ),
    "sounds": (lambda f: put(f, "processor_config.json", {"rate": 9}), r"processor_config.*not in"),
    "generation": (
        lambda f: put(f, "generation_config.json", {"temperature": 0.5, "eos_token_id": 2}),
        r"generation_config\.json.*temperature",
    ),
    "alpha": (fields("adapter_config.json", lora_alpha=64), r"adapter_config\.json.*lora_alpha"),
    "targets": (fields("adapter_config.json", target_modules=["q_proj"]), r"target_modules"),
    "scaling": (fields("adapter_config.json", use_rslora=True), r"use_rslora"),
    "unreadable": (lambda f: (f / "modules.json").write_text("{"), r"modules\.json"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_files_of_another_meaning_are_refused_by_name(folder: Path, change: str) -> None:
    (folder / "generation_config.json").unlink()
    store = MemoryStore()
    push(store, folder, PublishConfig(url=store.url))
    before = sorted(info.key for info in store.list(""))
    do, why = REFUSED[change]
    do(folder)
    train(folder)
    with pytest.raises(ChainMismatchError, match=why) as caught:
        push(store, folder, PublishConfig(url=store.url))
    assert "another URL" in caught.value.hint
    assert sorted(info.key for info in store.list("")) == before


def test_a_template_where_the_chain_has_none_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ChainMismatchError, match="chat template"):
        pushed_twice(folder, lambda f: (f / "chat_template.jinja").write_text("{{ x }}"))


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


SAME: dict[str, Callable[[Path], object]] = {
    "reordered": reordered,
    "saved again": saved(lambda _: None),
    "saved after use": saved(used),
    "another release": of_another_release,
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
    "generation that the configuration has": lambda f: put(
        f, "generation_config.json", {"_from_model_config": True, "transformers_version": "9"}
    ),
    "read me": lambda f: (f / "README.md").write_text("other"),
    "no words": no_words,
}


def test_pictures_that_another_release_describes_in_another_file_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(folder: Path) -> None:
        (folder / "preprocessor_config.json").unlink()
        put(folder, "processor_config.json", {"image_processor": PICTURES})

    pushed_twice(folder, change)
    assert "none of preprocessor_config.json:" in caplog.text
    assert "others of processor_config.json:" in caplog.text


@pytest.mark.parametrize("change", SAME)
def test_files_of_the_same_meaning_are_no_difference(folder: Path, change: str) -> None:
    head = Chain.open(pushed_twice(folder, SAME[change])).head()
    assert head is not None
    assert head.version == 1


def test_a_folder_of_another_release_is_continued_by_this_one(folder: Path) -> None:
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    of_another_release(other)
    store = MemoryStore()
    push(store, other, PublishConfig(url=store.url))
    train(folder)
    assert push(store, folder, PublishConfig(url=store.url)).head.version == 1


def test_a_change_that_only_other_releases_read_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class_of = fields("tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    class_of(folder)  # whose normalizer is that of the class, whatever the file says
    pushed_twice(folder, other_normalizer)
    assert "tokenizer.json differs from the chain's in 'normalizer'" in caplog.text


def test_files_that_a_later_version_lacks_or_nobody_knows_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "1_Pooling")
        (folder / "source.spm").unlink()
        (folder / "target.spm").write_text("x")  # tokenizer.json says it all
        put(folder, "training_log.json", [{"loss": 2.0}])
        put(folder, "labels.json", ["a"])

    (folder / "source.spm").write_text("x")
    pushed_twice(folder, change)
    assert "none of 1_Pooling/config.json, source.spm:" in caplog.text
    assert "others of labels.json, target.spm, training_log.json:" in caplog.text


def test_a_tokenizer_that_the_model_outgrew_before_it_was_attached_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "adapter_config.json").unlink()
    model = LlamaForCausalLM.from_pretrained(folder)
    collect_assets(model, PublishConfig(url="x"))
    assert "vocab_size is" not in caplog.text
    model.resize_token_embeddings(128)
    grown = AutoTokenizer.from_pretrained(folder)
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
