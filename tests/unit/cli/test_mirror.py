"""``deltachain mirror``, run in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltachain.errors import ConfigError
from deltachain.mirror.mirror import check_placement
from deltachain.publish import Publisher
from deltachain.store import MemoryStore, open_store
from tests.support.models import TinyModel, train_
from tests.unit.cli.support import invoke


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    folder, model = tmp_path / "chain", TinyModel()
    with Publisher(str(folder)).attach(model, assets={}) as publisher:
        for step in range(3):
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
    return folder


def test_a_chain_is_mirrored_and_verified(chain: Path, tmp_path: Path) -> None:
    done = invoke("mirror", chain, tmp_path / "copy")
    assert (done.code, done.stdout) == (0, "")
    assert "version 3; " in done.stderr
    assert invoke("verify", tmp_path / "copy").code == 0
    again = invoke("mirror", chain, tmp_path / "copy")
    assert "version 3; 0 objects, 0 B" in again.stderr


@pytest.mark.parametrize("inside", ["sub", "a/b"])
def test_a_mirror_is_not_put_where_a_chain_is_stored(
    chain: Path, tmp_path: Path, inside: str
) -> None:
    other = tmp_path / "other"
    assert invoke("mirror", chain, other).code == 0
    before = {folder: sorted(folder.rglob("*")) for folder in (chain, other)}
    link = tmp_path / "link"
    link.symlink_to(chain)
    for outer in (chain, other, link):
        done = invoke("mirror", chain, outer / inside)
        assert done.code == 2
        assert "where a chain is stored" in " ".join(done.stderr.split())
        assert "beside the chain" in done.stderr
    assert {folder: sorted(folder.rglob("*")) for folder in before} == before


def test_a_mirror_is_not_put_below_the_prefix_of_its_source() -> None:
    source, below = (MemoryStore(f"bucket/chain{end}") for end in ("", "/copy"))
    with pytest.raises(ConfigError, match="is inside memory://bucket/chain") as caught:
        check_placement(source, below)
    assert "beside the chain" in caught.value.hint
    check_placement(source, MemoryStore("bucket/chain-copy"))


def test_json_has_one_object_a_version(chain: Path, tmp_path: Path) -> None:
    done = invoke("mirror", chain, tmp_path / "copy", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["lag_versions"] == 3
    assert all(row["objects"] > 0 and row["nbytes"] > 0 for row in rows)


def test_a_mirror_from_the_head(chain: Path, tmp_path: Path) -> None:
    assert invoke("mirror", chain, tmp_path / "copy", "--from", "head").code == 0
    record = json.loads(open_store(tmp_path / "copy").get("mirror.json"))
    assert record["writer"].startswith("deltachain ")
    assert invoke("mirror", chain, tmp_path / "other", "--from", "soon").code == 2


def test_a_mirror_is_promoted(chain: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    invoke("mirror", chain, copy)
    done = invoke("mirror", "--promote", copy, "--json")
    assert done.document == {"url": str(copy), "version": 3}
    refused = invoke("mirror", "--promote", copy)
    assert refused.code == 2
    assert "is no mirror" in refused.stderr


def test_two_urls_are_needed(chain: Path) -> None:
    done = invoke("mirror", chain)
    assert done.code == 2
    assert "mirror needs two URLs" in done.stderr


def test_ctrl_c_ends_a_mirror_that_follows(chain: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltachain", "mirror", str(chain), str(tmp_path / "copy")]
    with subprocess.Popen(
        [*command, "--follow", "--poll", "0.05", "--json"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = [json.loads(process.stdout.readline())["version"] for _ in range(4)]
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert first == [0, 1, 2, 3]
    assert invoke("verify", tmp_path / "copy").code == 0
