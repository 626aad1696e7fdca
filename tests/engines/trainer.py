"""A trainer in the test's own process: it takes a step and commits a version when it is told to."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from deltachain.cli.pull import pull
from deltachain.publish import PublishConfig, Publisher
from examples.demo.compare_bits import Comparison, compare, dump_bits
from examples.demo.corpus import documents
from examples.demo.model import make_tokenizer
from tests.engines.families import named, with_tokenizer

NAMES: Final = ("qwen3", "qwen2", "llama", "gemma3", "qwen3_moe")

LEARNING_RATE: Final = 3e-6
"""Of the published steps; each then changes a few hundredths of all bf16 weights or fewer."""

_PRETRAINING_STEPS: Final = 80
_PRETRAINING_RATE: Final = 3e-3
_BATCH: Final = 4
_LENGTH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A chain, and what is known of it without reading it."""

    family: str
    url: str
    base: Path
    last: int
    densities: tuple[float, ...]
    losses: tuple[float, ...]
    dumps: Path

    def dump(self, version: int) -> Path:
        return self.dumps / f"{version}.npz"

    def compare(self, version: int, folder: Path) -> Comparison:
        return compare(self.dump(version), folder)


def train(
    family: str,
    folder: Path,
    versions: int = 20,
    *,
    seed: int = 0,
    anchor_every: int = 3,
    rate: float = LEARNING_RATE,
    encoding: str = "step",
) -> Trained:
    """Train a model of 2 layers on the demo's text, and publish every step after the first ones."""
    if family not in NAMES:
        raise ValueError(f"{family!r} is none of {NAMES}")
    base, dumps = folder / "base", folder / "dumps"
    dumps.mkdir(parents=True)
    url = (folder / "chain").resolve().as_uri()
    with one_thread():
        batches = make_batches(seed)
        pretrain(family, base, batches, seed)
        model = masters_of(base)
        dump_bits(model, dumps / "0.npz")
        densities, losses = [], []
        config = PublishConfig(
            url=url, when_busy="wait", anchor_every=anchor_every, encoding=encoding
        )
        with Publisher(config) as publisher:
            publisher.attach(model)
            steps = optimizer_steps(model, batches, rate)
            for step, loss in enumerate(islice(steps, versions), 1):
                receipt = publisher.publish(step=step).result()
                if receipt.version != step:
                    raise RuntimeError(f"step {step} became version {receipt.version}")
                dump_bits(model, dumps / f"{step}.npz")
                densities.append(receipt.density)
                losses.append(loss)
    return Trained(
        family=family,
        url=url,
        base=base,
        last=versions,
        densities=tuple(densities),
        losses=tuple(losses),
        dumps=dumps,
    )


def pulled(trained: Trained, version: int, folder: Path) -> Path:
    pull(trained.url, out=folder, version=version)
    return folder


def pretrain(family: str, base: Path, batches: Iterator[Tensor], seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        configuration = named(family).configuration()
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            configuration, dtype=torch.float32
        )
    for _ in islice(optimizer_steps(model, batches, _PRETRAINING_RATE), _PRETRAINING_STEPS):
        pass
    model.bfloat16().save_pretrained(base)
    with_tokenizer(base)


def masters_of(base: Path) -> PreTrainedModel:
    """The checkpoint as fp32: its cast to bf16 has exactly the bits of the file."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, local_files_only=True
    )
    return model


def optimizer_steps(model: nn.Module, batches: Iterator[Tensor], rate: float) -> Iterator[float]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    for inputs in batches:
        loss: Tensor = model(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def make_batches(seed: int) -> Iterator[Tensor]:
    tokenizer, wanted = make_tokenizer(), _BATCH * _LENGTH
    stream: list[int] = []
    for document in documents(seed):
        stream += [*tokenizer.encode(document, add_special_tokens=False), tokenizer.eos_token_id]
        if len(stream) >= wanted:
            yield torch.tensor(stream[:wanted]).view(_BATCH, _LENGTH)
            stream = stream[wanted:]


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


RATE: Final = 1e-2
"""Far more than a real one: tokens must differ from one version to the next, to be told apart."""


class Trainer:
    """A small model that is trained for real; its checkpoint is version 0 of the chain."""

    def __init__(
        self,
        folder: Path,
        url: str = "",
        *,
        family: str = "qwen3",
        seed: int = 0,
        steps: int = 1,
        quantization: str | None = None,
    ) -> None:
        self.base = folder / "base"
        self.url = url or (folder / "chain").resolve().as_uri()
        self.head = 0
        self._each = steps
        self._pulled = folder / "pulled"
        with one_thread():
            batches = make_batches(seed)
            pretrain(family, self.base, batches, seed)
            self._model = masters_of(self.base)
        self._steps = optimizer_steps(self._model, batches, RATE)
        config = PublishConfig(
            url=self.url, when_busy="wait", anchor_factor=1e9, quantization=quantization
        )
        self._publisher = Publisher(config).attach(self._model)
        if quantization is not None:
            self.base = self.pulled(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._publisher.__exit__(kind, error, traceback)

    def step(self) -> int:
        with one_thread(), torch.enable_grad():
            for _ in range(self._each):
                next(self._steps)
        self.head = self._publisher.publish(step=self.head + 1).result().version
        return self.head

    def pulled(self, version: int, *, near: bool = False) -> Path:
        folder, before = self._pulled / str(version), self._pulled / str(version - 1)
        if not folder.exists():
            if near and before.exists():
                shutil.copytree(before, folder)
            pull(self.url, out=folder, version=version)
        return folder


class Run:
    """A small model that others publish; it saves itself as a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.base = folder, folder / "base"
        with one_thread():
            batches = make_batches(0)
            pretrain("qwen3", self.base, batches, 0)
            self.model = masters_of(self.base)
        self._steps = optimizer_steps(self.model, batches, RATE)

    def step(self) -> None:
        with one_thread(), torch.enable_grad():
            next(self._steps)

    def saved(self) -> Path:
        folder = self.folder / "saved"
        save(self.model, folder)
        with_tokenizer(folder)
        return folder


def save(model: PreTrainedModel, folder: Path | str) -> None:
    """Save whole weights in bf16; all ranks of a sharded model call this."""
    state = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().bfloat16()
        for name, one in model.state_dict().items()
    }
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
