"""TRL's asynchronous trainer on several ranks: a sync gathers nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.spawn import run
from tests.ranks.transfer_trials import SYNCS

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("wait", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_every_sync_of_sharded_weights_is_a_version(tmp_path: Path, wait: str) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.transfer_trials:syncs", 2, url, str(tmp_path), wait)
    proofs = list(verify(Chain.open(open_store(url))))
    assert [proof.version for proof in proofs] == list(range(SYNCS + 1))
