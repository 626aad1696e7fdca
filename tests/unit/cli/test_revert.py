"""``deltachain revert``: what every replica goes back to, and who may go on from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from deltachain.chain.publisher_record import new_record, write_record
from deltachain.checkpoint import Checkpoint
from deltachain.store import open_store
from tests.unit.cli.support import Pushed, invoke, ok, read_checkpoint, same, write_checkpoint


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("name", ["to", "step", "tag"])
def test_the_head_gets_the_state_of_an_older_version(
    pushed: Pushed, tmp_path: Path, name: str
) -> None:
    ok("tag", pushed.url, "good", "--version", 1)
    ok("pull", pushed.url, "--out", tmp_path / "held")
    value = "good" if name == "tag" else 1
    before = ok("log", pushed.url, "--json").document["versions"]
    done = ok("revert", pushed.url, f"--{name}", value, "--json").document
    assert (done["version"], done["to"], done["from"], done["epoch"]) == (4, 1, 3, 4)
    row = ok("log", pushed.url, "--json").document["versions"][0]
    assert (row["kind"], row["base"], row["step"], row["reverted_to"]) == ("delta", 3, 1, 1)
    assert row["state"] == done["state"] == before[2]["state"]
    assert (row["nnz"], row["nbytes"]) == (done["nnz"], done["nbytes"])
    ok("pull", pushed.url, "--out", tmp_path / "held")
    ok("pull", pushed.url, "--out", tmp_path / "new")
    for folder in ("held", "new"):
        assert same(read_checkpoint(tmp_path / folder), pushed.states[1])
    assert ok("verify", pushed.url, "--json").document["last"] == 4
    assert "revert to 1" in ok("log", pushed.url).stdout
    again = ok("revert", pushed.url, "--to", 1)
    assert "nothing to do" in again.stdout


def test_a_dry_run_says_what_would_be_written(pushed: Pushed) -> None:
    before = files(pushed.url)
    dry = ok("revert", pushed.url, "--to", 0, "--dry-run", "--json").document
    assert files(pushed.url) == before
    assert dry["version"] is None
    assert "nothing was written" in ok("revert", pushed.url, "--to", 0, "--dry-run").stdout
    done = ok("revert", pushed.url, "--to", 0, "--json").document
    assert (dry["nnz"], dry["tensors"]) == (done["nnz"], done["tensors"])
    assert dry["nbytes"] == done["nbytes"]


@pytest.mark.parametrize("encoding", ["step", "overwrite", "raw", "max"])
def test_every_encoding_leads_back(pushed: Pushed, tmp_path: Path, encoding: str) -> None:
    ok("revert", pushed.url, "--to", 1, "--encoding", encoding)
    ok("pull", pushed.url, "--out", tmp_path / "out")
    assert same(read_checkpoint(tmp_path / "out"), pushed.states[1])
    ok("verify", pushed.url)


def test_a_push_of_other_weights_is_refused_until_it_is_told_to_go_on(
    pushed: Pushed, tmp_path: Path
) -> None:
    ok("revert", pushed.url, "--to", 1)
    newer = write_checkpoint(tmp_path / "newer", pushed.states[3])
    refused = invoke("push", newer, pushed.url)
    assert refused.code == 4
    assert "version 4 was reverted to the state of version 1" in refused.stderr
    assert "--continue-reverted" in refused.stderr
    older = write_checkpoint(tmp_path / "older", pushed.states[1])
    assert ok("push", older, pushed.url, "--json").document["version"] == 4
    pushed_on = ok("push", newer, pushed.url, "--continue-reverted", "--json").document
    assert pushed_on["version"] == 5
    assert ok("push", older, pushed.url, "--json").document["version"] == 6  # no mark any more


def test_what_cannot_be_rebuilt_is_not_reverted_to(pushed: Pushed) -> None:
    for part in pushed.url.glob("*s/0*/*.safetensors"):
        if int(part.parent.name[:20]) == 1:
            part.unlink()
    before = files(pushed.url)
    done = invoke("revert", pushed.url, "--to", 1)
    assert done.code == 4
    assert files(pushed.url) == before


def test_nothing_older_is_named(pushed: Pushed) -> None:
    assert invoke("revert", pushed.url).code == 2
    assert invoke("revert", pushed.url, "--to", 1, "--step", 1).code == 2
    assert invoke("revert", pushed.url, "--to", 9).code == 4
    assert invoke("revert", pushed.url, "--tag", "none").code == 4
    assert "nothing to do" in ok("revert", pushed.url, "--to", 3).stdout


def test_a_chain_that_begins_at_a_base_checkpoint_goes_back(pushed: Pushed, tmp_path: Path) -> None:
    base, url = write_checkpoint(tmp_path / "base", pushed.states[0]), tmp_path / "other"
    for number in (1, 2):
        folder = write_checkpoint(tmp_path / str(number), pushed.states[number])
        ok("push", folder, url, "--base", base)
    base.rename(tmp_path / "moved")
    assert invoke("revert", url, "--to", 0).code == 2
    done = ok("revert", url, "--to", 0, "--base", tmp_path / "moved", "--json").document
    assert done["state"] == str(Checkpoint(tmp_path / "moved").state(pushed.states[0]))


def test_a_push_is_refused_where_a_publisher_is_at_work(
    pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, newer = open_store(pushed.url), tmp_path / "newer"
    write_checkpoint(newer, pushed.states[1])
    there = replace(new_record(None), host="gpu-7", machine="another")
    renewed = [write_record(store, there)]

    def renew(_: float) -> None:
        renewed[:] = [write_record(store, renewed[0])]

    monkeypatch.setattr("deltachain.publish.beside.time.sleep", renew)
    before = files(pushed.url / "manifests")
    refused = invoke("push", newer, pushed.url)
    assert refused.code == 4
    assert "host gpu-7" in refused.stderr
    assert "--take-over" in refused.stderr
    assert files(pushed.url / "manifests") == before
    assert ok("push", newer, pushed.url, "--take-over", "--json").document["version"] == 4
