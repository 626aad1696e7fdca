"""Publishing to a store, and what is found there."""

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

from deltachain.chain.chain import Chain, Committed
from deltachain.cli.pull import pull
from deltachain.format.documents import Table
from deltachain.publish import PublishConfig, Publisher, PublishReceipt
from deltachain.publish.push import Pushed, push
from deltachain.publish.quantise.settings import Quantization
from deltachain.store import MemoryStore, Store, open_store
from tests.support.faults import Fault, FaultyStore
from tests.support.models import bits_of, recompute, same, train_
from tests.support.values import present

Attach: TypeAlias = Callable[..., Publisher]
NewThreads: TypeAlias = Callable[[str], list[threading.Thread]]


def publish(publisher: Publisher, model: nn.Module, *steps: int, share: float = 0.01) -> None:
    """Train each of these steps, publish it, and wait."""
    for step in steps:
        train_(model, step, share=share)
        publisher.publish(step=step)
        publisher.flush()


def head_of(store: Store) -> Committed:
    return present(Chain.open(store).head())


def assert_head_is(model: nn.Module, version: int, store: Store) -> None:
    """The newest version is this one, and has the bits of the model."""
    found = recompute(store)
    assert max(found) == version
    assert same(found[version].state, bits_of(model))


def served(caplog: pytest.LogCaptureFixture) -> str:
    """Where the first publisher of the test serves its figures; the test logs at INFO."""
    return str(re.findall(r"metrics at (\S+)/metrics", caplog.text)[0])


class Run:
    """A model that is trained, its publisher, and the store in memory, with scripted faults."""

    def __init__(
        self, attach: Attach, store: MemoryStore, model: Any, *faults: Fault, **settings: Any
    ) -> None:
        self.model, self.store = model, store
        self.faulty = FaultyStore(store, *faults)
        self.publisher = attach(model, on=self.faulty, **settings)

    def call(self, step: int) -> Future[PublishReceipt]:
        """Train and publish a step, and wait for nothing."""
        train_(self.model, step)
        return self.publisher.publish(step=step)

    def publish(self, *steps: int, share: float = 0.01) -> None:
        publish(self.publisher, self.model, *steps, share=share)

    def assert_head_is(self, version: int) -> None:
        assert_head_is(self.model, version, self.store)


Begin: TypeAlias = Callable[..., Run]


@dataclass(frozen=True)
class Quantised:
    """A chain of quantised versions, and what is pulled from it."""

    folder: Path

    @property
    def url(self) -> str:
        return str(self.folder / "chain")

    def attach(self, model: Any, recipe: str | Quantization | None, **settings: Any) -> Publisher:
        return Publisher(PublishConfig(url=self.url, quantization=recipe, **settings)).attach(model)

    def push(self, checkpoint: Path, recipe: str | Quantization | None) -> Pushed:
        config = PublishConfig(url=self.url, quantization=recipe)
        return push(open_store(self.url, writer=True), checkpoint, config)

    def pulled(self, version: int = 0) -> dict[str, Tensor]:
        out = self.folder / f"out-{version}"
        if not out.exists():
            pull(self.url, out=out, version=version)
        return load_file(out / "model.safetensors")

    def config(self) -> dict[str, Any]:
        """The quantisation that the files of version 0 name."""
        self.pulled()
        text = (self.folder / "out-0" / "config.json").read_bytes()
        found: dict[str, Any] = json.loads(text)["quantization_config"]
        return found

    def ignored(self) -> list[str]:
        config = self.config()
        found: list[str] = config.get("ignore") or config["modules_to_not_convert"]
        return found

    @property
    def table(self) -> Table:
        return Chain.open(open_store(self.url)).table

    @property
    def begun(self) -> bool:
        return (self.folder / "chain" / "chain.json").exists()

    @property
    def newest(self) -> int:
        return Chain.open(open_store(self.url)).newest(0)
