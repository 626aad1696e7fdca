import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from deltachain.cli.pull import pull
from deltachain.errors import ConfigError, StoreUnavailableError
from deltachain.format.documents import Manifest
from deltachain.publish import DeltaChainCallback, PublishConfig, Publisher, attach
from deltachain.publish import hf_trainer as callback_module
from deltachain.store import FileStore
from tests.support.faults import Fault, FaultyStore
from tests.support.models import bits_of, recompute, same

STEPS = 4


class Sentences(Dataset[dict[str, Tensor]]):
    """The same few tokens, over and over."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(12) * (index + 1)) % 64
        return {"input_ids": tokens, "labels": tokens}


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes, **heads, **settings))


class Truth(TrainerCallback):
    """The bits of the model after every step, and at the end."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        self.steps[state.global_step] = bits_of(kwargs["model"])


Make: TypeAlias = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(model: nn.Module, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **{"save_strategy": "no", **settings},
        )
        data = Sentences()
        return Trainer(
            model, arguments, train_dataset=data, eval_dataset=data, callbacks=[*callbacks]
        )

    return build


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "chain")


def assert_newest_is(model: nn.Module, url: str) -> Manifest:
    found = recompute(FileStore(url))
    newest = found[max(found)]
    assert same(newest.state, bits_of(model))
    return newest.committed.manifest


def test_steps_below_one_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="every_steps=0"):
        DeltaChainCallback(url, every_steps=0)


@pytest.mark.full
def test_the_best_model_loaded_at_the_end_is_the_last_version(make: Make, url: str) -> None:
    model, truth = llama(), Truth()
    trained = make(
        model,
        DeltaChainCallback(url, dtype="F32"),
        truth,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        save_steps=1,
        save_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="steps_left",
    )
    left = iter(range(9, 0, -1))
    evaluate = trained.evaluate

    def evaluated(*args: Any, **kwargs: Any) -> dict[str, float]:
        """The first step is the best: ``greater_is_better`` is the default for such a metric."""
        return {**evaluate(*args, **kwargs), "eval_steps_left": float(next(left))}

    trained.evaluate = evaluated  # type: ignore[method-assign]
    trained.train()
    assert same(bits_of(model), truth.steps[1])
    assert not same(truth.steps[1], truth.steps[STEPS])
    assert_newest_is(model, url)


@pytest.mark.full
def test_a_trainer_that_is_attached_again_has_one_publisher(make: Make, url: str) -> None:
    model = llama()
    trained = make(model)
    for epoch in range(2):  # a notebook cell that is run again
        attach(trained, url=url, when_busy="wait", dtype="F32")
        trained.train()
        assert assert_newest_is(model, url).epoch == epoch


class Interrupted(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == 2:
            self.on_step_end = lambda *_, **__: None  # type: ignore[method-assign]
            raise KeyboardInterrupt


@pytest.mark.full
def test_training_that_is_begun_again_has_one_publisher(make: Make, url: str) -> None:
    model, callback = llama(), DeltaChainCallback(url, dtype="F32")
    trained = make(model, callback, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trained.train()
    first = callback.publisher
    assert first is not None
    trained.train()
    with pytest.raises(ConfigError, match="closed"):
        first.publish()
    assert assert_newest_is(model, url).epoch == 1


class Averaged(TrainerCallback):
    """Other weights after each step, and others again at the end, as callbacks of averages have."""

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control
        for parameter in kwargs["model"].parameters():
            parameter.clamp_(-0.02, 0.02)

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control
        for parameter in kwargs["model"].parameters():
            parameter.mul_(0.5)


def test_a_version_has_what_callbacks_added_later_did_to_the_weights(make: Make, url: str) -> None:
    model, truth = llama(), Truth()
    trained = make(model)
    attach(trained, url=url, when_busy="wait", dtype="F32")
    trained.add_callback(Averaged())
    trained.add_callback(truth)
    trained.train()
    found = recompute(FileStore(url))
    assert list(found) == [0, 1, 2, 3, 4, 5]
    assert all(same(found[step].state, truth.steps[step]) for step in range(1, STEPS + 1))
    assert_newest_is(model, url)


def test_the_steps_after_the_last_version_are_a_version(make: Make, url: str) -> None:
    model = llama()
    config = PublishConfig(url="memory://replaced", metadata={"run": "c"})
    callback = DeltaChainCallback(url, every_steps=3, config=config, dtype="F32", when_busy="wait")
    make(model, callback).train()
    manifests = [found.committed.manifest for found in recompute(FileStore(url)).values()]
    assert [(m.step, m.metadata["run"]) for m in manifests] == [(None, "c"), (3, "c"), (4, "c")]
    assert_newest_is(model, url)
    assert [receipt.step for receipt in callback.receipts] == [3, 4]


@pytest.mark.full
@pytest.mark.parametrize("bound", [False, True])
def test_metrics_are_in_the_log_history_and_reported_by_a_bound_trainer(
    make: Make, url: str, *, bound: bool
) -> None:
    logged: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, state, control
            logged.append(kwargs["logs"])

    callback = DeltaChainCallback(url, when_busy="wait")
    trained = make(llama(), callback, Reporter(), logging_steps=1)
    assert not bound or callback.bind(trained) is callback
    trained.train()
    given = logged if bound else trained.state.log_history
    lines = [line for line in given if "deltachain/version" in line]
    assert [line["deltachain/version"] for line in lines] == [1.0, 2.0, 3.0, 4.0]
    assert all(0 < line["deltachain/changed_frac"] <= 1 for line in lines)
    assert {"deltachain/bytes", "deltachain/diff_s"} <= lines[0].keys()
    assert bound or "step" in lines[0]


def test_a_bound_trl_trainer_averages_the_metrics(url: str) -> None:
    pending: dict[str, Any] = {"train": defaultdict(list)}
    handler = SimpleNamespace(callbacks=[])
    trainer = SimpleNamespace(_metrics=pending, callback_handler=handler)
    callback = DeltaChainCallback(url).bind(trainer)  # type: ignore[arg-type]
    state = SimpleNamespace(is_world_process_zero=True, global_step=1, log_history=[])
    model = llama()
    arguments: Any = SimpleNamespace(logging_steps=1)
    callback.on_train_begin(arguments, state, SimpleNamespace(), model=model)  # type: ignore[arg-type]
    callback.on_step_end(arguments, state, SimpleNamespace())  # type: ignore[arg-type]
    callback.on_train_end(arguments, state, SimpleNamespace())  # type: ignore[arg-type]
    assert pending["train"]["deltachain/version"] == [1.0]
    assert state.log_history == []


def test_the_last_version_is_the_trained_model_and_loads_from_its_chain(
    make: Make, url: str, tmp_path: Path
) -> None:
    model = llama(tie_word_embeddings=True)
    make(model, DeltaChainCallback(url)).train()
    assert assert_newest_is(model, url).numel == sum(p.numel() for p in model.parameters())
    pulled = tmp_path / "pulled"
    pull(url, out=pulled)
    config = json.loads((pulled / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert same(bits_of(LlamaForCausalLM.from_pretrained(pulled)), bits_of(model))


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_failed_publish_stops_training_or_not_as_configured(
    make: Make, url: str, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    store = FaultyStore(FileStore(url), Fault("fail", "deltas/"))
    monkeypatch.setattr(callback_module, "Publisher", partial(Publisher, store=store))
    model = llama()
    trained = make(model, DeltaChainCallback(url, on_error=on_error, when_busy="wait"))
    if on_error == "raise":
        with pytest.raises(StoreUnavailableError):
            trained.train()
        return
    trained.train()
    assert_newest_is(model, url)
