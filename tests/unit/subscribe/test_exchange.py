"""Staged and live bits change places, all or nothing, wherever the exchange is interrupted."""

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from deltachain.kernels.protocol import LiveBits, kernels_for
from deltachain.subscribe.targets import tensor_patch as module
from deltachain.subscribe.targets.tensor_patch import Exchange
from deltachain.types import BITS_DTYPES

N = 37
"""Elements: several blocks, and a rest."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOST_BLOCK", 8)
    monkeypatch.setattr(module, "DEVICE_BLOCK", 8)


def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange in blocks on the host, as on devices."""
    monkeypatch.setattr(Exchange, "_is_compiled", lambda _: False)


def pair(kind: str, width: int = 2) -> "tuple[LiveBits, LiveBits, list[int], list[int]]":
    """Live and staged bits on the host or as a device has them, and their values."""
    rng = np.random.default_rng(width)
    live, staged = (rng.integers(0, 256, N, BITS_DTYPES[width]) for _ in range(2))
    before, after = live.tolist(), staged.tolist()
    if kind != "device":
        return live, staged, before, after
    receive = kernels_for(torch.empty(0, dtype=torch.int16)).receive
    like = torch.empty(0)
    return receive(live, like), receive(staged, like), before, after


def values(bits: Any) -> list[int]:
    return bits.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["compiled", "host", "device"])
def test_bits_change_places_and_change_back(
    kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "host":
        in_blocks(monkeypatch)
    live, staged, before, after = pair(kind, width)
    exchange = Exchange(staged)
    for _ in range(2):
        for _ in range(2):  # a repetition changes nothing
            exchange.run(live)
            assert (values(live), values(exchange.staged)) == (after, before)
        for _ in range(2):
            exchange.run(live, back=True)
            assert (values(live), values(exchange.staged)) == (before, after)


def test_an_empty_tensor_is_exchanged() -> None:
    Exchange(np.empty(0, np.uint16)).run(np.empty(0, np.uint16))


class _Interrupt:
    """Raises ``KeyboardInterrupt`` before the line with a given number, of those of one file."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(exchange: Exchange, live: LiveBits, line: int, *, back: bool) -> bool:
    """Run an exchange, interrupted before some line; return whether it was."""
    traced = sys.gettrace()
    sys.settrace(_Interrupt(line))
    try:
        exchange.run(live, back=back)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(traced)
    return False


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "blocks"])
@pytest.mark.parametrize("on", [True, False], ids=["forward", "back"])
@pytest.mark.parametrize("then_back", [True, False], ids=["taken back", "finished"])
def test_an_interrupt_before_any_line_loses_no_bit(
    on: bool, then_back: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        in_blocks(monkeypatch)
    line = 0
    while True:
        line += 1
        live, staged, before, after = pair("host")
        exchange = Exchange(staged)
        if not on:
            exchange.run(live)
        if not interrupted(exchange, live, line, back=not on):
            break
        exchange.run(live, back=then_back)
        expected = (before, after) if then_back else (after, before)
        assert (values(live), values(exchange.staged)) == expected, line
    assert line > (3 if compiled else 10 * (N // 8))


@pytest.mark.parametrize("nth", range(1, 11))
@pytest.mark.parametrize("half", [True, False])
def test_a_copy_that_fails_half_done_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, nth: int, half: bool
) -> None:
    in_blocks(monkeypatch)
    live, staged, before, after = pair("host")
    kernels: Any = kernels_for(live)
    done, real = [0], kernels.overwrite_

    def overwrite_(weights: Any, bits: Any) -> None:
        done[0] += 1
        if done[0] == nth:
            if half:
                weights[: len(bits) // 2] = bits[: len(bits) // 2]
            raise OSError("device lost")
        real(weights, bits)

    monkeypatch.setattr(kernels, "overwrite_", overwrite_)
    exchange = Exchange(staged)
    with pytest.raises(OSError, match="device lost"):
        exchange.run(live)
    exchange.run(live, back=True)
    assert (values(live), values(exchange.staged)) == (before, after)
