"""Anything that gives names and tensors can be published, such as a quantised export."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from tests.support.models import recompute

BLOCK = 8


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 weights, and a scale for each block of rows."""
    blocks = weight.view(-1, BLOCK, weight.shape[1])
    scale = blocks.abs().amax((1, 2)) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scale[:, None, None]).view_as(weight).to(torch.float8_e4m3fn), scale


class Exporter:
    """Makes the tensors of a checkpoint anew each time, out of weights that it trains."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = {f"{n}.w": torch.randn(32, 16, generator=generator) for n in range(3)}
        self.given: list[weakref.ref[Tensor]] = []
        self.alive = 0

    def train_(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for weight in self.weights.values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            fp8, scale = quantised(weight)
            for suffix, tensor in (("weight", fp8), ("weight_scale_inv", scale)):
                self.alive = max(self.alive, sum(ref() is not None for ref in self.given))
                self.given.append(weakref.ref(tensor))
                yield f"{name}.{suffix}", tensor
            del fp8, scale, tensor


def bits(exporter: Exporter) -> dict[str, bytes]:
    return {n: t.view(torch.uint8).numpy().tobytes() for n, t in exporter()}


def test_fp8_weights_and_scales_are_published_bit_by_bit() -> None:
    store, exporter = MemoryStore(), Exporter()
    expected = [bits(exporter)]
    with Publisher(PublishConfig(url="memory://x"), store=store).attach(exporter) as publisher:
        for step in range(1, 6):
            exporter.train_(step)
            expected.append(bits(exporter))
            receipt = publisher.publish(step=step).result(60)
            assert 0 < receipt.nnz < receipt.numel
    for version, truth in zip(recompute(store).values(), expected, strict=True):
        assert {name: b.tobytes() for name, b in version.state.items()} == truth


def test_an_export_is_never_held_whole() -> None:
    exporter = Exporter()
    with Publisher("memory://y", store=MemoryStore()).attach(exporter) as publisher:
        exporter.train_(1)
        publisher.publish().result(60)
    assert exporter.alive <= 3


def test_an_export_that_lacks_a_tensor_publishes_nothing() -> None:
    store, exporter = MemoryStore(), Exporter()
    with Publisher("memory://z", store=store).attach(exporter) as publisher:
        lost = exporter.weights.pop("2.w")
        exporter.train_(1)
        with pytest.raises(ConfigError, match=r"'2\.w\.weight' is gone"):
            publisher.publish()
        exporter.weights["2.w"] = lost
        expected = bits(exporter)
        assert publisher.flush() is not None
    *_, newest = recompute(store).values()
    assert {name: b.tobytes() for name, b in newest.state.items()} == expected


def test_an_export_that_gives_a_name_twice_is_refused() -> None:
    def twice() -> Iterator[tuple[str, Tensor]]:
        yield from 2 * [("w", torch.zeros(2))]

    with pytest.raises(ConfigError, match="'w' twice"):
        Publisher("memory://v", store=MemoryStore()).attach(twice)


@pytest.mark.parametrize("name", ["head.w", "1.w.weight"])
def test_an_export_that_gives_a_further_tensor_publishes_nothing(name: str) -> None:
    store, exporter, further = MemoryStore(), Exporter(), dict[str, Tensor]()

    def export() -> Iterator[tuple[str, Tensor]]:
        yield from exporter()
        yield from further.items()

    with Publisher("memory://t", store=store).attach(export) as publisher:
        further[name] = torch.ones(2)
        exporter.train_(1)
        with pytest.raises(UnsupportedModelError, match=f"{name}'") as caught:
            publisher.publish()
        assert caught.value.hint
        assert publisher.version == 0
        del further[name]
        assert publisher.flush() is not None
    *_, newest = recompute(store).values()
    assert {name: b.tobytes() for name, b in newest.state.items()} == bits(exporter)


def test_an_empty_export_is_refused() -> None:
    with pytest.raises(ConfigError, match="no weights"):
        Publisher("memory://u", store=MemoryStore()).attach(lambda: ())
