"""``.venv-trainers/bin/python -m tests.ranks.peaks``: memory of each of four ranks.

Trials of frameworks with a larger model, without their comparisons. Each rank prints, in MB, the
size of its model in the wire dtype, the memory it keeps once attached, and the most that a publish
adds. ``fused``: what it takes to find the saved form of large models with fused experts, without
their weights.
"""

import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.conversion import conversions
from tests.ranks import transformers_trials, trials
from tests.ranks.bench import _peak, _reset_peak, _resident, _warm_up
from tests.ranks.spawn import run

LARGER: Final = {"hidden_size": 1024, "intermediate_size": 3072}
VERSIONS: Final = 10
ROWS: Final = {
    "FSDP1": ("trials:ten_steps", "flat"),
    "DeepSpeed ZeRO-3": ("deepspeed_trials:zero", "3"),
    "Megatron TP2 x PP2": ("megatron_trials:megatron", "qwen3 TP2 PP2"),
    "Megatron EP2": ("megatron_trials:megatron", "qwen3_moe EP2"),
}
FUSED: Final[dict[str, dict[str, Any]]] = {  # sizes that are not the class's own
    "qwen3_moe": {"num_hidden_layers": 48, "head_dim": 128},  # Qwen3-30B-A3B
    "deepseek_v3": {},
}


def measure(rank: int, trial: str, how: str, folder: str) -> None:
    _warm_up(folder)
    trials.WIDTH, trials.INNER, trials.VOCAB = 1024, 3072, 4099
    transformers_trials.TINY |= LARGER
    module, _, function = trial.partition(":")
    there = importlib.import_module(f"tests.ranks.{module}")
    vars(there).update(publishes=_publishes, attaches=lambda *_: None, RATE=3e-6)
    rest = (0, VERSIONS) if trial == "trials:ten_steps" else ()
    getattr(there, function)(rank, how, f"{folder}/chain", folder, *rest)


def _publishes(
    rank: int, model: Any, train: Callable[[int], None], *given: Any, numbers: object = None
) -> None:
    del numbers
    train(0)  # the optimizer's state is there from here on
    before = _resident()
    config = PublishConfig(url=given[1], dtype="BF16", when_busy="wait", part_nbytes=4 << 20)
    with Publisher(config).attach(model) as publisher:
        kept, more, changed = _resident() - before, 0, 0.0
        for number in range(1, VERSIONS + 1):
            train(number)
            now = _resident()
            _reset_peak()
            receipt = publisher.publish(step=number).result(60)
            more, changed = max(more, _peak() - now), max(changed, receipt.density)
    whole = 2 * receipt.numel
    figures = (f"{one / 1e6:.1f}" for one in (whole, kept, more))
    said = f"rank {rank}: model, kept, more: {' '.join(figures)} MB, {changed:.1%} changed"
    sys.stdout.write(f"{said}\n")


def fused(kind: str, **sizes: Any) -> str:
    """Say what finding the saved form of a model takes, of this process."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes))
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    now = _resident()
    _reset_peak()
    start = time.perf_counter()
    conversions(model, shapes)
    took, more = time.perf_counter() - start, _peak() - now
    each = more / max(map(math.prod, shapes.values()))
    return f"{kind}: {took:.1f} s, {more / 1e6:.0f} MB, {each:.2f} bytes an element of the largest"


def main() -> None:
    if sys.argv[1:] == ["fused"]:
        fused("qwen3_moe", **transformers_trials.CONVERTED["qwen3_moe"])  # imports what it needs
        sys.stdout.writelines(f"{fused(kind, **sizes)}\n" for kind, sizes in FUSED.items())
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name, given in ROWS.items():
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        with tempfile.TemporaryDirectory() as folder:
            run("tests.ranks.peaks:measure", 4, *given, folder)


if __name__ == "__main__":
    main()
