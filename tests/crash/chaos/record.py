"""What a version's weights are by the trainer's own files, and whether tokens are theirs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError
from deltachain.format.documents import reverted_to
from deltachain.store import Store
from tests.crash.chaos.trainer import BEGIN, SESSION, file_of
from tests.engines.expected import MARGIN, Judge

STORE_S: Final = 120.0
"""Seconds that a store may be away before a version counts as one that nobody committed."""


class Reference(Judge):
    """Judges tokens by whichever weights it holds at the moment."""

    def hold(self, weights: Path) -> None:
        self._bits = load_file(weights)
        self._model.load_state_dict(self._bits)
        self._is_rounded = False

    def wrong(
        self, prompt: Sequence[int], tokens: Sequence[int], which: Iterable[int]
    ) -> list[int]:
        which = list(which)
        gap = self.gap(prompt, tokens)
        if all(gap[position] <= MARGIN for position in which):
            return []  # no tolerance is smaller
        return super().wrong(prompt, tokens, which)

    def gaps(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, float]:
        if not self._is_rounded:
            self._rounding.load_state_dict(self._bits)
            self._is_rounded = True
            vars(self).pop("_noisy", None)
        return super().gaps(prompt, tokens)

    def gap(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        logits = self._logits(self._model, prompt, tokens)
        return logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Judgement of one answer."""

    unexplained: str = ""
    told_apart: bool | None = None


class Record:
    """Versions of a chain, and the trainers' bits of each."""

    def __init__(self, store: Store, base: Path, folder: Path, stop: Event) -> None:
        self._store, self._base, self._folder, self._stop = store, base, folder, stop
        self._reference = Reference(base)
        self._chain: Chain | None = None
        self._files: dict[int, Path | None] = {}

    @property
    def chain(self) -> Chain:
        self._chain = self._chain or Chain.open(self._store)
        return self._chain

    def weights_of(self, version: int) -> Path | None:
        if version not in self._files:
            found = self._find(version)
            if found is None:
                return None
            self._files[version] = found
        return self._files[version]

    def judge(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        spans: Sequence[tuple[int, int, str]],
        *,
        thorough: bool,
    ) -> Verdict:
        starts, ends = [start for start, _, _ in spans], [end for _, end, _ in spans]
        if [*starts, len(tokens)] != [0, *ends]:
            return Verdict(unexplained="not every token has a version")
        labels = [label for _, _, label in spans]
        if any(not label.isdecimal() for label in labels):
            return Verdict(unexplained=f"versions are {labels}")
        versions = [int(label) for label in labels]
        for (start, end, _), version in zip(spans, versions, strict=True):
            weights = self.weights_of(version)
            if weights is None:
                return Verdict(unexplained=f"version {version} was never committed")
            self._reference.hold(weights)
            if wrong := self._reference.wrong(prompt, tokens, range(start, end)):
                return Verdict(unexplained=f"tokens {wrong} are not those of version {version}")
        return Verdict(told_apart=self._told_apart(prompt, tokens, versions) if thorough else None)

    def _told_apart(
        self, prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int]
    ) -> bool | None:
        """Whether the version before the first one would have gone on otherwise."""
        before = self.weights_of(versions[0] - 1) if versions and versions[0] else None
        if before is None or not before.exists():
            return None
        self._reference.hold(before)
        gap, margin = self._reference.gaps(prompt, tokens)
        return bool((gap > margin).any())

    def _find(self, version: int) -> Path | None:
        deadline = time.monotonic() + STORE_S
        while True:
            try:
                found = self.chain.find(version)
            except DeltaChainError:
                if time.monotonic() > deadline or self._stop.wait(1.0):
                    raise
                continue
            if found is None:
                return None
            older = reverted_to(found.manifest)
            if older is None and version and found.manifest.state == found.manifest.base_state:
                older = version - 1  # who takes a chain over begins with a version without changes
            if older is not None:
                return self.weights_of(older)
            session = found.manifest.metadata.get(SESSION, "")
            path = self._folder / file_of(session, found.manifest.step)
            return path if path.exists() else self._folder / file_of(session, BEGIN)
