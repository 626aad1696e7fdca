from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from deltachain.checkpoint import HELD_FILE
from deltachain.errors import (
    ApplyError,
    ConfigError,
    DeltaChainError,
    FormatError,
    PartialApplyError,
    PoisonedError,
    TensorMismatchError,
)
from deltachain.filebits import FileBits
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.assets import collect_assets
from deltachain.store import MemoryStore
from deltachain.subscribe import FolderTarget, Subscriber
from deltachain.subscribe.targets import folder
from deltachain.subscribe.targets import folder as journal
from deltachain.subscribe.targets.folder import LOCK_FILE
from deltachain.subscribe.targets.local import Patches
from deltachain.subscribe.targets.tensor_patch import Patch
from deltachain.types import TensorSpec
from tests.support.models import State, TinyModel, bits_of, plain_model, same
from tests.support.values import present
from tests.unit.publish.library import llama


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_a_tensor_of_another_kind_is_named(mirror: Path, subscribe: Subscribe, change: str) -> None:
    mirror.mkdir()
    tensors = {name: tensor.clone() for name, tensor in TinyModel().state_dict().items()}
    norm = tensors["norm.bias"]
    tensors["norm.bias"] = norm.half() if change == "dtype" else norm[:-1].clone()
    save_file(tensors, mirror / "model.safetensors")
    with pytest.raises(TensorMismatchError) as caught:
        subscribe(mirror).update()
    assert caught.value.tensor == "norm.bias"


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\0" * 100, b"\x02\0\0\0\0\0\0\0{}x"])
def test_a_file_that_is_no_checkpoint_is_refused(
    mirror: Path, subscribe: Subscribe, data: bytes
) -> None:
    mirror.mkdir()
    (mirror / "model.safetensors").write_bytes(data)
    with pytest.raises(FormatError):
        subscribe(mirror).update()
    assert (mirror / "model.safetensors").read_bytes() == data


@pytest.mark.usefixtures("publisher")
def test_an_index_that_leads_out_of_the_folder_is_refused(
    mirror: Path, subscribe: Subscribe
) -> None:
    mirror.mkdir()
    save_file(TinyModel().frozen.state_dict(), mirror / "model.safetensors")
    for name in ("../model.safetensors", ".hidden", "sub/model.safetensors"):
        index = {"weight_map": {"frozen.weight": name}}
        (mirror / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(FormatError, match="outside the folder"):
            subscribe(mirror).update()
    (mirror / "model.safetensors").rename(mirror / "other.safetensors")
    index = {"weight_map": {"frozen.weight": "gone.safetensors"}}
    (mirror / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"gone\.safetensors is missing"):
        subscribe(mirror).update()


@pytest.mark.parametrize("reopened", [True, False])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_files_that_a_backup_shares_are_copied_before_they_are_written(
    mirror: Path,
    tmp_path: Path,
    subscribe: Subscribe,
    publish: Callable[..., None],
    link: Callable[[Path, Path], None],
    *,
    reopened: bool,
) -> None:
    publish(1)
    subscriber = subscribe(mirror)
    subscriber.update()
    if reopened:
        subscriber.close()
    (file,) = mirror.glob("*.safetensors")
    backup = tmp_path / "backup.safetensors"
    if link is os.symlink:
        file.rename(backup)
        link(backup, file)
    else:
        link(file, backup)
    before = backup.read_bytes()
    publish(2)
    (subscribe(mirror) if reopened else subscriber).update()
    assert backup.read_bytes() == before
    assert file.read_bytes() != before


@pytest.mark.usefixtures("publisher")
def test_a_planted_lock_is_refused_and_not_followed(
    mirror: Path, tmp_path: Path, subscribe: Subscribe
) -> None:
    mirror.mkdir()
    elsewhere = tmp_path / "elsewhere"
    (mirror / LOCK_FILE).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"\.deltachain-lock is a link or a device"):
        subscribe(mirror).update()
    assert not elsewhere.exists()


@pytest.mark.usefixtures("publisher")
def test_a_planted_journal_is_removed_and_not_followed(
    mirror: Path, tmp_path: Path, subscribe: Subscribe
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "seal.json").write_text("theirs")
    subscribe(mirror).update()
    (mirror / ".deltachain-journal").symlink_to(elsewhere)
    subscriber = subscribe(mirror)
    subscriber.update()
    assert subscriber.version is not None
    assert (elsewhere / "seal.json").read_text() == "theirs"
    assert not (mirror / ".deltachain-journal").is_symlink()


@pytest.mark.usefixtures("publisher")
def test_bits_are_not_written_through_a_link_planted_meanwhile(
    mirror: Path, tmp_path: Path, subscribe: Subscribe
) -> None:
    subscribe(mirror).update()
    file, elsewhere = mirror / "model.safetensors", tmp_path / "elsewhere"
    file.rename(elsewhere)
    before = elsewhere.read_bytes()
    file.symlink_to(elsewhere)
    spec = TensorSpec("embed.weight", "U8", (1,))
    with pytest.raises(OSError, match="symbolic links"):
        FileBits(file, 0, spec).put(None, np.array([before[0] ^ 1], np.uint8))
    assert elsewhere.read_bytes() == before


@pytest.mark.usefixtures("publisher")
def test_unfinished_copies_of_killed_processes_are_removed(
    mirror: Path, subscribe: Subscribe
) -> None:
    with subscribe(mirror) as subscriber:
        subscriber.update()
    left = [mirror / f".{name}.0123456789abcdef" for name in ("model.safetensors", HELD_FILE)]
    other = [mirror / name for name in (".model.safetensors.notes", ".keep.0123456789abcdef")]
    for file in (*left, *other):
        file.write_bytes(b"x")
    with subscribe(mirror) as subscriber:
        subscriber.update()
    assert not any(file.exists() for file in left)
    assert all(file.exists() for file in other)


NOBODY = 65534


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


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize("trouble", [read_only, no_descriptors])
@pytest.mark.parametrize("below", [".", "mirror"])
def test_a_folder_that_cannot_be_written_to_is_said_and_healed(
    subscribe: Subscribe,
    model: TinyModel,
    place: Path,
    trouble: Callable[[Path], Iterator[None]],
    below: str,
) -> None:
    subscriber = subscribe(place / below)
    with trouble(place), pytest.raises(ApplyError) as caught:  # type: ignore[attr-defined]
        subscriber.update()
    assert caught.value.hint
    assert str(place) in str(caught.value)
    subscriber.update()
    assert same(subscriber_bits(place / below), bits_of(model))


def test_following_survives_it(
    subscribe: Subscribe, publish: Callable[..., None], model: TinyModel, place: Path
) -> None:
    publish(1)
    subscriber, stop = subscribe(place), Event()
    troubles: list[DeltaChainError] = []

    def looked(trouble: DeltaChainError | None) -> None:
        if trouble is not None:
            troubles.append(trouble)
            held.close_soon()

    class Held:
        """The folder, read-only until something was said of it."""

        def __init__(self) -> None:
            self.context = read_only(place)
            self.context.__enter__()

        def close_soon(self) -> None:
            self.context.__exit__(None, None, None)

    held = Held()
    for receipt in subscriber.follow(stop=stop, looked=looked):
        assert receipt.version == 1
        stop.set()
    assert [type(trouble) for trouble in troubles] == [ApplyError]
    assert same(subscriber_bits(place), bits_of(model))


def subscriber_bits(folder: Path) -> State:
    return bits_of(load_file(folder / "model.safetensors"))


OTHERS: dict[str, dict[str, Any]] = {
    "hidden_act": {"hidden_act": "gelu"},
    "rms_norm_eps": {"rms_norm_eps": 0.5},
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    model, config = llama(), PublishConfig(url=str(tmp_path / "chain"))
    with Publisher(config) as publisher:
        publisher.attach(model, assets=collect_assets(model, config), alone=True)
    return config.url


def follower(**other: object) -> nn.Module:
    fields: dict[str, Any] = {**llama().config.to_dict(), **other}
    return LlamaForCausalLM(LlamaConfig(**fields)).bfloat16()


@pytest.mark.parametrize("field", OTHERS)
def test_a_field_that_decides_the_outputs_is_named_with_both_values(
    url: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    Subscriber(url, follower(**OTHERS[field])).update()
    (line,) = [line for line in caplog.messages if "configuration" in line]
    for value in (OTHERS[field][field], llama().config.to_dict()[field]):
        assert repr(value) in line
    assert field in line
    assert line.count(", there ") == 1


def test_fields_of_a_run_are_no_difference(url: str, caplog: pytest.LogCaptureFixture) -> None:
    module = follower(use_cache=False, attention_dropout=0.5, eos_token_id=7, id2label={0: "x"})
    Subscriber(url, module).update()
    assert "configuration" not in caplog.text


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
        patched.setattr("deltachain.checkpoint.write_atomic", full)
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
