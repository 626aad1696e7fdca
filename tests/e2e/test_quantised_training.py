"""A GRPO run of TRL that publishes bf16 and quantised chains of the same training at once."""

from collections.abc import Collection
from pathlib import Path

import pytest
from safetensors.torch import load_file

from deltachain.chain.chain import Chain
from deltachain.cli.pull import pull
from deltachain.codec.encode import Change, encode_part
from deltachain.publish import DeltaChainCallback, PublishConfig
from deltachain.store import open_store
from deltachain.types import StateDigest
from examples.demo.model import make_model
from examples.demo.pretrain import pretrain
from examples.demo.train import run_grpo
from tests.support.fetch import fetch
from tests.unit.publish.library import differing, quantised_state

STEPS = 3
RECIPES = ("fp8-block", "fp8-block-ue8m0", "fp8-row", "int8-row")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


def delta_nbytes(chain: Chain, version: int, names: Collection[str]) -> tuple[int, int]:
    head = chain.read(version)
    fetched = fetch(chain, chain.plan(version - 1, head))
    deltas = [delta for delta in fetched.deltas() if delta.spec.name in names]
    part = encode_part(Change(delta, StateDigest()) for delta in deltas)
    return len(part.content), part.nnz


def linear(chain: Chain) -> set[str]:
    names = {name for name, *_ in chain.table.tensors}
    return {name for name in names if "_proj.weight" in name}


@pytest.mark.slow
def test_every_quantised_version_is_that_of_the_same_step(tmp_path: Path) -> None:
    pretrain(tmp_path / "checkpoint", steps=20)
    urls = {name: str(tmp_path / name) for name in ("bf16", *RECIPES)}
    callbacks = [
        DeltaChainCallback(
            url,
            config=PublishConfig(
                url=url, quantization=None if name == "bf16" else name, when_busy="wait"
            ),
        )
        for name, url in urls.items()
    ]
    run_grpo(tmp_path / "checkpoint", callbacks=callbacks, steps=STEPS)
    chains = {name: Chain.open(open_store(url)) for name, url in urls.items()}
    for version in range(STEPS + 1):
        pulled = {}
        for name, url in urls.items():
            assert chains[name].read(version).manifest.step == (version or None)
            pull(url, out=tmp_path / "pulled" / name / str(version), version=version)
            folder = tmp_path / "pulled" / name / str(version)
            pulled[name] = load_file(folder / "model.safetensors")
        for recipe in RECIPES:
            model = make_model(0).bfloat16()
            model.load_state_dict(pulled["bf16"], strict=False)
            expected = quantised_state(model, recipe)
            del expected["lm_head.weight"]  # tied
            found = {name: one for name, one in pulled[recipe].items() if name != "lm_head.weight"}
            assert differing(found, expected) == set(), (recipe, version)
    sizes = {
        name: [delta_nbytes(chain, number + 1, linear(chain)) for number in range(STEPS)]
        for name, chain in chains.items()
    }
    whole = sum(nbytes for nbytes, _ in sizes["bf16"])
    for name, counted in sizes.items():
        nbytes, nnz = (sum(numbers) for numbers in zip(*counted, strict=True))
        print(f"{name}: {nbytes:,} B in {STEPS} deltas, {nnz:,} changes, 1/{whole / nbytes:.1f}")  # noqa: T201
    for recipe in RECIPES:
        assert 5 * sum(nbytes for nbytes, _ in sizes[recipe]) <= whole, recipe
