"""A chain of the encoding ``max`` in a real server: ranks decode the tiles of their shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.cli.pull import pull
from deltachain.store import open_store
from tests.engines.chains import Trained, train
from tests.engines.expected import sharded
from tests.engines.serving import Server, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VERSIONS = 8
NO_ANCHOR = 1000


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("chain") / "run"
    return train("qwen2", folder, VERSIONS, anchor_every=NO_ANCHOR, encoding="max")


def holds(server: Server, checkpoint: Path, tp: int) -> bool:
    cut = sharded(checkpoint, tp)
    return server.checksums() == {name: server.digest(bits) for name, bits in cut.items()}


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_follow_one_by_one_and_over_several_versions(
    chain: Trained, tmp_path: Path, tp: int
) -> None:
    head = Chain.open(open_store(chain.url)).head()
    assert head is not None
    assert "max" in head.manifest.edge.encodings
    with start(chain.base, tmp_path / "server", chain.url, tp=tp, plain=True, dev=True) as server:
        assert server.status()["version"] == VERSIONS  # from version 0, as it started
        assert server.post("rollback", version=0).json()["version"] == 0
        server.post("release")
        for version in (1, 2, 5, VERSIONS):
            pull(chain.url, out=tmp_path / str(version), version=version)
            found = server.update(version)
            assert found["version"] == version
            assert holds(server, tmp_path / str(version), tp)
            assert "anchor" not in str(server.status()["last"])
