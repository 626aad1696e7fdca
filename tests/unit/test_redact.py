"""No secret is in what commands, logs and pages show, wherever a user has put it."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from deltachain.environment import VARIABLES
from deltachain.redact import redacted_path, redacted_url
from tests.unit.cli.support import invoke

CANARY = "canary7secret"
HOST = "127.0.0.1:9"
"""Nothing answers here."""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"http://user:{CANARY}@h:1/x?token={CANARY}#{CANARY}", "http://h:1/x"),
        (f"http://h?token=a@{CANARY}", "http://..."),
        (f"http://u:{CANARY}/{CANARY}@h", "http://..."),
        (f"http://u:{CANARY}#{CANARY}@h", "http://..."),
        (f"http://a,http://u:{CANARY}@b", "http://..."),
        (f"http://u:{CANARY}@h:{CANARY}", "http://..."),
        ("http://[::1]:80/x", "http://[::1]:80/x"),
        (f"u:{CANARY}@h:80", "...@h:80"),
        (f"dns://{CANARY}@name:80", "dns://name:80"),
        (f"sftp://user:{CANARY}@h/x", "sftp://user@h/x"),
        ("abfs://container@account/x", "abfs://container@account/x"),
        ("s3://bucket/run@1", "s3://bucket/run@1"),
        ("hf://buckets/a/b", "hf://buckets/a/b"),
        ("/mnt/a@b", "/mnt/a@b"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


def test_a_path_is_shown_if_it_leads_somewhere(tmp_path: Path) -> None:
    assert redacted_path(tmp_path) == str(tmp_path)
    assert redacted_path(tmp_path / "absent") == str(tmp_path / "absent")
    for secret in (CANARY, f"-----BEGIN\n{CANARY}", f"{CANARY}/{CANARY}", "\0", "x" * 5000):
        assert redacted_path(Path(secret)) == "..."


ADDRESSES = (
    f"http://user:{CANARY}@{HOST}",
    f"http://{CANARY}@{HOST}",
    f"http://{HOST}/?token={CANARY}",
    f"http://{HOST}#{CANARY}",
    f"http://user:{CANARY}/{CANARY}@{HOST}",
    f"http://user:{CANARY}@{HOST}:{CANARY}",
    f"dns://user:{CANARY}@nowhere.invalid:80",
    f"dns://nowhere.invalid:{CANARY}",
    f"user:{CANARY}@{HOST}",
    f"sftp://user:{CANARY}@{HOST}/x",
    f"s3://user:{CANARY}@bucket/x",
    f"hf://user:{CANARY}@bucket/x?token={CANARY}",
)


def check_silent(*words: object, debug: bool = True) -> None:
    """Run a command in each of its forms; nothing of what it says has the secret."""
    for flag in ("", "--json", "--debug"):
        if flag == "--debug" and not debug:  # shows the names of files
            continue
        if flag == "--json" and words[0] not in ("fleet", "doctor", "log"):
            continue
        try:
            done = invoke(*words, *filter(None, [flag]))
            said = done.stdout + done.stderr
        except Exception as exc:  # noqa: BLE001 - what --debug shows
            said = "".join(traceback.format_exception(exc))
        assert CANARY not in said, (words, flag)


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_of_replicas_are_shown_without_secrets(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_silent("fleet", "status", address, "--timeout", "0.5")
    listed = tmp_path / "replicas.txt"
    listed.write_text(f"{address}\n")
    check_silent("fleet", "status", "--inventory", listed, "--timeout", "0.5")
    monkeypatch.setenv("DELTACHAIN_ENGINES", address)
    check_silent("fleet", "status", "--timeout", "0.5", debug="://" in address)
    check_silent("doctor")


@pytest.mark.parametrize("name", sorted(VARIABLES))
@pytest.mark.parametrize("form", ["{}", "http://user:{}@127.0.0.1:9", "-----BEGIN KEY-----\n{}"])
def test_no_variable_is_shown_that_may_be_a_secret(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("URL", "PRESENCE_URL") and "://" not in form:
        return  # the name of a folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"DELTACHAIN_{name}", form.format(CANARY))
    check_silent("doctor")
    check_silent("log", tmp_path / "chain", debug=False)
    check_silent("fleet", "status", f"http://{HOST}", "--timeout", "0.5", debug=False)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize("form", ["{}", "ftp://u:{}@h", "http://u:{}@h:{}", "http://u:{}@[h"])
def test_no_proxy_is_shown(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, form.replace("{}", CANARY))
    check_silent("doctor")
    check_silent("fleet", "status", "http://replica.invalid:1", "--timeout", "0.5")


@pytest.mark.parametrize(
    "name",
    ["TOKEN_FILE", "ENGINE_KEY_FILE", "SIGNING_KEY", "TRUSTED_KEYS", "ENGINES", "CLIENT_CERT"],
)
@pytest.mark.parametrize(
    "form", ["{}", "a\n{}\n", "# c\n{} x\n", "-----BEGIN\n{}", "\xff{}", "{}\x07"]
)
def test_no_line_of_a_wrong_file_is_shown(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(form.format(CANARY).encode("latin-1"))
    monkeypatch.setenv(f"DELTACHAIN_{name}", os.fspath(file))
    check_silent("doctor")
    check_silent("log", tmp_path / "chain")
    check_silent("fleet", "status", f"http://{HOST}", "--timeout", "0.5")


@pytest.mark.parametrize(
    "command", ["log", "inspect", "verify", "stats", "doctor", "sign", "prune"]
)
@pytest.mark.parametrize("address", [one for one in ADDRESSES if "://" in one])
def test_urls_of_stores_are_shown_without_secrets(command: str, address: str) -> None:
    check_silent(command, address)
