"""Trained chains are what engine tests take them for."""

from __future__ import annotations

from pathlib import Path

import pytest

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
