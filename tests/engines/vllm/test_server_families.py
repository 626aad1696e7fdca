"""A server of a family that registers a parameter while it is loaded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engines.load import prompt
from tests.engines.replica import serving
from tests.engines.serving import Server, start
from tests.engines.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def tokens(server: Server) -> list[tuple[int, ...]]:
    dice = random.Random(3)
    return [server.generate(prompt(dice), 24).tokens for _ in range(8)]


def test_a_server_of_phi_serves_what_it_serves_without_us(tmp_path: Path) -> None:
    """vLLM registers the bias of its head while it loads it: that is not there before."""
    with Trainer(tmp_path, family="phi") as trainer, Trainer(tmp_path / "other") as other:
        with start(trainer.base, tmp_path / "alone") as server:
            alone = tokens(server)
        lenient = {"DELTACHAIN_STRICT": "0"}
        folder = tmp_path / "refused"
        with start(trainer.base, folder, other.url, environment=lenient) as server:
            assert server.get("ready").status_code == 503
            assert tokens(server) == alone
        with serving(trainer, tmp_path, plain=False) as replica:
            assert "refused" not in replica.server.status()["classes"]
            assert tokens(replica.server) == alone
            replica.server.update(trainer.step())
            assert replica.goes_on_as(1)
