"""``--metrics`` of commands that follow a chain, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltachain.publish import Publisher
from tests.support.models import TinyModel, train_
from tests.unit.cli.support import invoke


def scraped(url: str) -> dict[str, float]:
    return {
        one.labels.get("engine", one.name): one.value
        for family in text_string_to_metric_families(httpx.get(url).text)
        for one in family.samples
    }


@pytest.mark.parametrize("command", ["follow", "mirror"])
def test_followers_show_what_they_hold(command: str, tmp_path: Path) -> None:
    chain, model = tmp_path / "chain", TinyModel()
    place = ["--out", tmp_path / "out"] if command == "follow" else [tmp_path / "out", "--follow"]
    words = [command, chain, *place, "--metrics", "0", "--poll", "0.01", "--json"]
    with Publisher(str(chain)).attach(model, assets={}) as publisher:
        process = subprocess.Popen(
            [sys.executable, "-m", "deltachain", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[-1]
            assert process.stdout.readline().startswith("{")
            train_(model, 1)
            publisher.publish(step=1)
            publisher.flush()
            assert process.stdout.readline().startswith("{")
            deadline = time.monotonic() + 60
            while (found := scraped(url))["deltachain_applies_total"] < 2:
                assert time.monotonic() < deadline
            assert found["deltachain_version"] == found["deltachain_head_version"] == 1
            assert (found["deltachain_lag_versions"], found[command]) == (0, 1)
            assert found["deltachain_last_look_timestamp_seconds"] <= time.time()
            assert httpx.get(url.replace("/metrics", "/readyz")).status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr


@pytest.mark.parametrize(
    "words",
    [
        ("follow", "x", "--out", "y", "--once", "--metrics", "0"),
        ("agent", "x", "--engine", "http://127.0.0.1:9", "--out", "y", "--once", "--metrics", "0"),
    ],
)
def test_a_command_that_ends_by_itself_has_no_metrics(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = invoke(*words)
    assert refused.code == 2
    assert "--metrics is for a command that follows" in refused.stderr
