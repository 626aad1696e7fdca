from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from deltachain import errors
from deltachain.checkpoint import HELD_FILE
from deltachain.file_access import FileBits
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.assets import collect_assets
from deltachain.subscribe import Subscriber
from deltachain.subscribe.targets.base import Patches
from deltachain.subscribe.targets.folder import FOLDER as JOURNAL
from deltachain.subscribe.targets.folder import LOCK_FILE, SEAL, FolderTarget, Journal
from deltachain.types import TensorSpec
from tests.small_disk import run_on_small_disk
from tests.support.files import write_weights
from tests.support.models import TinyModel, bits_of, plain_model, same
from tests.support.values import eventually, present
from tests.unit.cli.support import ok
from tests.unit.publish.library import llama
from tests.unit.subscribe.accidents import Run, bits, unchanged

# What lies in the folder


@pytest.fixture
def mirror(run: Run) -> Path:
    """An empty folder, for a chain of version 0."""
    run.publish()
    run.mirror.mkdir()
    return run.mirror


def initial(run: Run) -> dict[str, Any]:
    """All tensors of version 0, before anything else is published."""
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_a_tensor_of_another_kind_is_named(run: Run, mirror: Path, change: str) -> None:
    tensors = initial(run)
    norm = tensors["norm.bias"]
    tensors["norm.bias"] = norm.half() if change == "dtype" else norm[:-1].clone()
    save_file(tensors, mirror / "model.safetensors")
    with pytest.raises(errors.TensorMismatchError) as caught:
        run.join(mirror)
    assert caught.value.tensor == "norm.bias"


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\0" * 100, b"\x02\0\0\0\0\0\0\0{}x"])
def test_a_file_that_is_no_checkpoint_is_refused(run: Run, mirror: Path, data: bytes) -> None:
    (mirror / "model.safetensors").write_bytes(data)
    with pytest.raises(errors.FormatError):
        run.join(mirror)
    assert (mirror / "model.safetensors").read_bytes() == data


def write_index(mirror: Path, index: dict[str, str]) -> None:
    document = json.dumps({"weight_map": index})
    (mirror / "model.safetensors.index.json").write_text(document)


@pytest.mark.parametrize("name", ["../model.safetensors", ".hidden", "sub/model.safetensors"])
def test_an_index_that_leads_out_of_the_folder_is_refused(
    run: Run, mirror: Path, name: str
) -> None:
    save_file(run.model.frozen.state_dict(), mirror / "model.safetensors")
    write_index(mirror, {"frozen.weight": name})
    with pytest.raises(errors.FormatError, match="outside the folder"):
        run.join(mirror)


def test_a_file_of_the_index_that_is_missing_is_named(run: Run, mirror: Path) -> None:
    save_file(run.model.frozen.state_dict(), mirror / "other.safetensors")
    write_index(mirror, {"frozen.weight": "gone.safetensors"})
    with pytest.raises(errors.ConfigError, match=r"gone\.safetensors is missing"):
        run.join(mirror)


def test_a_checkpoint_in_several_files_is_followed_where_it_lies(run: Run, mirror: Path) -> None:
    tensors = initial(run)
    index = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(index.values()):
        part = {name: tensor for name, tensor in tensors.items() if index[name] == file}
        save_file(part, mirror / file)
    write_index(mirror, index)
    run.publish(1)
    receipt = present(run.subscribe(mirror).update())
    assert receipt.previous == 0
    merged: dict[str, Any] = {}
    for path in mirror.glob("*.safetensors"):
        merged |= load_file(path)
    assert run.matches(merged)


def test_tied_weights_in_two_places_are_both_written(run: Run, mirror: Path) -> None:
    save_file(initial(run), mirror / "model.safetensors")
    run.publish(1)
    run.join(mirror)
    found = bits(mirror)
    assert np.array_equal(found["head.weight"], found["embed.weight"])
    assert run.matches(mirror)


def test_other_files_in_the_folder_are_left_alone(run: Run, mirror: Path) -> None:
    (mirror / "config.json").write_text("{}")
    subscriber = run.join(mirror)
    run.publish(1)
    subscriber.update()
    names = {path.name for path in mirror.iterdir()}
    assert names == {"config.json", "model.safetensors", "deltachain.json", LOCK_FILE}
    assert (mirror / "config.json").read_text() == "{}"


@pytest.mark.parametrize("reopened", [True, False])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_files_that_a_backup_shares_are_copied_before_they_are_written(
    run: Run, tmp_path: Path, link: Callable[[Path, Path], None], *, reopened: bool
) -> None:
    run.publish()
    subscriber = run.join(run.mirror)
    if reopened:
        subscriber.close()
    (file,) = run.mirror.glob("*.safetensors")
    backup = tmp_path / "backup.safetensors"
    if link is os.symlink:
        file.rename(backup)
        link(backup, file)
    else:
        link(file, backup)
    before = backup.read_bytes()
    run.publish(1)
    (run.subscribe(run.mirror) if reopened else subscriber).update()
    assert backup.read_bytes() == before
    assert file.read_bytes() != before


def test_a_planted_lock_is_refused_and_not_followed(run: Run, mirror: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (mirror / LOCK_FILE).symlink_to(elsewhere)
    with pytest.raises(errors.ConfigError, match=r"\.deltachain-lock is a link or a device"):
        run.join(mirror)
    assert not elsewhere.exists()


def test_a_planted_journal_is_removed_and_not_followed(
    run: Run, mirror: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / SEAL).write_text("theirs")
    run.join(mirror)
    (mirror / JOURNAL).symlink_to(elsewhere)
    assert run.join(mirror).version is not None
    assert (elsewhere / SEAL).read_text() == "theirs"
    assert not (mirror / JOURNAL).is_symlink()


def test_bits_are_not_written_through_a_link_planted_meanwhile(
    run: Run, mirror: Path, tmp_path: Path
) -> None:
    run.join(mirror)
    file, elsewhere = mirror / "model.safetensors", tmp_path / "elsewhere"
    file.rename(elsewhere)
    before = elsewhere.read_bytes()
    file.symlink_to(elsewhere)
    spec = TensorSpec("embed.weight", "U8", (1,))
    with pytest.raises(OSError, match="symbolic links"):
        FileBits(file, 0, spec).put(None, np.array([before[0] ^ 1], np.uint8))
    assert elsewhere.read_bytes() == before


def test_unfinished_copies_of_killed_processes_are_removed(run: Run, mirror: Path) -> None:
    run.join(mirror).close()
    left = [mirror / f".{name}.0123456789abcdef" for name in ("model.safetensors", HELD_FILE)]
    other = [mirror / name for name in (".model.safetensors.notes", ".keep.0123456789abcdef")]
    for file in (*left, *other):
        file.write_bytes(b"x")
    run.join(mirror).close()
    assert not any(file.exists() for file in left)
    assert all(file.exists() for file in other)


def test_a_budget_too_small_for_anything_is_enough_for_a_folder(run: Run) -> None:
    run.publish(1)
    subscriber = run.join(run.mirror, stage_budget=0)
    run.publish(2, 3)
    subscriber.update()
    assert run.matches(run.mirror)


def test_weights_of_a_new_folder_appear_once_they_are_proven(run: Run, mirror: Path) -> None:
    subscriber = run.subscribe(mirror)
    for _ in range(2):  # each stage writes a file of its own
        staged = present(subscriber.stage())
    assert isinstance(staged.prepared, Patches)
    assert sum(np.asarray(patch.new).strides[0] for patch in staged.prepared.patches) == 0
    hidden = [file for file in mirror.iterdir() if file.name != LOCK_FILE]
    assert len(hidden) in (1, 2)
    assert not list(mirror.glob("*.safetensors"))
    assert isinstance(subscriber.target, FolderTarget)
    with pytest.raises(errors.PartialApplyError, match="has no weights"):
        subscriber.target.write(staged.prepared.patches[:-1], staged.to)
    subscriber.close()
    del staged
    assert not list(mirror.iterdir())
    subscriber = run.subscribe(mirror)
    subscriber.swap(present(subscriber.stage()))
    assert run.matches(mirror)


@pytest.mark.parametrize("record", ["as it was", "torn"])
def test_the_folder_remembers_what_it_holds(run: Run, subscriber: Subscriber, record: str) -> None:
    if record == "torn":  # then it is known by its bits
        (run.mirror / "deltachain.json").write_text("torn")
    again = run.subscribe(run.mirror, verify_at_start=False)
    assert again.chain is not None
    assert again.held == subscriber.held


# A folder that cannot be written to

NOBODY = 65534
Trouble = Callable[[Path], AbstractContextManager[None]]


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that this process may only look into; root is nobody meanwhile."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


@contextmanager
def no_descriptors(_: Path) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose parents everybody may walk through."""
    folder = Path(tempfile.mkdtemp(prefix="deltachain-rights-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("trouble", [read_only, no_descriptors])
@pytest.mark.parametrize("below", [".", "mirror"])
def test_a_folder_that_cannot_be_written_to_is_said_and_healed(
    run: Run, place: Path, trouble: Trouble, below: str
) -> None:
    run.publish()
    subscriber = run.subscribe(place / below)
    with trouble(place), pytest.raises(errors.ApplyError) as caught:
        subscriber.update()
    assert caught.value.hint
    assert str(place) in str(caught.value)
    subscriber.update()
    assert run.matches(place / below)


# A module of another configuration


@pytest.fixture
def url(tmp_path: Path) -> str:
    model, config = llama(), PublishConfig(url=str(tmp_path / "chain"))
    with Publisher(config) as publisher:
        publisher.attach(model, assets=collect_assets(model, config), alone=True)
    return config.url


def follower(**other: object) -> nn.Module:
    fields: dict[str, Any] = {**llama().config.to_dict(), **other}
    return LlamaForCausalLM(LlamaConfig(**fields)).bfloat16()


@pytest.mark.parametrize(("field", "value"), [("hidden_act", "gelu"), ("rms_norm_eps", 0.5)])
def test_a_field_that_decides_the_outputs_is_named_with_both_values(
    url: str, field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    Subscriber(url, follower(**{field: value})).update()
    (line,) = [line for line in caplog.messages if "configuration" in line]
    assert field in line
    assert repr(value) in line
    assert repr(llama().config.to_dict()[field]) in line
    assert line.count(", there ") == 1


def test_fields_of_a_run_are_no_difference(url: str, caplog: pytest.LogCaptureFixture) -> None:
    module = follower(use_cache=False, attention_dropout=0.5, eos_token_id=7, id2label={0: "x"})
    Subscriber(url, module).update()
    assert "configuration" not in caplog.text


# A swap that was interrupted


def interrupt(subscriber: Subscriber, *, after: int) -> None:
    """Swap, and lose the disk after some of the writes into the weights."""
    written, original = 0, FileBits.put

    def put(*given: Any) -> None:
        nonlocal written
        written += 1
        if written > after:
            raise OSError(errno.EIO, "the disk is gone")
        original(*given)

    with (
        mock.patch.object(FileBits, "put", put),
        pytest.raises(errors.PoisonedError, match="stopped in the middle") as caught,
    ):
        subscriber.update()
    assert "journal finishes the swap" in caught.value.hint


@pytest.mark.parametrize("after", [0, 1, 3])
def test_opening_the_folder_again_finishes_the_swap(
    run: Run, subscriber: Subscriber, after: int
) -> None:
    interrupt(subscriber, after=after)
    assert subscriber.version is None
    again = run.subscribe(run.mirror)
    assert again.update() is None
    assert again.version == 2
    assert again.scrub()
    assert run.matches(run.mirror)
    assert not (run.mirror / JOURNAL).exists()


def test_the_same_process_heals_from_nothing(run: Run, subscriber: Subscriber) -> None:
    interrupt(subscriber, after=2)
    receipt = present(subscriber.update())
    assert receipt.previous is None
    assert run.matches(run.mirror)


def test_nothing_is_believed_of_a_folder_that_is_half_written(
    run: Run, subscriber: Subscriber
) -> None:
    interrupt(subscriber, after=2)
    Journal(run.mirror).clear()  # as whoever heals it does before writing its own
    again = run.subscribe(run.mirror, verify_at_start=False)
    assert again.chain is not None
    assert again.version is None
    again.update()
    assert run.matches(run.mirror)


def damage_seal(journal: Path) -> None:
    (journal / SEAL).write_bytes(b'{"format":1,')


def damage_part(journal: Path) -> None:
    part = next(journal.glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


def remove_part(journal: Path) -> None:
    next(journal.glob("*.safetensors")).unlink()


@pytest.mark.parametrize("damage", [damage_seal, damage_part, remove_part])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("verify", [True, False])
def test_a_journal_that_is_damaged_is_forgotten_and_the_folder_heals(
    run: Run, subscriber: Subscriber, damage: Callable[[Path], None], after: int, *, verify: bool
) -> None:
    interrupt(subscriber, after=after)
    damage(run.mirror / JOURNAL)
    again = run.subscribe(run.mirror, verify_at_start=verify)
    receipt = present(again.update())
    assert receipt.previous == (None if after else 1)
    assert run.matches(run.mirror)
    assert again.scrub()


def test_a_journal_of_another_model_is_forgotten(
    run: Run, subscriber: Subscriber, tmp_path: Path
) -> None:
    interrupt(subscriber, after=0)
    wide = tmp_path / "wide"
    wide.mkdir()
    save_file(plain_model().state_dict(), wide / "model.safetensors")
    target = FolderTarget(wide)
    (run.mirror / JOURNAL).rename(wide / JOURNAL)
    target.bind({}, {})
    assert not (wide / JOURNAL).exists()
    assert same(bits(wide), bits_of(plain_model()))
    run.join(run.mirror)
    assert run.matches(run.mirror)


def test_a_journal_without_a_seal_never_was(run: Run, subscriber: Subscriber) -> None:
    half = run.mirror / JOURNAL
    half.mkdir()
    (half / "00000.safetensors").write_bytes(b"half a part")
    with unchanged(run.mirror):
        again = run.subscribe(run.mirror)
        assert again.chain is not None
        assert again.version == subscriber.version == 1
    assert not half.exists()


def test_a_disk_that_is_still_gone_keeps_the_journal(run: Run, subscriber: Subscriber) -> None:
    interrupt(subscriber, after=1)
    gone = mock.patch.object(FileBits, "put", side_effect=OSError(errno.EIO, "the disk is gone"))
    with gone, pytest.raises(errors.PoisonedError):
        run.join(run.mirror)
    assert run.subscribe(run.mirror).update() is None
    assert run.matches(run.mirror)


def test_a_full_disk_while_writing_the_journal_writes_nothing(
    run: Run, subscriber: Subscriber
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        unchanged(run.mirror),
        mock.patch("deltachain.checkpoint.write_atomic", side_effect=full),
        pytest.raises(errors.PartialApplyError, match="weights are as they were"),
    ):
        subscriber.update()
    assert subscriber.version == 1
    assert not (run.mirror / JOURNAL).exists()
    subscriber.update()
    assert run.matches(run.mirror)


# A folder that others change


def follow_until_ready(subscriber: Subscriber, version: int) -> None:
    """Follow until a version is held, through any number of failures."""
    stop, looks = Event(), itertools.count()

    def looked(_: errors.DeltaChainError | None) -> None:
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


@pytest.mark.parametrize("kind", ["tmpfs", pytest.param("ext4", marks=pytest.mark.full)])
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
    with pytest.raises(errors.PoisonedError, match="another process changed its weights files"):
        held.swap(staged)
    assert {file.name: file.read_bytes() for file in run.mirror.glob("*.safetensors")} == theirs
    assert held.version is None
    held.update()
    assert run.matches(run.mirror)


def test_a_file_of_another_model_is_named_and_left_alone(weights: Path, held: Subscriber) -> None:
    save_file(TinyModel(width=32).frozen.state_dict(), weights)
    theirs = weights.read_bytes()
    with pytest.raises(errors.TensorMismatchError):
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

    with mock.patch.object(FileBits, "put", changed_before), pytest.raises(errors.PoisonedError):
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
    with suppress(errors.PoisonedError):
        again.update()
    again.update()
    assert run.matches(run.mirror)
