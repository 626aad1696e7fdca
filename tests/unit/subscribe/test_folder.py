"""A folder as a target: its journal, its files, and swaps that were interrupted."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from deltachain.errors import (
    ConfigError,
    PartialApplyError,
    PoisonedError,
)
from deltachain.filebits import FileBits
from deltachain.store import MemoryStore
from deltachain.subscribe import FolderTarget, Subscriber
from deltachain.subscribe.targets import folder
from deltachain.subscribe.targets import folder as journal
from deltachain.subscribe.targets.folder import LOCK_FILE
from deltachain.subscribe.targets.local import Patches
from deltachain.subscribe.targets.patch import Patch
from tests.support.models import State, TinyModel, bits_of, plain_model, same
from tests.support.values import present

Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]


def bits(mirror: Path) -> State:
    return bits_of(load_file(mirror / "model.safetensors"))


def interrupt(subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Swap, and lose the disk after some of the writes into the weights."""
    written, original = 0, folder.write

    def write(place: FileBits, patch: Patch) -> None:
        nonlocal written
        written += 1
        if written > after:
            raise OSError(errno.EIO, "the disk is gone")
        original(place, patch)

    with monkeypatch.context() as patched:
        patched.setattr(folder, "write", write)
        with pytest.raises(PoisonedError, match="stopped in the middle") as caught:
            subscriber.update()
    assert "journal finishes the swap" in caught.value.hint


@pytest.mark.parametrize("inside", [".", "a/b"])
def test_a_path_of_a_file_is_refused(
    tmp_path: Path, subscribe: Subscribe, publish: Publish, inside: str
) -> None:
    publish(1)
    file = tmp_path / "policy"
    file.write_text("notes")
    with pytest.raises(ConfigError, match="policy is not a folder") as caught:
        subscribe(file / inside).update()
    assert "name a new folder" in caught.value.hint
    assert file.read_text() == "notes"


# A swap that was interrupted


@pytest.mark.parametrize("after", [0, 1, 3])
def test_opening_the_folder_again_finishes_the_swap(
    subscriber: Subscriber,
    mirror: Path,
    subscribe: Subscribe,
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    interrupt(subscriber, monkeypatch, after=after)
    assert subscriber.version is None
    again = subscribe(mirror)
    assert again.update() is None
    assert again.version == 2
    assert again.scrub()
    assert same(bits(mirror), bits_of(model))
    assert not (mirror / journal.FOLDER).exists()


def test_the_same_process_heals_from_nothing(
    subscriber: Subscriber, mirror: Path, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(subscriber, monkeypatch, after=2)
    receipt = present(subscriber.update())
    assert receipt.previous is None
    assert same(bits(mirror), bits_of(model))


def test_nothing_is_believed_of_a_folder_that_is_half_written(
    subscriber: Subscriber,
    mirror: Path,
    subscribe: Subscribe,
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt(subscriber, monkeypatch, after=2)
    journal.Journal(mirror).clear()  # as whoever heals it does before writing its own
    again = subscribe(mirror, verify_at_start=False)
    assert again.chain is not None
    assert again.version is None
    again.update()
    assert same(bits(mirror), bits_of(model))


def damage_seal(mirror: Path) -> None:
    (mirror / journal.FOLDER / journal.SEAL).write_bytes(b'{"format":1,')


def damage_part(mirror: Path) -> None:
    part = next((mirror / journal.FOLDER).glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


def remove_part(mirror: Path) -> None:
    next((mirror / journal.FOLDER).glob("*.safetensors")).unlink()


@pytest.mark.parametrize("damage", [damage_seal, damage_part, remove_part])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("verify", [True, False])
def test_a_journal_that_is_damaged_is_forgotten_and_the_folder_heals(
    subscriber: Subscriber,
    mirror: Path,
    subscribe: Subscribe,
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    *,
    damage: Callable[[Path], None],
    after: int,
    verify: bool,
) -> None:
    interrupt(subscriber, monkeypatch, after=after)
    damage(mirror)
    again = subscribe(mirror, verify_at_start=verify)
    receipt = present(again.update())
    assert receipt.previous == (None if after else 1)
    assert same(bits(mirror), bits_of(model))
    assert again.scrub()


def test_a_journal_of_another_model_is_forgotten(
    subscriber: Subscriber,
    mirror: Path,
    subscribe: Subscribe,
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    interrupt(subscriber, monkeypatch, after=0)
    wide = tmp_path / "wide"
    wide.mkdir()
    save_file(plain_model().state_dict(), wide / "model.safetensors")
    target = FolderTarget(wide)
    (mirror / journal.FOLDER).rename(wide / journal.FOLDER)
    target.bind({}, {})
    assert not (wide / journal.FOLDER).exists()
    assert same(bits_of(load_file(wide / "model.safetensors")), bits_of(plain_model()))
    subscribe(mirror).update()
    assert same(bits(mirror), bits_of(model))


def test_a_journal_without_a_seal_never_was(
    subscriber: Subscriber, mirror: Path, subscribe: Subscribe
) -> None:
    before = bits(mirror)
    half = mirror / journal.FOLDER
    half.mkdir()
    (half / "00000.safetensors").write_bytes(b"half a part")
    again = subscribe(mirror)
    assert again.chain is not None
    assert again.version == subscriber.version == 1
    assert same(bits(mirror), before)
    assert not half.exists()


def test_a_disk_that_is_still_gone_keeps_the_journal(
    subscriber: Subscriber,
    mirror: Path,
    subscribe: Subscribe,
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt(subscriber, monkeypatch, after=1)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(folder, "write", refuse)
        with pytest.raises(PoisonedError):
            subscribe(mirror).update()
    assert subscribe(mirror).update() is None
    assert same(bits(mirror), bits_of(model))


def test_a_full_disk_while_writing_the_journal_writes_nothing(
    subscriber: Subscriber, mirror: Path, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bits(mirror)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(journal, "write_atomic", full)
        with pytest.raises(PartialApplyError, match="weights are as they were"):
            subscriber.update()
    assert same(bits(mirror), before)
    assert subscriber.version == 1
    assert not (mirror / journal.FOLDER).exists()
    subscriber.update()
    assert same(bits(mirror), bits_of(model))


# What lies in the folder


def test_a_budget_too_small_for_anything_is_enough_for_a_folder(
    mirror: Path, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(mirror, stage_budget=0)
    subscriber.update()
    publish(2, 3)
    subscriber.update()
    assert same(bits(mirror), bits_of(model))


@pytest.mark.usefixtures("publisher")
def test_a_plan_that_does_not_fill_an_empty_folder_is_refused(
    mirror: Path, subscribe: Subscribe, store: MemoryStore
) -> None:
    subscriber = subscribe(mirror)
    staged = present(subscriber.stage())
    assert store.find("manifests/00000000000000000000.json") is not None
    assert isinstance(subscriber.target, FolderTarget)
    assert isinstance(staged.prepared, Patches)
    with pytest.raises(PartialApplyError, match="has no weights"):
        subscriber.target.write(staged.prepared.patches[:-1], staged.to)
    assert [path.name for path in mirror.iterdir()] == [LOCK_FILE]


def test_other_files_in_the_folder_are_left_alone(
    mirror: Path, subscribe: Subscribe, publish: Publish
) -> None:
    publish(1)
    mirror.mkdir()
    (mirror / "config.json").write_text("{}")
    subscriber = subscribe(mirror)
    subscriber.update()
    publish(2)
    subscriber.update()
    names = {path.name for path in mirror.iterdir()}
    assert names == {"config.json", "model.safetensors", "deltachain.json", LOCK_FILE}
    assert (mirror / "config.json").read_text() == "{}"


def test_a_checkpoint_in_several_files_is_followed_where_it_lies(
    mirror: Path, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    mirror.mkdir()
    tensors = {name: tensor.clone() for name, tensor in TinyModel().state_dict().items()}
    names = sorted(tensors)
    for number, part in enumerate((names[:3], names[3:])):
        save_file({n: tensors[n] for n in part}, mirror / f"model-{number}.safetensors")
    index = {n: f"model-{int(n in names[3:])}.safetensors" for n in names}
    (mirror / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    publish(1)
    receipt = present(subscribe(mirror).update())
    assert receipt.previous == 0
    merged: dict[str, object] = {}
    for file in mirror.glob("*.safetensors"):
        merged |= load_file(file)
    assert same(bits_of(merged), bits_of(model))  # type: ignore[arg-type]


def test_tied_weights_in_two_places_are_both_written(
    mirror: Path, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    mirror.mkdir()
    tensors = {name: tensor.clone() for name, tensor in TinyModel().state_dict().items()}
    save_file(tensors, mirror / "model.safetensors")
    publish(1)
    subscribe(mirror).update()
    found = bits(mirror)
    assert np.array_equal(found["head.weight"], found["embed.weight"])
    assert same(found, bits_of(model))


def test_the_folder_remembers_what_it_holds(
    subscriber: Subscriber, mirror: Path, subscribe: Subscribe
) -> None:
    again = subscribe(mirror, verify_at_start=False)
    assert again.chain is not None
    assert again.held == subscriber.held
    (mirror / "deltachain.json").write_text("torn")
    again = subscribe(mirror, verify_at_start=False)
    assert again.chain is not None
    assert again.held == subscriber.held  # by its bits
