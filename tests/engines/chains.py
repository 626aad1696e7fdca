"""Chains that were trained for real: a small model, AdamW, and a version a step.

Steps of training touch what they touch: few elements of every matrix, by one unit in the last place
or several, most norms not at all, and the masters remember what bf16 cannot show. Nothing that
draws changes at random is like it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from deltachain.cli.pull import pull
from deltachain.publish import PublishConfig, Publisher
from examples.demo.compare_bits import Comparison, compare, dump_bits
from examples.demo.corpus import documents
from examples.demo.model import make_tokenizer
from tests.engines.families import named, with_tokenizer

NAMES: Final = ("qwen3", "qwen2", "llama", "gemma3")
"""Families that a chain is trained of."""

LEARNING_RATE: Final = 3e-6
"""Of the published steps; each then changes a few hundredths of all bf16 weights or fewer."""

_PRETRAINING_STEPS: Final = 80
_PRETRAINING_RATE: Final = 3e-3
_BATCH: Final = 4
_LENGTH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A chain, and what is known of it without reading it.

    Attributes:
        family: Name of the model's family.
        url: Of the chain, ``file://``. Its version 0 holds the bits of ``base``.
        base: Checkpoint folder, in bf16 and with its tokenizer, that training began from.
        last: Number of the newest version.
        densities: Changed share of all elements, of versions 1 to ``last``.
        losses: Of the batches that these were steps on.
        dumps: Folder with the trainer's own bits of every version.
    """

    family: str
    url: str
    base: Path
    last: int
    densities: tuple[float, ...]
    losses: tuple[float, ...]
    dumps: Path

    def dump(self, version: int) -> Path:
        """Bits that the trainer held at a version, as the demo's oracle writes them."""
        return self.dumps / f"{version}.npz"

    def compare(self, version: int, folder: Path) -> Comparison:
        """Hold a checkpoint folder against the trainer's bits of a version.

        No code of the package's readers and writers takes part.
        """
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
    """Train a model of 2 layers on the demo's text, and publish every step after the first ones.

    The masters are fp32, the wire is bf16. The same arguments give the same bits on every machine
    of one kind: torch computes in one thread meanwhile.

    Args:
        family: One of ``NAMES``.
        folder: Gets the checkpoint, the chain and the dumps; empty or not there yet.
        versions: Optimizer steps to publish, after version 0.
        seed: Decides the first weights and the text.
        anchor_every: Versions between two anchors.
        rate: Learning rate of the published steps. At ten times the usual one a model says
            something else from version to version.
        encoding: Encoding of deltas.

    Raises:
        ValueError: No chain is trained of that family.
    """
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
    """The checkpoint folder of a version, by what ``deltachain pull`` runs.

    Args:
        trained: The chain.
        version: Any of its versions.
        folder: Not there yet, or filled by this chain before: it is then brought forwards or back.

    Returns:
        The folder, which loads as it is.
    """
    pull(trained.url, out=folder, version=version)
    return folder


def pretrain(family: str, base: Path, batches: Iterator[Tensor], seed: int) -> None:
    """Write a checkpoint whose weights look like trained ones."""
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
    """Take an optimizer step a batch, without end, and yield the loss before each."""
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
    """Token ids, int64 (_BATCH, _LENGTH), cut from one stream of documents."""
    tokenizer, wanted = make_tokenizer(), _BATCH * _LENGTH
    stream: list[int] = []
    for document in documents(seed):
        stream += [*tokenizer.encode(document, add_special_tokens=False), tokenizer.eos_token_id]
        if len(stream) >= wanted:
            yield torch.tensor(stream[:wanted]).view(_BATCH, _LENGTH)
            stream = stream[wanted:]


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are then in one order, whatever the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
