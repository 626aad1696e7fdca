"""A real vLLM reads our files by TRL's engine, and follows TRL's files by ours."""

from pathlib import Path

import pytest

from tests.engines.serving import said_by


@pytest.mark.peers
@pytest.mark.parametrize("way", ["theirs", "ours"])
def test_a_vllm_follows_twenty_versions(way: str, tmp_path: Path) -> None:
    assert said_by("tests.peers.fleet", way, str(tmp_path)) == {"versions": 20}
