import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain.errors import DeltaChainError, PoisonedError, TensorMismatchError
from deltachain.filebits import FileBits
from deltachain.subscribe import Subscriber
from deltachain.subscribe.targets.folder import LOCK_FILE, FolderTarget
from deltachain.types import TensorSpec
from tests.small_disk import run_on_small_disk
from tests.support.files import write_weights
from tests.support.models import TinyModel
from tests.support.values import eventually
from tests.unit.cli.support import ok
from tests.unit.subscribe.accidents import Run


def follow_until_ready(subscriber: Subscriber, version: int) -> None:
    """Follow until a version is held, through any number of failures."""
    stop, looks = Event(), itertools.count()

    def looked(_: DeltaChainError | None) -> None:
        if subscriber.version == version or next(looks) > 20:
            stop.set()
            subscriber.notify()

    for _ in subscriber.follow(stop=stop, looked=looked):
        pass
    assert subscriber.version == version
    assert subscriber.scrub()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("size", [0, 100])
def test_a_cut_weights_file_is_found_by_a_scrub_and_written_anew(
    run: Run, subscriber: Subscriber, size: int, *, restarted: bool
) -> None:
    os.truncate(run.mirror / "model.safetensors", size)
    assert not subscriber.scrub(if_altered=True)
    assert subscriber.poisoned
    if restarted:
        subscriber.close()
        subscriber = run.subscribe(run.mirror)
    follow_until_ready(subscriber, 2)


def test_a_removed_folder_is_made_and_locked_again(run: Run, subscriber: Subscriber) -> None:
    shutil.rmtree(run.mirror)
    follow_until_ready(subscriber, 2)
    lock = str(run.mirror / LOCK_FILE)
    code = f"import fcntl; fcntl.lockf(open({lock!r}, 'w'), {LOCK_EX | LOCK_NB})"
    other = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE)
    assert b"BlockingIOError" in other.stderr


NBYTES = 4 << 20
"""Of the model."""

ROOM = NBYTES * 3 // 2
"""Of the disk."""

PULLS = """
import json, os, resource, sys
from pathlib import Path
from deltachain.subscribe.targets import folder
from tests.unit.cli.support import invoke, ok

chain, disk = sys.argv[1], Path(sys.argv[2])
out, other, original = disk / "out", disk / "other", folder.check_room

def pull(case):
    before = set(disk.rglob("*"))
    done = invoke("pull", chain, "--out", out)
    left = sorted(path.name for path in set(disk.rglob("*")) - before)
    print(json.dumps({"case": case, "code": done.code, "left": left, "said": done.stderr}))

def fill(but):
    if not disk.is_mount():  # nobody may mount here: files can at least be limited
        resource.setrlimit(resource.RLIMIT_FSIZE, (but, resource.RLIM_INFINITY))
        return
    status = os.statvfs(disk)
    with other.open("wb") as file:
        file.write(bytes(status.f_bavail * status.f_frsize - but))

def empty():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    other.unlink(missing_ok=True)

fill(but=2 << 20)
pull("too small")
folder.check_room = lambda *_: None
pull("filled since")
folder.check_room = original
empty()
ok("pull", chain, "--version", 0, "--out", out)
weights = out / "model.safetensors"
whole = weights.stat().st_size
os.truncate(weights, 4096), os.truncate(weights, whole)  # as a copy that keeps no zeros
if disk.is_mount():  # a limit lets holes be filled
    fill(but=1 << 20)
    pull("holes")
empty()
pull("room again")
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of one tensor: zeros, and then a change of a few."""
    root = tmp_path_factory.mktemp("chain")
    spec = TensorSpec("w", "U8", (NBYTES,))
    bits = np.zeros(NBYTES, np.uint8)
    for version in (0, 1):
        checkpoint = root / f"checkpoint-{version}"
        checkpoint.mkdir()
        bits[:: NBYTES // 99] = version
        write_weights(checkpoint / "model.safetensors", [spec], lambda _: bits)
        ok("push", checkpoint, root / "chain")
    return root / "chain"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_without_room_is_refused_by_what_is_missing_and_nothing_is_left(
    kind: str, chain: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    done = run_on_small_disk(kind, disk, ROOM, PULLS, chain, disk)
    assert done.returncode == 0, (done.returncode, done.stderr)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= {json.loads(line)["case"]: json.loads(line)}
    again = found.pop("room again")
    assert {"too small", "filled since"} <= found.keys()
    for case in found:
        assert (found[case]["code"], found[case]["left"]) == (6, []), found[case]
        missing = re.search(r"([0-9,]+) bytes are missing", found[case]["said"])
        assert missing is not None, found[case]
        assert 1 <= int(missing[1].replace(",", "")) <= NBYTES
    assert "the weights are as they were" in found["filled since"]["said"]
    assert again["code"] == 0, again


@pytest.fixture
def held(run: Run) -> Subscriber:
    """A folder that holds version 0."""
    run.publish()
    return run.join(run.mirror, poll_s=0.01)


@pytest.fixture
def weights(run: Run) -> Path:
    """The file in that folder."""
    return run.mirror / "model.safetensors"


def in_place(weights: Path) -> None:
    """Change one byte of a tensor that later deltas do not touch."""
    time.sleep(0.05)  # more than the steps in which file systems count time
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def replaced(weights: Path) -> None:
    """Put another file of the same tensors, in another order, in its place."""
    tensors = {name: torch.zeros_like(one) for name, one in load_file(weights).items()}
    tensors["zzz"] = torch.zeros(1000)  # which the chain does not have
    save_file(dict(reversed(tensors.items())), weights.with_name("new"))
    weights.with_name("new").replace(weights)


def deleted(weights: Path) -> None:
    weights.unlink()


def cut(weights: Path) -> None:
    os.truncate(weights, 1000)


Change = Callable[[Path], None]
CHANGES = [in_place, replaced, deleted]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_healed_though_no_version_is_new(
    run: Run, weights: Path, held: Subscriber, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Event()
    thread = Thread(target=lambda: list(held.follow(stop=stop)))
    thread.start()
    try:
        change(weights)
        eventually(lambda: weights.exists() and not held.target.is_altered())
        eventually(lambda: run.matches(run.mirror))
    finally:
        stop.set()
        thread.join()
    assert held.version == 0
    assert "the target was modified" in caplog.text


@pytest.mark.parametrize("change", [*CHANGES, cut])
def test_a_changed_file_is_healed_by_the_next_update(
    run: Run, weights: Path, held: Subscriber, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    for seeds in ((), (1,)):  # without a new version, and with one
        change(weights)
        run.publish(*seeds)
        held.update()
        assert run.matches(run.mirror)
    if change is cut:
        assert "written anew" in caplog.text
        assert "model.safetensors" in caplog.text


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_changed_while_a_version_is_staged_is_not_written_to(
    run: Run, weights: Path, held: Subscriber, change: Change
) -> None:
    run.publish(1)
    staged = held.stage()
    assert staged is not None
    change(weights)
    theirs = {file.name: file.read_bytes() for file in run.mirror.glob("*.safetensors")}
    with pytest.raises(PoisonedError, match="another process changed its weights files"):
        held.swap(staged)
    assert {file.name: file.read_bytes() for file in run.mirror.glob("*.safetensors")} == theirs
    assert held.version is None
    held.update()
    assert run.matches(run.mirror)


def test_a_file_of_another_model_is_named_and_left_alone(weights: Path, held: Subscriber) -> None:
    save_file(TinyModel(width=32).frozen.state_dict(), weights)
    theirs = weights.read_bytes()
    with pytest.raises(TensorMismatchError):
        held.update()
    assert weights.read_bytes() == theirs


def test_a_backup_by_hard_links_is_no_change(
    run: Run, held: Subscriber, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run.mirror, run.mirror.parent / "backup", copy_function=os.link)
    with mock.patch.object(FolderTarget, "state", side_effect=AssertionError):
        held.update()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_a_touched_file_is_read_once(weights: Path, held: Subscriber) -> None:
    time.sleep(0.05)  # more than the steps in which file systems count time
    weights.touch()
    assert held.target.is_altered()
    assert held.update() is None
    assert not held.target.is_altered()


@pytest.mark.parametrize("change", [replaced, deleted])
def test_a_file_that_is_changed_while_it_is_written_to_is_healed(
    run: Run, weights: Path, held: Subscriber, change: Change
) -> None:
    run.publish(1)
    changes = iter([change])
    put = FileBits.put

    def changed_before(place: FileBits, *bits: Any) -> None:
        for one in changes:
            one(weights)
        put(place, *bits)

    with mock.patch.object(FileBits, "put", changed_before), pytest.raises(PoisonedError):
        held.update()
    held.update()
    assert run.matches(run.mirror)


def test_a_file_that_is_replaced_while_the_folder_is_opened_is_healed(
    run: Run, weights: Path, held: Subscriber
) -> None:
    held.close()
    again = run.subscribe(run.mirror)
    with mock.patch.object(FolderTarget, "_recover", side_effect=lambda: replaced(weights)):
        again.open()
    with suppress(PoisonedError):
        again.update()
    again.update()
    assert run.matches(run.mirror)
