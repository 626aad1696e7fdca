"""Folders and files that are not what a chain needs: refused by name, and not written to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from deltachain.checkpoint import HELD_FILE
from deltachain.errors import ConfigError, FormatError, TensorMismatchError
from deltachain.filebits import FileBits
from deltachain.subscribe import Subscriber
from deltachain.subscribe.targets.folder import LOCK_FILE
from deltachain.types import TensorSpec
from tests.support.models import TinyModel

Subscribe = Callable[..., Subscriber]


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
