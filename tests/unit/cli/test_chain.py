import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from deltachain.chain.chain import Chain
from deltachain.checkpoint import Checkpoint
from deltachain.format.keys import manifest_key
from deltachain.publish import Publisher
from deltachain.publish.publisher_record import new_record, write_record
from deltachain.store import open_store
from tests.support.files import write_weights
from tests.support.models import TinyModel, bits_of, plain_model, train_
from tests.unit.cli.support import (
    SPECS,
    Pushed,
    contents,
    invoke,
    ok,
    random_state,
    read_checkpoint,
    refused,
    safetensors_bytes,
    same,
    train,
    write_checkpoint,
)
from tests.unit.publish.library import differing, llama, quantised_state


def test_a_tag_is_set_listed_moved_and_deleted(pushed: Pushed) -> None:
    assert "no tag is set" in ok("tag", pushed.url).stdout
    assert "best is version 1" in ok("tag", pushed.url, "best", "--version", 1).stdout
    moved = ok("tag", pushed.url, "best", "--step", 2, "--json").document
    assert (moved["name"], moved["version"], moved["before"]) == ("best", 2, 1)
    assert ok("tag", pushed.url, "last").stdout.startswith("✓  last is version 3")
    listed = ok("tag", pushed.url, "--json").document["tags"]
    assert [(row["name"], row["version"], row["number"]) for row in listed] == [
        ("best", 2, 1),
        ("last", 3, 0),
    ]
    assert "best" in ok("tag", pushed.url).stdout
    assert "best is removed; it was version 2" in ok("tag", pushed.url, "best", "--delete").stdout
    refused("tag", pushed.url, "best", "--delete", code=4, said="tags are last")
    removed = ok("tag", pushed.url, "last", "--delete", "--json").document
    assert (removed["version"], removed["before"]) == (None, 3)


@pytest.mark.parametrize(
    "args",
    [
        ("--delete",),
        ("--version", 1),
        ("x", "--delete", "--version", 1),
        ("x", "--version", 1, "--step", 1),
        ("a/b",),
    ],
)
def test_what_cannot_be_meant_is_refused(pushed: Pushed, args: tuple[object, ...]) -> None:
    refused("tag", pushed.url, *args, code=2, said="hint   ")


@pytest.mark.parametrize(
    ("words", "lost", "said"),
    [(("tag", "best"), {1, 2, 3}, "cannot be rebuilt"), (("revert", "--to", 1), {1}, "")],
)
def test_what_cannot_be_rebuilt_is_neither_tagged_nor_reverted_to(
    pushed: Pushed, words: tuple[object, ...], lost: set[int], said: str
) -> None:
    for part in pushed.url.glob("*s/0*/*.safetensors"):
        if int(part.parent.name[:20]) in lost:
            part.unlink()
    before = contents(pushed.url)
    refused(words[0], pushed.url, *words[1:], code=4, said=said)
    assert contents(pushed.url) == before


@pytest.mark.parametrize("name", ["step", "tag", "at"])
def test_a_version_is_pulled_by_another_name(pushed: Pushed, tmp_path: Path, name: str) -> None:
    ok("tag", pushed.url, "best", "--version", 1)
    rows = ok("log", pushed.url, "--json").document["versions"]
    value = {"step": 1, "tag": "best", "at": rows[2]["time"]}[name]
    done = ok("pull", pushed.url, "--out", tmp_path / "out", f"--{name}", value, "--json")
    assert done.document["version"] == 1
    assert same(read_checkpoint(tmp_path / "out"), pushed.states[1])


def test_log_inspect_and_verify_take_the_same_names(pushed: Pushed) -> None:
    ok("tag", pushed.url, "best", "--version", 1)
    for option, value in (("--tag", "best"), ("--step", 1)):
        shown = ok("log", pushed.url, option, value, "--json").document
        assert [row["version"] for row in shown["versions"]] == [1, 0]
        assert shown["head"] == 3
        assert ok("inspect", pushed.url, option, value, "--json").document["version"] == 1
        assert ok("verify", pushed.url, option, value, "--json").document["last"] == 1
    assert (
        json.loads(ok("log", pushed.url, "--version", 2, "--json").stdout)["versions"][0]["version"]
        == 2
    )


def test_a_step_that_is_not_there_names_its_neighbours(pushed: Pushed) -> None:
    done = refused("pull", pushed.url, "--out", "x", "--step", 9, code=4)
    assert "hint near it are the steps 3 (version 3)" in done.told
    assert invoke("log", pushed.url, "--at", "1970-01-02T00:00Z").code == 4
    assert invoke("log", pushed.url, "--at", "noon").code == 2
    assert invoke("verify", pushed.url, "--to", 1, "--step", 1).code == 2


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
    before = contents(pushed.url)
    dry = ok("revert", pushed.url, "--to", 0, "--dry-run", "--json").document
    assert contents(pushed.url) == before
    assert dry["version"] is None
    assert "nothing was written" in ok("revert", pushed.url, "--to", 0, "--dry-run").stdout
    done = ok("revert", pushed.url, "--to", 0, "--json").document
    assert (dry["nnz"], dry["tensors"]) == (done["nnz"], done["tensors"])
    assert dry["nbytes"] == done["nbytes"]


def test_a_push_of_other_weights_is_refused_until_it_is_told_to_go_on(
    pushed: Pushed, tmp_path: Path
) -> None:
    ok("revert", pushed.url, "--to", 1)
    newer = write_checkpoint(tmp_path / "newer", pushed.states[3])
    done = refused("push", newer, pushed.url, code=4)
    assert "version 4 was reverted to the state of version 1" in done.told
    assert "--continue-reverted" in done.stderr
    older = write_checkpoint(tmp_path / "older", pushed.states[1])
    assert ok("push", older, pushed.url, "--json").document["version"] == 4
    pushed_on = ok("push", newer, pushed.url, "--continue-reverted", "--json").document
    assert pushed_on["version"] == 5
    assert ok("push", older, pushed.url, "--json").document["version"] == 6  # no mark any more


@pytest.mark.parametrize(
    ("options", "code"),
    [((), 2), (("--to", 1, "--step", 1), 2), (("--to", 9), 4), (("--tag", "none"), 4)],
)
def test_a_revert_to_no_older_version_is_refused(
    pushed: Pushed, options: tuple[object, ...], code: int
) -> None:
    refused("revert", pushed.url, *options, code=code)
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

    monkeypatch.setattr("deltachain.publish.publisher_record.time.sleep", renew)
    before = contents(pushed.url / "manifests")
    refused("push", newer, pushed.url, code=4, said=("host gpu-7", "--take-over"))
    assert contents(pushed.url / "manifests") == before
    assert ok("push", newer, pushed.url, "--take-over", "--json").document["version"] == 4


def head_of(url: Path) -> int:
    head = Chain.open(open_store(url)).head()
    assert head is not None
    return head.version


def test_a_pulled_folder_has_the_files_that_were_beside_the_weights(
    pushed: Pushed, tmp_path: Path
) -> None:
    done = ok("pull", pushed.url, "--out", tmp_path / "out", "--json")
    assert done.document["version"] == 3
    assert sorted(done.document["files"]) == ["config.json", "tokenizer.json"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "tiny"}


def test_a_pulled_folder_goes_forwards_and_back(pushed: Pushed, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for version in (1, 3, 0, 2):
        ok("pull", pushed.url, "--version", version, "--out", out)
        assert same(read_checkpoint(out), pushed.states[version])
    assert "nothing to do" in ok("pull", pushed.url, "--version", 2, "--out", out).stdout
    edited = out / "config.json"
    edited.write_text("mine")
    ok("pull", pushed.url, "--out", out)
    assert edited.read_text() == "mine"


WRITERS = [("pull",), ("follow", "--once")]


@pytest.mark.parametrize("command", WRITERS)
def test_a_folder_of_another_chain_is_left_alone(
    pushed: Pushed, tmp_path: Path, command: tuple[str, ...]
) -> None:
    name, *options = command
    folder, out = write_checkpoint(tmp_path / "checkpoint", pushed.states[0]), tmp_path / "out"
    ok("push", folder, tmp_path / "other")
    ok("pull", tmp_path / "other", "--out", out)
    before = contents(out), contents(folder)
    refused(name, pushed.url, "--out", out, *options, code=4, said="give another folder")
    refused(name, pushed.url, "--out", folder, *options, code=2, said="not from a chain")
    assert (contents(out), contents(folder)) == before


@pytest.mark.parametrize("option", ["--out=~/policy", "-o~/policy"])
def test_a_home_that_no_shell_expands_is_that_of_the_user(
    pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    ok("pull", pushed.url, option)
    assert same(read_checkpoint(home / "policy"), pushed.states[-1])
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("command", ["pull", "follow"])
@pytest.mark.parametrize("inside", [".", "a/b"])
def test_a_file_is_no_folder(pushed: Pushed, tmp_path: Path, command: str, inside: str) -> None:
    file = tmp_path / "policy"
    file.write_text("notes")
    done = refused(command, pushed.url, "--out", file / inside, code=2)
    assert "policy is not a folder" in done.told
    assert "name a new folder" in done.told
    assert file.read_text() == "notes"


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("inside", [".", "weights", "a/b"])
def test_nothing_is_written_where_a_chain_is_stored(
    pushed: Pushed, command: tuple[str, ...], inside: str
) -> None:
    name, *options = command
    before = sorted(pushed.url.rglob("*"))
    done = refused(name, pushed.url, "--out", pushed.url / inside, *options, code=2)
    assert "has a chain, which only its publisher may write to" in done.told
    assert sorted(pushed.url.rglob("*")) == before


def test_pushing_what_the_head_holds_commits_nothing(pushed: Pushed, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "again", pushed.states[-1])
    before = contents(pushed.url)
    assert ok("push", folder, pushed.url, "--json").document["committed"] == []
    assert "nothing to do" in ok("push", folder, pushed.url).stdout
    assert contents(pushed.url) == before


def test_a_push_is_one_version_and_takes_the_chain_over(pushed: Pushed, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "next", train(pushed.states[-1], 9))
    report = ok("push", folder, pushed.url, "--step", 40, "--json").document
    assert (report["version"], report["epoch"]) == (4, 4)
    (committed,) = report["committed"]
    assert (committed["kind"], committed["step"]) == ("delta", 40)
    changed = sum(
        int(np.count_nonzero(pushed.states[-1][name] != bits))
        for name, bits in read_checkpoint(folder).items()
    )
    assert committed["nnz"] == changed


def test_pushes_reach_a_chain_that_training_began(tmp_path: Path) -> None:
    model = TinyModel()
    with Publisher(str(tmp_path / "chain")) as publisher:
        publisher.attach(model, assets={})
    ok("pull", tmp_path / "chain", "--out", tmp_path / "out")
    pulled = tmp_path / "out"
    checkpoint = Checkpoint(pulled)
    name = min(checkpoint.specs)
    file, offset = checkpoint.place(name)
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(b"\x55\xaa")
    report = ok("push", pulled, tmp_path / "chain", "--json").document
    assert report["committed"][0]["nnz"] in (1, 2)
    train_(model, 1)
    with Publisher(str(tmp_path / "chain")) as publisher:
        publisher.attach(model, assets={})
    ok("pull", tmp_path / "chain", "--out", tmp_path / "after")
    found = read_checkpoint(tmp_path / "after")
    assert all(np.array_equal(found[n], b) for n, b in bits_of(model).items() if n in found)
    ok("verify", tmp_path / "chain")


def test_a_base_reference_uploads_nothing_but_what_changed(tmp_path: Path) -> None:
    state = random_state()
    base = write_checkpoint(tmp_path / "base", state)
    folder = write_checkpoint(tmp_path / "step-1", train(state, 1))
    report = ok("push", folder, tmp_path / "chain", "--base", base, "--step", 1, "--json").document
    assert [v["kind"] for v in report["committed"]] == ["base", "delta"]
    assert [v["step"] for v in report["committed"]] == [None, 1]
    assert report["committed"][0]["nbytes"] == 0
    moved = tmp_path / "moved"
    shutil.move(base, moved)
    url, out = tmp_path / "chain", tmp_path / "out"
    for command in (("verify", url), ("pull", url, "--out", out)):
        refused(*command, code=2, said="base checkpoint")
        ok(*command, "--base", moved)
    assert same(read_checkpoint(out), read_checkpoint(folder))
    assert "model.safetensors" in ok("inspect", url, "--version", 0).stdout
    again = write_checkpoint(tmp_path / "step-2", train(state, 2))
    report = ok("push", again, url, "--base", moved, "--json").document
    assert report["committed"][0]["kind"] == "delta"


def test_a_checkpoint_of_another_model_is_refused(pushed: Pushed, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    source = Checkpoint(write_checkpoint(tmp_path / "folder", pushed.states[0]))
    names = [spec for spec in SPECS if spec.name != "steps"]
    write_weights(file, names, lambda spec: source.bits(spec.name))
    refused("push", file, pushed.url, code=4, said="'steps'")
    assert head_of(pushed.url) == 3


def test_what_a_pulled_folder_says_of_itself_does_not_travel(
    pushed: Pushed, tmp_path: Path
) -> None:
    ok("pull", pushed.url, "--out", tmp_path / "out")
    ok("push", tmp_path / "out", tmp_path / "other")
    names = {name for name, _ in Chain.open(open_store(tmp_path / "other")).assets()}
    assert names == {"config.json", "tokenizer.json"}


def test_log_shows_the_newest_versions_first(pushed: Pushed) -> None:
    document = ok("log", pushed.url, "--json").document
    assert [v["version"] for v in document["versions"]] == [3, 2, 1, 0]
    assert [v["step"] for v in document["versions"]] == [3, 2, 1, 0]
    assert document["model"]["dtypes"]["BF16"] == 2
    first, *_, last = document["versions"]
    assert (first["kind"], last["kind"]) == ("delta", "anchor")
    assert first["bits_per_change"] > 0
    assert first["dense_ratio"] > 1
    limited = ok("log", pushed.url, "-n", 2, "--json").document
    assert [v["version"] for v in limited["versions"]] == [3, 2]
    shown = ok("log", pushed.url).stdout
    assert document["chain"] in shown
    assert first["state"][:8] in shown


@pytest.mark.parametrize(
    ("lost", "named"), [([1], "version 1 is"), ([0, 2], "0, 2 are"), ([0, 1], "0 to 1 are")]
)
def test_log_shows_what_is_there_and_names_the_gap(
    pushed: Pushed, lost: list[int], named: str
) -> None:
    for version in lost:
        (pushed.url / manifest_key(version)).unlink()
    done = refused("log", pushed.url, "-n", 25, code=4, said=f"{named} missing")
    assert f"restore {manifest_key(lost[0])}" in done.stderr
    table = invoke("log", pushed.url, "-n", 25).stdout.splitlines()
    rows = [line.split() for line in table if line.split() and line.split()[0].isdecimal()]
    assert [int(row[0]) for row in rows] == [3, 2, 1, 0]
    assert [int(row[0]) for row in rows if row[1:] == ["missing"]] == lost[::-1]
    done = invoke("log", pushed.url, "-n", 25, "--json")
    assert (done.code, done.document["missing"]) == (4, lost)
    assert [row["version"] for row in done.document["versions"]] == [
        version for version in (3, 2, 1, 0) if version not in lost
    ]
    assert json.loads(done.stderr)["error"]["type"] == "BrokenChainError"
    above = invoke("log", pushed.url, "-n", 1, "--json")
    assert (above.code, above.document["missing"]) == (0, [])


def test_log_lists_anchors_that_were_added_later(tmp_path: Path) -> None:
    model = TinyModel(width=64)
    with Publisher(str(tmp_path / "chain")) as publisher:
        publisher.config = dataclasses.replace(publisher.config, anchor_factor=0.01)
        publisher.attach(model, assets={})
        for seed in range(3):
            train_(model, seed, share=0.3)
            publisher.publish(step=seed)
            publisher.flush()
    versions = ok("log", tmp_path / "chain", "--json").document["versions"]
    added = {v["version"]: [edge["kind"] for edge in v["edges"]] for v in versions if v["edges"]}
    assert added
    assert all(kinds == ["anchor"] for kinds in added.values())
    assert "+ anchor" in ok("log", tmp_path / "chain").stdout
    report = ok("verify", tmp_path / "chain", "--json").document
    assert report["edges"]["anchor"]["proven"] == 1 + len(added)
    newest = max(added)
    document = ok("inspect", tmp_path / "chain", "--anchor", "--json").document
    assert (document["version"], document["kind"]) == (newest, "anchor")


def test_inspect_counts_what_changed(pushed: Pushed) -> None:
    document = ok("inspect", pushed.url, "--version", 2, "--json").document["contents"]
    changed = {
        name: int(np.count_nonzero(bits != pushed.states[2][name]))
        for name, bits in pushed.states[1].items()
    }
    found = {row["name"]: row["nnz"] for row in document["rows"] if row["encoding"] == "step"}
    assert found.items() <= changed.items()
    assert found
    assert document["nnz"] == sum(row["nnz"] for row in document["rows"])
    stored = sum(document["streams"].values())
    assert stored + document["directory_nbytes"] == document["nbytes"]
    shown = ok("inspect", pushed.url, "--version", 2).stdout
    assert "embed.weight" in shown
    assert "█" in shown


def test_inspect_proves_an_object_on_its_own(pushed: Pushed) -> None:
    (part,) = pushed.url.glob(f"deltas/{2:020d}-*/*.safetensors")
    ok("inspect", part)
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    refused("inspect", part, code=5)


def test_inspect_shows_the_table_and_the_anchor(pushed: Pushed) -> None:
    table = ok("inspect", pushed.url, "--table", "--json").document
    assert {row["name"] for row in table["tensors"]} == {spec.name for spec in SPECS}
    anchor = ok("inspect", pushed.url, "--anchor", "--json").document
    assert anchor["kind"] == "anchor"
    first = ok("inspect", pushed.url, "--anchor", "--version", 0, "--json").document
    assert first["version"] == 0
    assert all(row["nnz"] == row["numel"] for row in first["contents"]["rows"])
    assert len(first["contents"]["rows"]) == len(SPECS)
    assert ok("inspect", pushed.url, "--table").stdout
    assert ok("inspect", pushed.url, "--anchor", "--all").stdout


def test_names_from_a_file_do_not_steer_the_terminal(tmp_path: Path) -> None:
    name = "x\x1b[2J[red]y"
    for file, bits in (("old", [0, 0]), ("new", [0, 1])):
        tensors = {name: ("BF16", (2,), np.array(bits, np.uint16))}
        (tmp_path / file).write_bytes(safetensors_bytes(tensors))
    ok("push", tmp_path / "old", tmp_path / "chain")
    ok("push", tmp_path / "new", tmp_path / "chain")
    shown = ok("inspect", tmp_path / "chain").stdout
    assert "\x1b" not in shown
    assert "[red]y" in shown
    (tmp_path / "other").write_bytes(
        safetensors_bytes({name: ("F16", (2,), np.array([0, 0], np.uint16))})
    )
    done = invoke("push", tmp_path / "other", tmp_path / "chain")
    assert done.code != 0
    assert "\x1b" not in done.stderr


# Quantised chains, and small files beside weights

FILES = {"config.json": b'{"a": 1, "use_cache": true}', "tokenizer.json": b"{}"}

KILLED = """
import os, signal, sys
from deltachain.subscribe.targets import folder
folder.write_assets = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
from deltachain.cli import main
main()
"""


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    url = tmp_path / "chain"
    with Publisher(str(url)).attach(plain_model(), assets=FILES) as publisher:
        publisher.flush()
    return url


def small(folder: Path) -> dict[str, bytes]:
    """Contents of the small files that are there."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


@pytest.mark.full
def test_a_follower_killed_between_swap_and_small_files_writes_them_when_started_again(
    chain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["follow", str(chain), "--out", str(out), "--once"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
    assert (killed.returncode, small(out)) == (-9, {})
    assert list(out.glob("*.safetensors"))
    ok(*words)
    assert small(out) == FILES


def test_files_of_another_meaning_are_kept_and_named(
    chain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for command in ("pull", "follow"):
        out = tmp_path / command
        out.mkdir()
        own = b'{"a": 2, "use_cache": false, "rope_theta": 5, "quantization_config": {"bits": 4}}'
        (out / "config.json").write_bytes(own)
        once = ["--once"] if command == "follow" else []
        caplog.clear()
        ok(command, chain, "--out", out, *once)
        assert small(out) == FILES | {"config.json": own}
        assert "config.json ('a', 'rope_theta', 'quantization_config')" in caplog.text
        assert "tokenizer.json" not in caplog.text


def test_layers_that_are_left_are_options(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "saved")
    chain, out = tmp_path / "chain", tmp_path / "out"
    ignore = ("--ignore", "lm_head", "--ignore", "re:.*layers.1.mlp")
    ok("push", tmp_path / "saved", chain, "--quantization", "int8-row", *ignore)
    again = ok("push", tmp_path / "saved", chain, "--quantization", "int8-row", *ignore)
    assert "nothing to do" in again.stdout
    ok("pull", chain, "--out", out)
    left = ("lm_head", *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")))
    expected = quantised_state(model, "int8-row", left)
    assert differing(load_file(out / "model.safetensors"), expected) == set()
    ok("push", tmp_path / "saved", tmp_path / "alike", "--quantization", out)
    ok("pull", tmp_path / "alike", "--out", tmp_path / "again")
    assert differing(load_file(tmp_path / "again" / "model.safetensors"), expected) == set()
    done = refused(
        "push", tmp_path / "saved", chain, "--quantization", out, "--ignore", "lm_head", code=2
    )
    assert "exclude each other" in done.told
    done = refused("push", tmp_path / "saved", tmp_path / "other", "--ignore", "lm_head", code=2)
    assert "--ignore needs --quantization" in done.told


def test_what_cannot_be_quantised_ends_with_a_hint(tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "saved", random_state())
    done = refused("push", saved, tmp_path / "chain", "--quantization", "int3", code=2)
    assert "expected one of: fp8-block," in done.told
    refused("push", saved, tmp_path / "chain", "--quantization", "int8-row", code=2)
    assert not (tmp_path / "chain" / "chain.json").exists()
