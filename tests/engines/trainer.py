"""A trainer in the test's own process: it takes a step and commits a version when it is told to."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from deltachain.cli.pull import pull
from deltachain.publish import PublishConfig, Publisher
from tests.engines.chains import make_batches, masters_of, one_thread, optimizer_steps, pretrain

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
