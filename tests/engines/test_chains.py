"""Trained chains are what engine tests take them for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltachain.chain.chain import Chain
from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint
from deltachain.store import open_store
from deltachain.verify import verify
from tests.engines.families import FAMILIES, make
from tests.engines.trainer import NAMES, Trained, pulled, train

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_is_small_and_no_tensor_in_it_is_constant(name: str, tmp_path: Path) -> None:
    file = make(name, tmp_path) / WEIGHTS_FILE
    assert file.stat().st_size < 4_000_000
    tensors = load_file(file)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert [n for n, t in tensors.items() if t.numel() > 1 and t.min() == t.max()] == []


def test_a_family_has_the_same_bits_wherever_it_is_made(tmp_path: Path) -> None:
    one = make("jamba", tmp_path / "one") / WEIGHTS_FILE
    torch.manual_seed(1)
    other = make(FAMILIES["jamba"], tmp_path / "other") / WEIGHTS_FILE
    assert one.read_bytes() == other.read_bytes()


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
