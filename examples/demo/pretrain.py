"""Pretraining of the random model, until weights and updates resemble those of trained models."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast

from examples.demo.corpus import documents
from examples.demo.model import make_model, make_tokenizer, save_checkpoint
from examples.demo.process_setup import quiet_libraries, spare_one_core

STEPS: Final = 300
SECONDS: Final = 45.0

_BATCH: Final = 4
_LENGTH: Final = 64
_PEAK_LEARNING_RATE: Final = 1e-3
_AVERAGED_STEPS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainReport:
    parameters: int
    steps: int
    tokens: int
    seconds: float
    loss_start: float
    loss_end: float


def pretrain(
    out: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    seconds: float = SECONDS,
    progress: Callable[[int, int, float], None] | None = None,
    text: Callable[[int], Iterator[str]] = documents,
) -> PretrainReport:
    """Create a model, train it on generated text and save it as a bf16 checkpoint folder."""
    tokenizer = make_tokenizer(None if text is documents else text(seed))
    model = make_model(seed)
    start = time.monotonic()
    losses: list[float] = []
    with spare_one_core():
        for loss in _train(model, _batches(tokenizer, text(seed)), steps=steps, seconds=seconds):
            losses.append(loss)
            if progress is not None:
                progress(len(losses), steps, loss)
    duration = time.monotonic() - start
    with quiet_libraries():
        save_checkpoint(model, tokenizer, out)
    first, last = losses[:_AVERAGED_STEPS], losses[-_AVERAGED_STEPS:]
    return PretrainReport(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps=len(losses),
        tokens=len(losses) * _BATCH * _LENGTH,
        seconds=duration,
        loss_start=sum(first) / len(first),
        loss_end=sum(last) / len(last),
    )


def _batches(tokenizer: PreTrainedTokenizerFast, text: Iterator[str]) -> Iterator[torch.Tensor]:
    wanted = _BATCH * _LENGTH
    stream: list[int] = []
    for document in text:
        stream += tokenizer.encode(document, add_special_tokens=False)
        stream.append(tokenizer.eos_token_id)
        if len(stream) >= wanted:
            yield torch.tensor(stream[:wanted]).view(_BATCH, _LENGTH)
            stream = stream[wanted:]


def _learning_rate(step: int, done: float) -> float:
    rise = min(1.0, (step + 1) / 10)
    return _PEAK_LEARNING_RATE * rise * 0.5 * (1.0 + math.cos(math.pi * done))


def _train(
    model: torch.nn.Module, batches: Iterable[torch.Tensor], *, steps: int, seconds: float
) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), fused=True)
    start = time.monotonic()
    for step, inputs in enumerate(batches):
        done = max(step / steps, (time.monotonic() - start) / seconds)
        if done >= 1.0 and step > 0:
            return
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, min(done, 1.0))
        loss: torch.Tensor = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
