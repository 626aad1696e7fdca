"""``dashboard`` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deltachain.store import open_store
from tests.unit.cli.support import invoke
from tests.unit.dashboard.reports import chain_of
from tests.unit.replica.replicas import eventually

TOKEN = "one that nobody guesses"  # noqa: S105


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    chain_of(12, open_store(str(tmp_path / "chain")))
    return tmp_path / "chain"


@contextmanager
def dashboard(*words: object, **environment: str) -> Iterator[str]:
    """Address of a dashboard, which is ended with Ctrl-C and then ends by itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deltachain", "dashboard", *map(str, words), "--listen", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stderr is not None
    try:
        url = process.stderr.readline().split()[-1]
        httpx.get(url, timeout=60)  # it serves, so it handles Ctrl-C where a shell's job ignores it
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


def test_a_chain_is_shown_as_it_grows(chain: Path) -> None:
    with dashboard(chain, "--poll", "0.05", "--engine", "http://127.0.0.1:1") as url:

        def overview() -> dict[str, object]:
            found: dict[str, object] = httpx.get(f"{url}/api/overview").json()
            return found

        eventually(lambda: overview()["newest"] == 11)
        eventually(lambda: "silent" in str(overview()["alerts"]))
        assert "text/html" in httpx.get(url).headers["content-type"]


def test_its_replicas_are_those_of_the_inventory(chain: Path) -> None:
    engines = "http://127.0.0.1:1,http://127.0.0.1:2"
    with dashboard(chain, DELTACHAIN_ENGINES=engines) as url:
        shown = httpx.get(f"{url}/api/overview").json()["replicas"]
    assert sorted(replica["engine"] for replica in shown) == engines.split(",")


def test_it_asks_for_the_token_of_the_replicas(chain: Path) -> None:
    with dashboard(chain, DELTACHAIN_TOKEN=TOKEN) as url:
        assert httpx.get(f"{url}/api/overview").status_code == 401
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{url}/api/overview", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--listen", "0.0.0.0:0"], "needs a token"),
        (["--listen", "nowhere"], "no address"),
        (["--engine", "ftp://x"], "not a server address"),
        (["--engine", "http://a", "--engine", "http://a/"], "twice"),
    ],
)
def test_mistakes_are_named_with_a_hint(chain: Path, words: list[str], expected: str) -> None:
    done = invoke("dashboard", chain, *words)
    assert done.code == 2
    assert expected in done.stderr
    assert "hint" in done.stderr


def test_a_taken_port_is_named(chain: Path) -> None:
    with dashboard(chain) as url:
        done = invoke("dashboard", chain, "--listen", url.rpartition(":")[2])
    assert done.code == 2
    assert "cannot be served" in done.stderr
