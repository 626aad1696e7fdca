"""The demo, with real training, a real follower process and the oracle; shorter than a person's."""

import json
from pathlib import Path

import pytest

from deltachain.format.keys import CHAIN_KEY
from deltachain.store import open_store
from examples.demo.follower_process import DemoError
from examples.demo.run import run_demo

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.mark.parametrize(
    "store", ["file", *(pytest.param(store, marks=pytest.mark.slow) for store in ("s3", "hf"))]
)
def test_the_demo_ends_with_no_mismatching_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: str
) -> None:
    code = run_demo(workdir=tmp_path, store=store, steps=4, pretrain_steps=20, json_output=True)
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert code == 0, captured.err
    assert report["versions"] == 5
    assert report["mismatching_bits"] == 0
    assert report["verified"]
    assert [row["step"] for row in report["rows"]] == [1, 2, 3, 4]
    assert len(report["judged"]) == 6
    assert all(judged["elements"] == report["parameters"] for judged in report["judged"])
    assert report["bytes_sent"] == sum(row["nbytes"] for row in report["rows"])
    assert report["bytes_dense"] == 5 * 2 * report["parameters"]
    assert report["late_joiner_bytes"] == report["bytes_sent"] + report["anchor_bytes"]


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "chain").mkdir()
    with pytest.raises(DemoError, match="is not empty"):
        run_demo(workdir=tmp_path, steps=1)
    assert list(tmp_path.iterdir()) == [tmp_path / "chain"]


def test_a_place_that_holds_a_chain_is_left_alone(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    open_store(url).put(CHAIN_KEY, b"somebody's")
    with pytest.raises(DemoError, match=f"{url} holds a chain already"):
        run_demo(workdir=tmp_path / "work", store=url, steps=1)
    assert [info.key for info in open_store(url).list()] == [CHAIN_KEY]
