"""Wrong calls: each is told what is wrong with it, and what to do."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltachain.cli.app import PANELS
from deltachain.errors import ConfigError, StoreUnavailableError
from deltachain.store import calls as outage
from deltachain.store import open_store
from tests.unit.cli.support import Pushed, invoke, ok, random_state, write_checkpoint


def test_versions_in_the_wrong_order_are_told_as_such(pushed: Pushed) -> None:
    done = invoke("verify", pushed.url, "--from", 3, "--to", 1)
    assert done.code == 2
    assert "version 3, the first to verify, is after version 1" in done.stderr
    assert "hint" in done.stderr
    done = invoke("verify", pushed.url, "--from", 9)
    assert done.code == 4
    assert "version 9 is not committed, head is 3" in done.stderr
    done = invoke("verify", pushed.url, "--from", 9, "--to", 1)
    assert done.code == 4
    assert "version 9 is not committed, head is 3" in done.stderr


@pytest.mark.parametrize("command", ["push", "inspect"])
def test_a_file_that_is_no_safetensors_file_is_told_as_such(tmp_path: Path, command: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "tiny", "layers": list(range(20))}))
    done = invoke(command, file, *([tmp_path / "chain"] if command == "push" else []))
    assert done.code == 5
    assert "not a safetensors file" in done.stderr
    assert "name a safetensors file" in done.stderr
    assert "publisher" not in done.stderr


def test_a_checkpoint_with_an_empty_tensor_is_not_pushed(tmp_path: Path) -> None:
    """No edge gives any of it, so nobody could pull the chain."""
    save_file({"a": np.zeros((0, 4)), "b": np.ones(3)}, tmp_path / "model.safetensors")
    done = invoke("push", tmp_path, tmp_path / "chain")
    assert (done.code, "'a' is empty" in done.stderr, "hint" in done.stderr) == (2, True, True)
    assert not (tmp_path / "chain").exists()


@pytest.mark.parametrize("name", ["b", "ab", "-bucket", "bucket-"])
def test_a_name_that_no_bucket_has_is_named(name: str) -> None:
    done = invoke("log", f"s3://{name}/x")
    assert done.code == 2
    assert f"'{name}' is no name of a bucket" in done.stderr
    assert "3 to 63" in done.stderr


def test_a_dead_endpoint_is_named_and_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    monkeypatch.setattr(outage.logger, "handlers", [handler])
    monkeypatch.setattr(outage, "REPORT_S", 0.1)
    options = {
        "key": "key",
        "secret": "hunter2",
        "region": "us-east-1",
        "endpoint_url": "http://127.0.0.1:9",
        "deadline_s": 1.0,
    }
    store = open_store("s3://bucket/run", options)
    with pytest.raises(StoreUnavailableError) as caught:
        store.find("a")
    for said in (str(caught.value), told[0]):
        assert "nothing answers at http://127.0.0.1:9" in said
        assert "hunter2" not in said
    assert "trying again for" in told[0]
    assert len(told) == 1
    with pytest.raises(StoreUnavailableError):
        store.find("a")
    assert len(told) == 1  # once is enough
    store.close()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder without new folders")
def test_a_folder_that_cannot_be_made_is_told_as_such(tmp_path: Path) -> None:
    done = invoke("push", write_checkpoint(tmp_path / "a", random_state()), "/proc/absent")
    assert done.code == 3
    assert "the folder cannot be created" in done.stderr
    assert "deleting" not in done.stderr


def test_a_follower_that_ends_before_there_is_a_chain_holds_no_version(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltachain", "follow", str(tmp_path / "chain")]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out"), "--poll", "0.1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = process.stderr.readline()  # it waits, and says so
    process.terminate()
    said += process.stderr.read()
    assert process.wait(30) == 0, said
    assert "holds no version: the chain had none yet" in said
    assert "None" not in said
    process.stderr.close()


def test_an_error_of_a_command_with_json_is_json(tmp_path: Path) -> None:
    done = invoke("log", tmp_path / "absent", "--json")
    assert (done.code, done.stdout) == (3, "")
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (error["type"], error["exit_code"]) == ("ObjectNotFoundError", 3)
    assert error["hint"]
    assert "chain.json" in error["message"]
    assert error["retryable"] is False


@pytest.mark.parametrize("command", ["log", "push", "fleet", "keygen"])
@pytest.mark.parametrize("variable", [("DELTACHAIN_FOLOW", "1"), ("DELTACHAIN_POLL_S", "often")])
def test_a_mistake_in_the_environment_ends_every_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    more = {"push": ["a", "b"], "fleet": ["status", "http://127.0.0.1:9"]}
    done = invoke(command, *more.get(command, [tmp_path / "file"]))
    assert done.code == 2
    assert f"{variable[0]} is" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert ok(command, "--help").stdout


def test_the_library_refuses_a_mistake_in_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, pushed: Pushed, tmp_path: Path
) -> None:
    from deltachain import Subscriber  # noqa: PLC0415
    from deltachain.subscribe.targets.folder import OwnFolder  # noqa: PLC0415

    monkeypatch.setenv("DELTACHAIN_FOLOW", "1")
    with (
        pytest.raises(ConfigError, match="DELTACHAIN_FOLOW"),
        Subscriber(str(pushed.url), OwnFolder(tmp_path / "out")) as subscriber,
    ):
        subscriber.update()


@pytest.mark.parametrize("command", [c for row in PANELS.values() for c in row])
def test_help_is_whole_at_80_columns_with_arguments_in_upper_case(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., None]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = command.__name__.replace("_", "-")
    shown = ok(name, "--help").stdout
    assert "…" not in shown
    usage = next(line for line in shown.splitlines() if "Usage" in line)
    named = usage.split(f" {name} ")[1].split()
    assert named == [one.upper() for one in named]
    assert not {"{", "}"} & set(usage)


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("fleet", "fleet [OPTIONS] VERB [ENGINE...]"),
        ("mirror", "mirror [OPTIONS] SRC [DST]"),
        ("inspect", "inspect [OPTIONS] FILE|URL"),
        ("tag", "tag [OPTIONS] URL [NAME]"),
        ("agent", "agent [OPTIONS] URL"),
    ],
)
def test_usage_names_arguments_as_the_documents_do(
    name: str, usage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = next(line for line in ok(name, "--help").stdout.splitlines() if "Usage" in line)
    assert shown.split(" deltachain ")[1].strip() == usage


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "the option"])
def test_a_wrong_endpoint_is_given_up_soon_and_its_variable_named(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(outage, "FIRST_S", 0.2)
    options: dict[str, Any] = {"key": "key", "secret": "hunter2", "region": "us-east-1"}
    if name == "the option":
        options["endpoint_url"] = "http://127.0.0.1:9"
    else:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    store = open_store("s3://bucket/run", options | {"deadline_s": 3600.0})
    with pytest.raises(StoreUnavailableError) as caught:
        store.find("a")
    where = "of the option" if name == "the option" else f"in {name}"
    assert f"nothing answers at http://127.0.0.1:9, the endpoint {where}" in str(caught.value)
    assert "check host and port of the endpoint" in caught.value.hint
    store.close()
