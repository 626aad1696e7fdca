from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.demo.compare_bits import compare, dump_bits
from examples.demo.corpus import documents
from examples.demo.dump_callback import DumpCallback
from examples.demo.generate import generate_text, load_for_generation
from examples.demo.model import (
    VOCABULARY,
    make_model,
    make_tokenizer,
    save_checkpoint,
)
from examples.demo.pretrain import pretrain
from examples.demo.train import GrpoStep, run_grpo


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return make_model(seed=0)


def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in [*islice(documents(5), 50), "  two spaces, ünïcode and\nlines: "]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert max(ids) < VOCABULARY


def test_a_prompt_and_its_answer_are_cut_where_the_line_is(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    whole = tokenizer.encode("add 4 and 5: 9", add_special_tokens=False)
    prompt = tokenizer.encode("add 4 and 5: ", add_special_tokens=False)
    assert whole[:-1] == prompt


def test_the_tokenizer_is_the_same_each_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert make_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_model_is_a_tied_qwen3_of_five_million_parameters(model: Qwen3ForCausalLM) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) >= 5_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_the_seed_decides_the_weights_and_leaves_torch_alone(model: Qwen3ForCausalLM) -> None:
    before = torch.random.get_rng_state()
    again, other = make_model(seed=0), make_model(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_the_oracle_finds_a_saved_checkpoint_equal(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_model(seed=2)
    dump_bits(model, tmp_path / "bits.npz")
    save_checkpoint(model, tokenizer, tmp_path / "checkpoint")
    result = compare(tmp_path / "bits.npz", tmp_path / "checkpoint")
    assert result.equal
    assert result.elements == model.num_parameters()


@pytest.mark.slow
def test_pretraining_teaches_and_grpo_changes_the_weights(tmp_path: Path) -> None:
    checkpoint, losses = tmp_path / "checkpoint", list[float]()
    report = pretrain(checkpoint, steps=30, progress=lambda _, __, loss: losses.append(loss))
    assert report.steps == len(losses) == 30
    assert report.loss_end < 0.7 * report.loss_start

    dumps, told = DumpCallback(tmp_path / "bits", steps={0, 1, 2}), list[GrpoStep]()
    run = run_grpo(checkpoint, steps=2, callbacks=[dumps], progress=told.append)
    assert [step.step for step in run.steps] == [1, 2]
    assert tuple(told) == run.steps
    assert compare(dumps.path(0), checkpoint).equal
    assert compare(dumps.path(0), dumps.path(1)).mismatching_bits > 0
    assert compare(dumps.path(1), dumps.path(2)).mismatching_bits > 0

    model, tokenizer = load_for_generation(checkpoint)
    first = generate_text(model, tokenizer, "add 1 and 2: ", max_new_tokens=4)
    assert first == generate_text(model, tokenizer, "add 1 and 2: ", max_new_tokens=4)
