"""``deltachain fleet`` and what it prints of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltachain.subscribe.leader import Leader
from tests.unit.cli.support import invoke
from tests.unit.control.replicas import app_of, followed, leader_of, served

TOKEN = "one that nobody guesses"  # noqa: S105
GONE = "http://127.0.0.1:9"


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    for here in followed(tmp_path):
        yield from leader_of(here)


def test_status_of_all_and_who_is_gone(leader: Leader) -> None:
    with served(app_of(leader, token=TOKEN)) as url:
        told = invoke("fleet", "update", "--version", 1, "--token", TOKEN, url)
        assert told.code == 0
        found = invoke("fleet", "status", "--token", TOKEN, "--json", url, GONE)
    first, second = found.document["replicas"]
    assert (first["engine"], first["version"], first["ready"]) == (url, 1, False)
    assert "did not answer" in second["error"]
    assert found.code == 7


def test_the_table(leader: Leader) -> None:
    leader.update()
    with served(app_of(leader, token=TOKEN)) as url:
        shown = invoke("fleet", "status", "--token", TOKEN, url)
        refused = invoke("fleet", "pause", url)
    assert "ready" in shown.stdout
    assert url in shown.stdout
    assert "401" in refused.stdout
    assert refused.code == 7
    assert leader.status().paused is False


def test_only_some_verbs_take_a_version() -> None:
    assert invoke("fleet", "pause", "--version", 1, GONE).code == 2
