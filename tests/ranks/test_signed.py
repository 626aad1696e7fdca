"""Ranks that sign: one of them has the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.chain.trust import SigningKey, Trust
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.spawn import run

pytestmark = pytest.mark.dist


def test_only_rank_0_needs_the_signing_key(tmp_path: Path) -> None:
    key, url = SigningKey.generate(), (tmp_path / "chain").as_uri()
    file = tmp_path / "key"
    file.write_bytes(key.pem())
    for first in range(2):
        run("tests.ranks.signed_trials:publishes", 2, str(file), url, first)
    trust = Trust.of_reader(str(key.public))
    proofs = list(verify(Chain.open(open_store(url), trust)))
    assert [proof.signed_by for proof in proofs] == [(key.public.key_id,)] * len(proofs)
    assert len(proofs) > 3
