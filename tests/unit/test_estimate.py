"""The estimate says what BENCHMARKS.md measured, what models have, and what roles really hold."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from deltachain import estimate as module
from deltachain.chain.upload import DENSE_SHARE
from deltachain.estimate import CostSettings, Measured, estimate
from deltachain.types import TensorSpec
from tests.bench.chains import SMALL, SyntheticChain, changes_of, count
from tests.bench.codec import encode
from tests.unit.cli.support import SPECS as CHECKPOINT
from tests.unit.cli.support import ok, random_state, refused, write_checkpoint

ROOT: Final = Path(__file__).resolve().parents[2]

LLAMA: Final = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
DEEPSEEK: Final = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
TRILLION: Final = DEEPSEEK | {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
}
IMAGES: Final = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
    "dtype": "bfloat16",
}
PUBLIC: Final = {
    "llama": (LLAMA, 405e9),
    "v3": (DEEPSEEK, 671e9),
    "k2": (TRILLION, 1.03e12),
    "vl": (IMAGES, 8.29e9),
}

SPECS: Final = SMALL.specs()


def measured() -> list[Measured]:
    values = [*vars(module).values(), *module.BITS.values(), *module.SPEEDS.values()]
    return [one for one in values if isinstance(one, Measured)]


@pytest.mark.parametrize("figure", measured(), ids=lambda one: f"{one.line} {one.values}")
def test_a_figure_is_that_of_the_benchmarks(figure: Measured) -> None:
    sections = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8").split("\n## ")
    section = next(one for one in sections if one.startswith(f"{figure.section}:"))
    rests = [
        line.removeprefix(figure.line)
        for line in section.splitlines()
        if line.startswith(f"{figure.line} ")
    ]
    found = [tuple(map(float, re.findall(r"\d+(?:\.\d+)?", rest))) for rest in rests]
    assert figure.values in [numbers[: len(figure.values)] for numbers in found]


def test_columns_of_the_sizes_are_densities() -> None:
    text = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    named = "  ".join(f"{100 * density:.2f}%" for density in module.DENSITIES)
    assert f"{named}    fp8   int8" in text
    assert module.DENSE.values == (DENSE_SHARE,)


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLIC)
def test_a_configuration_has_as_many_parameters_as_its_model(name: str, tmp_path: Path) -> None:
    settings, numel = PUBLIC[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    found = ok("estimate", tmp_path, "--ranks", 64, "--json").document
    assert found["numel"] == pytest.approx(numel, rel=0.01)
    assert found["nbytes"] == pytest.approx(2 * numel, rel=0.01)
    assert found["costs"]["full"]["nbytes"] == 2 * found["numel"]
    rank = found["rooms"]["a rank of it"]
    assert found["nbytes"] / 64 < rank["memory"] <= rank["most"] < 3 * found["nbytes"] / 64
    assert ok("estimate", file, "--ranks", 64, "--json").document["numel"] == found["numel"]


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["step", "max", "overwrite"])
def test_a_step_takes_as_many_bytes_as_an_encoded_one(encoding: str) -> None:
    (step,) = SyntheticChain(layout=SMALL).with_density(0.01).steps(1)
    changes = changes_of(step, SPECS)
    part = encode(changes, {name: old for name, (old, _) in step.items()}, encoding)
    run = CostSettings(density=count(changes) / SMALL.numel, encoding=encoding)
    assert estimate(SPECS, run).costs["step"].nbytes == pytest.approx(len(part.data), rel=0.15)


def test_costs_grow_as_they_must() -> None:
    one, more = (estimate(SPECS, CostSettings(density=density)) for density in (0.001, 0.02))
    assert one.costs["step"].nbytes < more.costs["step"].nbytes < more.costs["anchor"].nbytes
    assert one.anchor_every > more.anchor_every > 1
    assert one.costs["full"] == more.costs["full"]
    assert one.costs["full"].dollars == pytest.approx(8 * 2 * SMALL.numel / 1e9 * 0.09)
    every = estimate(SPECS, CostSettings(density=1.0))
    assert every.costs["step"].nbytes <= every.costs["anchor"].nbytes
    slow = estimate(SPECS, CostSettings(link=1e3))
    assert slow.period_s == pytest.approx(slow.costs["step"].nbytes / 1e3, rel=0.01)
    assert one.period_s == 30


def test_quantised_weights_take_the_bits_of_their_own_column() -> None:
    run = CostSettings(density=0.012)
    sizes = [
        estimate([TensorSpec("w", dtype, (1 << 30,))], run).costs["step"].nbytes * 8 / 0.012 / 2**30
        for dtype in ("BF16", "F8_E4M3")
    ]
    assert sizes == pytest.approx([9.76, 13.19], rel=1e-3)


# What a process holds beyond what it held before, in bytes: of an attach, of a step and of a pull.
ROLES: Final = """
import ctypes, threading, json, sys
from pathlib import Path

import torch
from torch import nn

from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.store.file import FileStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.subscribe.targets.folder import OwnFolder
from dataclasses import replace

root = Path(sys.argv[1])

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))

def begin():
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")

def made(layers):
    torch.manual_seed(0)
    kinds = (nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(layers))
    return nn.Sequential(*kinds)

def step(model):
    for number, parameter in enumerate(model.parameters()):
        bits = parameter.detach().view(torch.int16).view(-1)
        draw = torch.Generator().manual_seed(number)
        bits[torch.randperm(bits.numel(), generator=draw)[: bits.numel() // 25]] += 1

def publisher(name, model):
    return Publisher(PublishConfig(url=str(root / name), when_busy="wait")).attach(model)

def pull(name, out):
    config = SubscribeConfig(url=str(root / name), undo_applies=0)
    with Subscriber(config, OwnFolder(root / out)) as subscriber:
        subscriber.update()

warm, model, found = made(1), made(32), {}
with publisher("warm", warm) as first:
    step(warm)
    first.publish().result()
pull("warm", "warm-out")

before = begin()
with publisher("chain", model) as mine:
    found["attach"] = status("VmHWM") - before
    step(model)
    before = begin()
    mine.publish().result()
    found["step"] = status("VmHWM") - before
# As of a bucket, which has no cheap ranges: large objects are held in files.
FileStore.capabilities = replace(FileStore.capabilities, cheap_ranges=False)
del mine
begin()
before, peak, done = status("RssAnon"), [0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], status("RssAnon"))

watcher = threading.Thread(target=watch)
watcher.start()
pull("chain", "out")
done.set()
watcher.join()
found["pull"] = peak[0] - before
found["disk"] = sum(file.stat().st_size for file in (root / "out").iterdir())
print(json.dumps(found))
"""


@pytest.mark.full
def test_memory_is_what_roles_hold(tmp_path: Path) -> None:
    """Of a model of 268 MB: what an attach, a step of 4 % and a pull from a bucket add."""
    done = subprocess.run(
        [sys.executable, "-c", ROLES, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    specs = [TensorSpec(f"{n}.weight", "BF16", (2048, 2048)) for n in range(32)]
    nbytes = sum(spec.nbytes for spec in specs)
    told = estimate(specs, CostSettings(density=0.04, cores=2))
    rank, folder = told.rooms["a rank of it"], told.rooms["folder"]
    assert nbytes <= found["attach"] <= rank.most
    assert found["step"] == pytest.approx(rank.memory - nbytes, rel=0.4)
    assert found["pull"] <= folder.most, (found, folder)
    assert found["disk"] == pytest.approx(nbytes, rel=0.01)
    assert found["disk"] <= folder.disk


def test_a_checkpoint_is_known_by_its_headers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", random_state())
    found = ok("estimate", folder, "--json").document
    assert found["tensors"] == 6
    assert found["nbytes"] == sum(spec.nbytes for spec in CHECKPOINT)
    assert found["settings"]["egress"] == 0.09
    step = found["costs"]["step"]
    assert math.isclose(sum(step["phases"].values()), step["seconds"])


@pytest.mark.parametrize("columns", [80, 140])
def test_a_table_fits(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = write_checkpoint(tmp_path / "model", random_state())
    shown = ok("estimate", folder, "--link", "0.001Mbit/s", "--density", "100%")
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "covers several steps" in shown.stdout
    assert "…" not in shown.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--density", "much"], "write 1% or 0.01"),
        (["--density", "0"], "density is above 0 and at most 100%"),
        (["--link", "1Gb"], "write 100Mbit/s, 1Gbit/s or 2GB/s"),
        (["--every", "soon"], "is not a span of time"),
        (["--egress", "-1"], "egress at least 0"),
        (["--encoding", "acme.zigzag"], "encoding is one of step, max"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(options: list[str], said: str) -> None:
    refused("estimate", "nowhere", *options, code=2, said=said)


def test_what_is_no_model_is_refused_with_a_remedy(tmp_path: Path) -> None:
    refused("estimate", "no/such-model", code=2, said="download it first")
    (tmp_path / "config.json").write_text('{"model_type": "acme"}')
    refused("estimate", tmp_path, code=2, said=("makes no model of it", "headers are enough"))
    (tmp_path / "config.json").write_text("{")
    refused("estimate", tmp_path / "config.json", code=2, said="makes no model of it")


def test_a_configuration_needs_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    refused("estimate", tmp_path, code=2, said=("transformers", "pip install 'deltachain[trl]'"))
    folder = write_checkpoint(tmp_path / "model", random_state())
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert ok("estimate", folder, "--json").document["tensors"] == 6
