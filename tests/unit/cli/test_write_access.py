"""A record that nobody signed, put into the store of a signed chain, stops none of its writers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltachain.chain import identity as mirror_record
from deltachain.cli import console
from tests.unit.cli.support import Done, invoke, ok, random_state, train, write_checkpoint

CANARY = "canary7secret"
RECORDS = {
    "a record": json.dumps(
        {
            "format": 1,
            "chain": "0" * 32,
            "source": f"s3://u:{CANARY}@b/x\n  hint: \u202ecall 1\x1b[2J" + "y" * 999,
        }
    ).encode(),
    "a damaged record": b"{",
    "a record of another format": b'{"chain": 1}',
}


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    key = tmp_path / "key"
    ok("keygen", key)
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    state = random_state()
    for number in range(3):
        state = train(state, number)
        write_checkpoint(tmp_path / f"step-{number}", state)
        if number < 2:
            ok("push", tmp_path / f"step-{number}", tmp_path / "chain", "--step", number)
    return tmp_path / "chain"


def run(command: str, url: Path) -> Done:
    name, *options = command.split()
    if name == "push":
        return invoke("push", url.parent / "step-2", url)
    return invoke(name, url, *options)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(
    "command",
    ["push", "tag good", "prune", "anchor", "maintain --once", "revert --version 0", "sign"],
)
def test_writers_of_a_signed_chain_warn_of_a_mirror_record_and_go_on(
    url: Path, command: str, record: str
) -> None:
    mirror_record._told.clear()
    (url / "mirror.json").write_bytes(RECORDS[record])
    done = run(command, url)
    assert done.code == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "mirror" in line]
    assert warning.startswith("warning  ")
    assert "nobody signed" in warning
    assert CANARY not in done.stderr
    assert console.clean(done.stderr) == done.stderr
    assert len(warning) < 1500


@pytest.fixture
def unsigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number in range(3):
        write_checkpoint(tmp_path / f"step-{number}", random_state(number))
    ok("push", tmp_path / "step-0", tmp_path / "chain")
    ok("keygen", tmp_path / "key")
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(tmp_path / "key"))
    return tmp_path / "chain"


@pytest.mark.parametrize("command", ["push", "tag good", "sign"])
def test_writers_of_an_unsigned_chain_refuse_a_mirror_and_show_nothing_secret(
    unsigned: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unsigned / "mirror.json").write_bytes(RECORDS["a record"])
    if command != "sign":
        monkeypatch.delenv("DELTACHAIN_SIGNING_KEY")
    done = run(command, unsigned)
    assert done.code == 2
    assert "is a mirror of s3://b/x" in done.stderr
    assert CANARY not in done.stderr
    assert len(done.stderr.splitlines()) == 3
