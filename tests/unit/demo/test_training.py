from itertools import islice
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.demo.callbacks import DumpCallback
from examples.demo.compare_bits import compare, dump_bits
from examples.demo.corpus import documents, questions, score
from examples.demo.generate import generate_text, load_for_generation
from examples.demo.model import make_model, make_tokenizer, save_checkpoint
from examples.demo.pretrain import pretrain
from examples.demo.train import run_grpo


def test_the_same_seed_gives_the_same_text() -> None:
    assert list(islice(documents(3), 50)) == list(islice(documents(3), 50))
    assert list(islice(documents(3), 50)) != list(islice(documents(4), 50))
    assert questions(9, seed=1) == questions(9, seed=1)


def test_questions_are_beginnings_of_documents() -> None:
    lines = set(islice(documents(0), 5000))
    assert all(question.line in lines for question in questions(20, seed=7))


def test_only_the_answer_alone_earns_everything() -> None:
    assert score("7", 7) == score(" 7", 7) == 1.0
    assert all(score(text, 7) < 1.0 for text in ["8", "77", "7 apples", "", "seven", "-7"])


@pytest.mark.parametrize(
    ("better", "worse"), [("7", "6"), ("6", "4"), ("7 a", "7 apples"), ("0", "no"), ("70", "x")]
)
def test_nearer_and_shorter_earns_more(better: str, worse: str) -> None:
    assert score(better, 7) > score(worse, 7)


pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return make_model(seed=0)


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

    dumps, told = DumpCallback(tmp_path / "bits", steps={0, 1, 2}), list[int]()
    run_grpo(checkpoint, steps=2, callbacks=[dumps], progress=lambda at, _: told.append(at))
    assert told == [1, 2]
    assert compare(dumps.path(0), checkpoint).equal
    assert compare(dumps.path(0), dumps.path(1)).mismatching_bits > 0
    assert compare(dumps.path(1), dumps.path(2)).mismatching_bits > 0

    model, tokenizer = load_for_generation(checkpoint)
    first = generate_text(model, tokenizer, "add 1 and 2: ", max_new_tokens=4)
    assert first == generate_text(model, tokenizer, "add 1 and 2: ", max_new_tokens=4)
