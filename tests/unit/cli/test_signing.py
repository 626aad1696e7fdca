"""Keys on the command line: made, used to sign, trusted, and shown."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from deltachain.chain.trust import PublicKey, SigningKey
from deltachain.store import open_store
from tests.unit.cli.support import Pushed, invoke, ok, random_state, train, write_checkpoint


@pytest.fixture
def key(tmp_path: Path) -> Path:
    ok("keygen", tmp_path / "key")
    return tmp_path / "key"


def public(key: Path) -> PublicKey:
    return SigningKey.load(key).public


def test_keygen_writes_a_file_for_its_owner_and_prints_the_public_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    before = os.umask(0)
    try:
        done = ok("keygen", file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert done.stdout == f"{public(file)}\n"
    report = ok("keygen", tmp_path / "other", "--json").document
    other = public(tmp_path / "other")
    assert report == {
        "file": str(tmp_path / "other"),
        "public_key": str(other),
        "key_id": other.key_id,
    }


def test_keygen_overwrites_nothing(key: Path) -> None:
    before = key.read_bytes()
    done = invoke("keygen", key)
    assert done.code == 2
    assert "never overwritten" in done.stderr
    assert key.read_bytes() == before


def test_keygen_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = invoke("keygen", tmp_path / "none" / "key")
    assert done.code == 2
    assert "No such file or directory" in done.stderr
    assert "hint   name a file in a folder that exists" in done.stderr


def test_a_mirror_is_signed_at_its_source(
    key: Path, pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("mirror", pushed.url, tmp_path / "mirror")
    before = contents(tmp_path / "mirror")
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    done = invoke("sign", tmp_path / "mirror")
    assert done.code == 2, done.stdout
    assert "is a mirror of" in done.stderr
    assert contents(tmp_path / "mirror") == before


def test_a_chain_is_signed_from_its_first_push(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    state, url, by = random_state(), tmp_path / "chain", public(key).key_id
    for number in range(2):
        ok("push", write_checkpoint(tmp_path / f"step-{number}", state), url)
        state = train(state, number)
    assert "not checked" in ok("log", url).stdout
    assert "not checked" in ok("inspect", url).stdout
    assert "not checked" in ok("verify", url).stdout
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(public(key)))
    for command in ("log", "inspect", "verify"):
        shown = ok(command, url).stdout
        assert by in shown
        assert "not checked" not in shown
    log = ok("log", url, "--json").document
    assert [version["signed_by"] for version in log["versions"]] == [[by]] * 2
    assert ok("inspect", url, "--json").document["signed_by"] == [by]
    report = ok("verify", url, "--json").document
    assert (report["signed"], report["checked"]) == ({by: [0, 1]}, True)
    ok("pull", url, "--out", tmp_path / "out")
    assert ok("sign", url, "--json").document["committed"] is False


def test_a_chain_is_signed_from_the_middle_on(
    key: Path, pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "DELTACHAIN_SIGNING_KEY is not set" in invoke("sign", pushed.url).stderr
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(public(key)))
    refused = invoke("pull", pushed.url, "--out", tmp_path / "out")
    assert refused.code == 5
    assert "deltachain sign" in refused.stderr
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.safetensors"))
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    assert invoke("push", pushed.url.parent / "none", pushed.url).code != 0
    assert ok("sign", pushed.url, "--json").document == {
        "url": str(pushed.url),
        "committed": True,
        "version": 4,
        "signatures": [public(key).key_id],
        "signed_by": [public(key).key_id],
        "signed_again": [],
    }
    assert "nothing to do" in ok("sign", pushed.url).stdout
    ok("verify", pushed.url)
    ok("log", pushed.url)
    ok("inspect", pushed.url, "--version", 1)
    for version in (None, 0, 2):
        given = () if version is None else ("--version", version)
        ok("pull", pushed.url, "--out", tmp_path / f"v{version}", *given)
    ok("push", write_checkpoint(tmp_path / "next", train(pushed.states[-1], 9)), pushed.url)
    ok("verify", pushed.url)


def test_verify_names_a_record_that_nobody_signed(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    url, state, store = tmp_path / "chain", random_state(), open_store(str(tmp_path / "chain"))
    records: list[str] = []
    while not records:  # until so much has changed that an anchor is recorded
        ok("push", write_checkpoint(tmp_path / "step", state), url)
        state = train(state, 1, share=0.3)
        records = [info.key for info in store.list("edges/")]
    record = records[0]
    envelope = json.loads(store.get(record))
    payload = json.dumps(envelope["payload"], separators=(",", ":"), ensure_ascii=False)
    data = f'{{"blake3":"{envelope["blake3"]}","payload":{payload},"signatures":[]}}'
    (url / record).write_bytes(data.encode())
    ok("verify", url, "--to", "0")
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(public(key)))
    done = invoke("verify", url)
    assert done.code == 5
    assert f"{record}: no trusted key signed it" in done.stderr


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_a_log_of_reverts_and_signatures_is_legible(
    key: Path, pushed: Pushed, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    ok("sign", pushed.url)
    ok("revert", pushed.url, "--to", 1)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = ok("log", pushed.url).stdout
    table = shown[shown.index("version  ") :]
    assert "\N{HORIZONTAL ELLIPSIS}" not in table
    assert "revert to 1" in table
    assert public(key).key_id[:8] in table
    assert max(map(len, table.splitlines())) <= columns
    assert ("committed" in table) is (columns == 140)


@pytest.mark.parametrize(
    "command",
    [
        ("maintain", "--once"),
        ("prune",),
        ("anchor",),
        ("tag", "good"),
        ("tag", "old", "--delete"),
        ("revert", "--to", "0"),
    ],
)
def test_writers_without_a_key_leave_a_signed_chain_as_it_is(
    key: Path, pushed: Pushed, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """A record without a signature would take the place of one that readers accept, for good."""
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    ok("sign", pushed.url)
    ok("tag", pushed.url, "old")
    monkeypatch.delenv("DELTACHAIN_SIGNING_KEY")
    before = contents(pushed.url)
    name, *options = command
    done = invoke(name, pushed.url, *options)
    assert done.code == 2, done.stdout
    assert "has no signing key" in done.stderr
    assert "set DELTACHAIN_SIGNING_KEY" in done.stderr
    assert contents(pushed.url) == before
    ok("prune", pushed.url, "--dry-run")
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    ok(name, pushed.url, *options)


def contents(url: Path) -> dict[str, bytes]:
    return {str(f.relative_to(url)): f.read_bytes() for f in url.rglob("*") if f.is_file()}


def test_tags_and_prune_records_outlive_the_key_that_signed_them(
    key: Path, pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("tag", pushed.url, "first", "--version", "1")  # before the chain is signed
    ok("prune", pushed.url, "--keep-last", "1", "--grace", "0s")
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    begun = ok("sign", pushed.url, "--json").document
    assert "tags/first/00000001.json" in begun["signed_again"]
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(public(key)))
    ok("tag", pushed.url, "gone", "--version", "2")
    ok("tag", pushed.url, "gone", "--delete")

    ok("keygen", tmp_path / "new")
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(tmp_path / "new"))
    ok("push", write_checkpoint(tmp_path / "next", train(pushed.states[-1], 9)), pushed.url)
    again = ok("sign", pushed.url, "--json").document
    assert not again["committed"]
    assert {"tags/first/00000002.json", "tags/gone/00000002.json"} <= set(again["signed_again"])
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(public(tmp_path / "new")))
    assert "nothing to do" in ok("sign", pushed.url).stdout
    listed = ok("tag", pushed.url, "--json").document["tags"]
    assert [(one["name"], one["version"]) for one in listed] == [("first", 1)]
    ok("prune", pushed.url, "--keep-last", "1")
    ok("maintain", pushed.url, "--once")
    ok("pull", pushed.url, "--tag", "first", "--out", tmp_path / "out")
