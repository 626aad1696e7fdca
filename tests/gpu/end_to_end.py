"""A trainer and a replica on one card: phases of a version beside floors of the same run."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import deltachain
from deltachain.kernels.torch_kernels import bits_of
from tests.gpu.diff import floors, synchronize

VERSIONS = 4
TOKENS = 64
LEARNING_RATE = 1e-6


def model_of(where: str, divisor: int) -> Qwen3ForCausalLM:
    """Return Qwen3 with 4.02 B parameters on a device; ``divisor`` shortens each axis."""
    config = Qwen3Config(
        vocab_size=151936 // divisor,
        hidden_size=2560 // divisor,
        intermediate_size=9728 // divisor,
        num_hidden_layers=max(1, 36 // divisor),
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=max(8, 128 // divisor),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(where):
        return Qwen3ForCausalLM(config).bfloat16()


def bench_end_to_end(where: str, divisor: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield figures of a trainer with its snapshot on the host, then on the device."""
    known = floors(where)
    yield "floors", known
    places: tuple[Literal["host", "device"], ...] = ("host", "device")
    for place in places[: 2 if where == "cuda" else 0] or (None,):
        yield f"snapshot on the {place or 'host'}", _versions(where, divisor or 1, place, known)
        if where == "cuda":
            torch.cuda.empty_cache()


def _versions(
    where: str, divisor: int, place: Literal["host", "device"] | None, known: dict[str, float]
) -> dict[str, Any]:
    model, replica = model_of(where, divisor), model_of(where, divisor)
    nbytes = sum(one.numel() * one.element_size() for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    tokens = torch.randint(model.config.vocab_size, (1, TOKENS), device=where)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        synchronize(where)
        start = time.perf_counter()
        result = work()
        synchronize(where)
        return time.perf_counter() - start, result

    figures: dict[str, list[float]] = {}
    memory = Path("/dev/shm")  # noqa: S108 - not a disk
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * nbytes
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as url:
        config = deltachain.PublishConfig(url=url, snapshot=place)
        attach_s, publisher = timed(lambda: deltachain.Publisher(config).attach(model))
        with publisher:
            publisher.flush()
            newcomer_s, subscriber = timed(lambda: _followed(url, replica))
            for number in range(1, VERSIONS + 1):
                step_s, _ = timed(step)
                start = time.perf_counter()
                blocks_s, future = timed(partial(publisher.publish, step=number))
                receipt = future.result()
                applied = subscriber.update()
                seconds = {
                    "optimizer step": step_s,
                    "publish blocks": blocks_s,
                    "encode": receipt.encode_s,
                    "commit": receipt.commit_s,
                    "fetch": applied.fetch_s,
                    "stage": applied.stage_s,
                    "swap": applied.swap_s,
                    "step to served": time.perf_counter() - start,
                }
                for name, value in seconds.items():
                    figures.setdefault(name, []).append(value)
                wrong = _differing(model, replica)
                assert not wrong, f"version {number}: {wrong} elements differ"
    return {
        "numel": nbytes // 2,
        "changed": receipt.density,
        "bytes of a version": receipt.nbytes,
        "attach with first anchor": attach_s,
        "newcomer": newcomer_s,
        "floor: weights once to the device": nbytes / known["host_to_device_gbps"] / 1e9,
        "floor: both sides read on the device": 2 * nbytes / known["device_copy_gbps"] / 1e9,
        **{name: statistics.median(some[1:]) for name, some in figures.items()},
    }


def _followed(url: str, replica: nn.Module) -> deltachain.Subscriber:
    with torch.no_grad():
        for parameter in replica.parameters():
            parameter.zero_()
    subscriber = deltachain.Subscriber(url, replica)
    subscriber.update()
    return subscriber


def _differing(one: nn.Module, other: nn.Module) -> int:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum(int((bits_of(a) != bits_of(b)).sum()) for a, b in pairs)
