"""Trained chains are what engine tests take them for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltachain.chain.chain import Chain
from deltachain.checkpoint import Checkpoint
from deltachain.store import open_store
from deltachain.verify import verify
from tests.engines.chains import NAMES, Trained, pulled, train

VERSIONS = 3


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("trained")
    return {name: train(name, folder / name, VERSIONS) for name in NAMES}


@pytest.mark.parametrize("family", NAMES)
def test_every_version_is_the_trainers_to_the_bit(
    family: str, chains: dict[str, Trained], tmp_path: Path
) -> None:
    trained = chains[family]
    proofs = list(verify(Chain.open(open_store(trained.url)), first=0, last=trained.last))
    assert [proof.version for proof in proofs] == list(range(VERSIONS + 1))
    assert trained.compare(0, trained.base).equal
    for version in (2, 0, 3, 1):
        assert trained.compare(version, pulled(trained, version, tmp_path / "pulled")).equal
    assert not trained.compare(2, tmp_path / "pulled").equal


@pytest.mark.parametrize("family", NAMES)
def test_a_step_changes_a_few_elements_of_every_matrix(
    family: str, chains: dict[str, Trained]
) -> None:
    trained = chains[family]
    assert len(trained.densities) == VERSIONS
    assert all(0.005 < density < 0.05 for density in trained.densities)
    assert max(trained.losses) < 2.0  # a fresh model is at 6.2: these weights have learned
    specs = Checkpoint(trained.base).specs.values()
    matrices = {spec.name for spec in specs if len(spec.shape) == 2}
    assert matrices <= set(trained.compare(VERSIONS, trained.base).different)


def test_the_seed_decides_every_bit(chains: dict[str, Trained], tmp_path: Path) -> None:
    again = train("qwen3", tmp_path, 8, anchor_every=1000)
    assert chains["qwen3"].compare(VERSIONS, again.dump(VERSIONS)).equal
    head = Chain.open(open_store(again.url)).head()
    assert head is not None
    assert [edge.version for edge in head.manifest.recent if edge.kind == "anchor"] == [0]


def test_a_pulled_version_loads_and_goes_on_with_a_text(
    chains: dict[str, Trained], tmp_path: Path
) -> None:
    folder = pulled(chains["qwen3"], VERSIONS, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    asked = tokenizer("count: 3 4 5", return_tensors="pt").input_ids
    assert tokenizer.decode(model(asked).logits[0, -1].argmax()) == " "


def test_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mamba' is none of"):
        train("mamba", tmp_path)
