"""What is trained: a model's first weights and the changes of each step, the same for every way.

A scene lies in a folder that every process reads for itself, so the trainer has its optimizer's
steps and each replica has the truth to compare with, and neither comes over the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deltachain.types import Indices, TensorSpec
from tests.bench.chains import U16, ModelLayout, SyntheticChain
from tests.bench.timing import say

HEAD: Final = 128
LAYERS: Final = 4
_FIRST: Final = "first.npy"
_NAMES: Final = "tensors.json"


@dataclass(frozen=True, slots=True)
class Span:
    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Change:
    indices: Indices
    bits: U16


@dataclass(frozen=True, slots=True)
class Scene:
    folder: Path
    spans: tuple[Span, ...]

    @classmethod
    def open(cls, folder: Path) -> Scene:
        rows = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
        specs = [TensorSpec(name, "BF16", tuple(shape)) for name, shape in rows]
        stops = np.cumsum([spec.numel for spec in specs]).tolist()
        spans = zip(specs, [0, *stops], stops, strict=False)
        return cls(folder, tuple(Span(*span) for span in spans))

    @property
    def numel(self) -> int:
        return self.spans[-1].stop

    def first(self) -> U16:
        bits: U16 = np.load(self.folder / _FIRST)
        return bits

    def change(self, version: int) -> Change:
        indices, bits = (np.load(path) for path in _files(self.folder, version))
        return Change(indices.astype(np.int64), bits)

    def tensors(self, flat: U16) -> dict[str, Tensor]:
        whole = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
        return {
            span.spec.name: whole[span.start : span.stop].view(span.spec.shape)
            for span in self.spans
        }


def layout_of(parameters: int) -> ModelLayout:
    # 24 h**2 of embedding and 12 h**2 a layer.
    width = (parameters / (24 + 12 * LAYERS)) ** 0.5
    heads = max(1, round(width / HEAD))
    hidden = heads * HEAD
    return ModelLayout(
        hidden=hidden,
        intermediate=3 * hidden,
        layers=LAYERS,
        heads=heads,
        kv_heads=max(1, heads // 2),
        head_dim=HEAD,
        vocab=24 * hidden,
    )


def make_scene(folder: Path, *, parameters: int, versions: int, density: float) -> Scene:
    layout = layout_of(parameters)
    say(f"{versions} steps of a model of {layout.numel / 1e6:.1f} M parameters")
    chain = SyntheticChain(layout=layout).with_density(density)
    rows = [(spec.name, spec.shape) for spec in layout.specs()]
    (folder / _NAMES).write_text(json.dumps(rows), encoding="utf-8")
    for version, step in enumerate(chain.steps(versions), start=1):
        if version == 1:
            np.save(folder / _FIRST, np.concatenate([old for old, _ in step.values()]))
        _save(folder, version, _changes(step))
    return Scene.open(folder)


def _changes(step: Mapping[str, tuple[U16, U16]]) -> Iterator[tuple[Indices, U16]]:
    start = 0
    for old, new in step.values():
        at = np.flatnonzero(old != new)
        yield at + start, new[at]
        start += old.size


def _save(folder: Path, version: int, changes: Iterator[tuple[Indices, U16]]) -> None:
    indices, bits = zip(*changes, strict=True)
    at, values = _files(folder, version)
    np.save(at, np.concatenate(indices).astype(np.uint32))
    np.save(values, np.concatenate(bits))


def _files(folder: Path, version: int) -> tuple[Path, Path]:
    return folder / f"{version:04}.indices.npy", folder / f"{version:04}.bits.npy"
