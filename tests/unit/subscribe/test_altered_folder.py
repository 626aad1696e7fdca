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
from deltachain.publish import Publisher
from deltachain.subscribe import Subscriber
from deltachain.subscribe.targets.folder import LOCK_FILE, FolderTarget
from deltachain.types import TensorSpec
from tests.small_disk import run_on_small_disk
from tests.support.files import write_weights
from tests.support.models import TinyModel
from tests.support.values import eventually
from tests.unit.cli.support import ok


def follow_until_ready(subscriber: Subscriber, version: int) -> None:
    """Follow until a version is held, through any number of failures."""
    stop, looks = Event(), itertools.count()

    def looked(_: DeltaChainError | None) -> None:
        if subscriber.version == version or next(looks) > 20:
            stop.set()
            subscriber.notify()

    for _ in subscriber.follow(stop=stop, looked=looked):
        pass


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("size", [0, 100])
def test_a_cut_weights_file_is_written_anew(
    subscriber: Subscriber, subscribe: "Subscribe", mirror: Path, size: int, *, restarted: bool
) -> None:
    os.truncate(mirror / "model.safetensors", size)
    assert not subscriber.scrub(if_altered=True)
    assert subscriber.poisoned
    if restarted:
        subscriber.close()
        subscriber = subscribe(mirror)
    follow_until_ready(subscriber, 2)
    assert subscriber.version == 2
    assert subscriber.scrub()


def test_a_removed_folder_is_made_and_locked_again(subscriber: Subscriber, mirror: Path) -> None:
    shutil.rmtree(mirror)
    follow_until_ready(subscriber, 2)
    assert subscriber.version == 2
    assert subscriber.scrub()
    code = f"import fcntl; fcntl.lockf(open({str(mirror / LOCK_FILE)!r}, 'w'), {LOCK_EX | LOCK_NB})"
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


Subscribe = Callable[..., Subscriber]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "folder"


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def holds(folder: Path, model: TinyModel) -> bool:
    found, expected = load_file(weights(folder)), model.state_dict()
    del expected["head.weight"]  # tied: stored as embed.weight
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def in_place(folder: Path) -> None:
    """Change one byte of a tensor that later deltas do not touch."""
    time.sleep(0.05)  # more than the steps in which file systems count time
    with weights(folder).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def replaced(folder: Path) -> None:
    """Put another file of the same tensors, in another order, in its place."""
    tensors = {name: torch.zeros_like(one) for name, one in load_file(weights(folder)).items()}
    tensors["zzz"] = torch.zeros(1000)  # which the chain does not have
    save_file(dict(reversed(tensors.items())), folder / "new")
    (folder / "new").replace(weights(folder))


def deleted(folder: Path) -> None:
    weights(folder).unlink()


CHANGES = pytest.mark.parametrize("change", [in_place, replaced, deleted])


@CHANGES
def test_a_changed_file_is_healed_though_no_version_is_new(
    publisher: Publisher,
    model: TinyModel,
    folder: Path,
    subscribe: Subscribe,
    change: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    subscriber, stop = subscribe(folder, poll_s=0.01), Event()
    subscriber.update()
    thread = Thread(target=lambda: list(subscriber.follow(stop=stop)))
    thread.start()
    try:
        change(folder)
        eventually(lambda: weights(folder).exists() and not subscriber.target.is_altered())
        eventually(lambda: holds(folder, model))
    finally:
        stop.set()
        thread.join()
    assert subscriber.version == publisher.version
    assert "the target was modified" in caplog.text


@CHANGES
def test_a_changed_file_is_healed_by_the_next_update(
    publish: Callable[..., None],
    model: TinyModel,
    folder: Path,
    subscribe: Subscribe,
    change: Callable[[Path], None],
) -> None:
    subscriber = subscribe(folder)
    subscriber.update()
    change(folder)
    subscriber.update()
    assert holds(folder, model)
    change(folder)
    publish(1)
    subscriber.update()
    assert holds(folder, model)


@CHANGES
def test_a_file_that_is_changed_while_a_version_is_staged_is_not_written_to(
    publish: Callable[..., None],
    model: TinyModel,
    folder: Path,
    subscribe: Subscribe,
    change: Callable[[Path], None],
) -> None:
    subscriber = subscribe(folder)
    subscriber.update()
    publish(1)
    staged = subscriber.stage()
    assert staged is not None
    change(folder)
    theirs = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    with pytest.raises(PoisonedError, match="another process changed its weights files"):
        subscriber.swap(staged)
    assert {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} == theirs
    assert subscriber.version is None
    subscriber.update()
    assert holds(folder, model)


@pytest.mark.usefixtures("publisher")
def test_a_file_of_another_model_is_named_and_left_alone(
    folder: Path, subscribe: Subscribe
) -> None:
    subscriber = subscribe(folder)
    subscriber.update()
    save_file(TinyModel(width=32).frozen.state_dict(), weights(folder))
    theirs = weights(folder).read_bytes()
    with pytest.raises(TensorMismatchError):
        subscriber.update()
    assert weights(folder).read_bytes() == theirs


@pytest.mark.usefixtures("publisher")
def test_a_file_that_was_cut_is_named_and_written_anew(
    folder: Path, subscribe: Subscribe, model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    subscriber = subscribe(folder)
    subscriber.update()
    os.truncate(weights(folder), 1000)
    subscriber.update()
    assert "written anew" in caplog.text
    assert "model.safetensors" in caplog.text
    assert holds(folder, model)


@pytest.mark.usefixtures("publisher")
def test_a_backup_by_hard_links_is_no_change(
    folder: Path, subscribe: Subscribe, caplog: pytest.LogCaptureFixture
) -> None:
    subscriber = subscribe(folder)
    subscriber.update()
    shutil.copytree(folder, folder.parent / "backup", copy_function=os.link)
    with mock.patch.object(FolderTarget, "state", side_effect=AssertionError):
        subscriber.update()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.usefixtures("publisher")
def test_a_touched_file_is_read_once(folder: Path, subscribe: Subscribe) -> None:
    subscriber = subscribe(folder)
    subscriber.update()
    time.sleep(0.05)  # more than the steps in which file systems count time
    weights(folder).touch()
    assert subscriber.target.is_altered()
    assert subscriber.update() is None
    assert not subscriber.target.is_altered()


@pytest.mark.parametrize("change", [replaced, deleted])
def test_a_file_that_is_changed_while_it_is_written_to_is_healed(
    publish: Callable[..., None],
    model: TinyModel,
    folder: Path,
    subscribe: Subscribe,
    change: Callable[[Path], None],
) -> None:
    subscriber = subscribe(folder)
    subscriber.update()
    publish(1)
    changes = iter([change])
    put = FileBits.put

    def changed_before(place: FileBits, *bits: Any) -> None:
        for one in changes:
            one(folder)
        put(place, *bits)

    with mock.patch.object(FileBits, "put", changed_before), pytest.raises(PoisonedError):
        subscriber.update()
    subscriber.update()
    assert holds(folder, model)


@pytest.mark.usefixtures("publisher")
def test_a_file_that_is_replaced_while_the_folder_is_opened_is_healed(
    folder: Path, subscribe: Subscribe, model: TinyModel
) -> None:
    with subscribe(folder) as first:
        first.update()
    again = subscribe(folder)
    with mock.patch.object(FolderTarget, "_recover", side_effect=lambda: replaced(folder)):
        again.open()
    with suppress(PoisonedError):
        again.update()
    again.update()
    assert holds(folder, model)
