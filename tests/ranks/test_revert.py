from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.spawn import run

pytestmark = pytest.mark.dist


def test_a_reverted_head_is_refused_on_every_rank(tmp_path: Path) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.revert_trials:goes_back", 2, url)
    assert len(list(verify(Chain.open(open_store(url))))) == 9
