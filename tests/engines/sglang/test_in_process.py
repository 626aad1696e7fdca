"""An ``Engine`` in a program of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.chains import train
from tests.engines.program import run_program

pytestmark = pytest.mark.engine


def test_an_engine_follows_between_its_calls(tmp_path: Path) -> None:
    chain = train("qwen3", tmp_path, 3, rate=1e-2)
    done = run_program("tests.engines.sglang.offline", chain.url, str(chain.base))
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["labels"][1:] == ["2", "1"]
    assert (seen["scrubbed"], seen["version"]) == ([True, True], 1)
    assert "deltachain: " in done.stderr


def test_an_engine_that_was_told_of_a_chain_says_that_it_does_not_follow(tmp_path: Path) -> None:
    chain = train("qwen3", tmp_path, 3, rate=1e-2)
    done = run_program(
        "tests.engines.sglang.offline", chain.url, str(chain.base), DELTACHAIN_URL=chain.url
    )
    assert done.returncode != 0
    assert (
        "UnsupportedEngineError: DELTACHAIN_URL is set, but an Engine in process follows"
        in done.stderr
    )
    assert "deltachain_sglang.subscribe(engine, url)" in done.stderr
    done = run_program(
        "tests.engines.sglang.offline",
        chain.url,
        str(chain.base),
        DELTACHAIN_URL=chain.url,
        DELTACHAIN_STRICT="0",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "deltachain follows nothing: DELTACHAIN_URL is set" in done.stderr
