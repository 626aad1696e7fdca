"""A Hugging Face checkpoint: safetensors files in a folder, read and written as bits."""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from deltachain.codec.container import Entry, read_header, reader_of, write_header
from deltachain.errors import ConfigError, MalformedError
from deltachain.format.digest import digest_key, object_digest
from deltachain.format.documents import FileRef
from deltachain.kernels import host
from deltachain.remote_code import without_remote_code
from deltachain.room import reserve
from deltachain.store.base import is_segment
from deltachain.types import Bits, Buffer, StateDigest, TensorSpec

WEIGHTS_FILE: Final = "model.safetensors"
ADAPTER_FILE: Final = "adapter_model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_PEFT_PREFIX: Final = "base_model.model."

HELD_FILE: Final = "deltachain.json"
"""Status file of a folder that follows a chain; not an asset of the checkpoint."""

ASSET_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja")
"""Suffixes of assets, the small files published with a chain. Code is excluded: write access to a
store must not grant execution where a follower's folder is loaded. References to remote code are
removed as well; see ``remote_code.py``."""

ASSET_NBYTES: Final = 64 << 20
"""Size limit of an asset, in bytes."""


def named_folder(named: str, *, revision: str | None = None, cache: str | None = None) -> Path:
    """Resolve a checkpoint to a folder: a local path, or a repository in the Hub's local cache.

    Args:
        named: A folder or a repository id.
        revision: Revision of the repository.
        cache: Cache folder; the Hub's default if ``None``.

    Raises:
        ConfigError: It is neither.
    """
    folder = Path(named)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - seldom needed, and slow

    try:
        found = snapshot_download(named, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{named!r} is neither a checkpoint folder nor a repository in the cache of the Hub",
            hint="deltachain pull URL --out FOLDER makes a folder to start from",
        ) from exc
    return Path(found)


class Checkpoint:
    """The tensors of one safetensors file, or of all safetensors files in a folder, memory-mapped.

    Args:
        path: The file or the folder.

    Raises:
        ConfigError: There is no safetensors file at ``path``, or two hold the same tensor.
        MalformedError: A file does not match its header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _weight_files(path)
        self._maps: dict[str, memoryview] = {}
        self._entries: dict[str, tuple[str, Entry]] = {}
        for file in self._files:
            view = self._maps[file.name] = _map(file)
            header = read_header(reader_of(view), len(view), key=str(file))
            for name, entry in header.entries.items():
                if name in self._entries:
                    raise ConfigError(f"{path}: {name!r} is in two files")
                self._entries[name] = (file.name, entry)
        self.specs: Mapping[str, TensorSpec] = MappingProxyType(
            {n: TensorSpec(n, e.dtype, e.shape) for n, (_, e) in sorted(self._entries.items())}
        )

    def bits(self, name: str) -> Bits:
        """Return the flat bits of one tensor, a read-only view of the mapped file."""
        file, entry = self._entries[name]
        data = self._maps[file][entry.start : entry.stop]
        return np.frombuffer(data, self.specs[name].bits_dtype)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The safetensors files."""
        return tuple(self._files)

    def place(self, name: str) -> tuple[Path, int]:
        """Return the file of a tensor and the offset of its first byte."""
        file, entry = self._entries[name]
        return next(path for path in self._files if path.name == file), entry.start

    def digest(self, name: str) -> StateDigest:
        """Compute the contribution of one tensor to the state digest."""
        return host.digest(digest_key(self.specs[name]), self.bits(name))

    def state(self, names: Iterable[str]) -> StateDigest:
        """Compute the state digest of the given tensors."""
        return sum((self.digest(name) for name in names), StateDigest())

    def files(self) -> Iterator[FileRef]:
        """Yield name, size and blake3 of each safetensors file; hashed lazily."""
        for file in self._files:
            view = self._maps[file.name]
            yield FileRef(name=file.name, nbytes=len(view), blake3=object_digest(view))

    def assets(self, *, trusted: bool = False) -> dict[str, bytes]:
        """Return the assets of a folder, empty for a single file; see :func:`read_assets`."""
        return read_assets(self.path, trusted=trusted) if self.path.is_dir() else {}


def read_assets(folder: Path, *, trusted: bool = False) -> dict[str, bytes]:
    """Read the configuration and tokenizer files of a checkpoint folder, by name.

    Args:
        folder: The checkpoint folder.
        trusted: Whether references to remote code are kept.

    Raises:
        ConfigError: There is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", hint="name a folder of configuration files")
    return {
        file.name: kept
        for file in sorted(folder.iterdir())
        if file.suffix in ASSET_SUFFIXES
        and file.is_file()
        and file.name not in (INDEX_FILE, HELD_FILE)
        and is_segment(file.name)
        and file.stat().st_size <= ASSET_NBYTES
        and (
            kept := without_remote_code(
                file.name, file.read_bytes(), trusted=trusted, where=str(folder)
            )
        )
        is not None
    }


def weights_file(names: Iterable[str]) -> str:
    """Return the file name of the weights: PEFT's if all tensors belong to an adapter."""
    is_adapter = all(name.startswith(_PEFT_PREFIX) for name in names)
    return ADAPTER_FILE if is_adapter else WEIGHTS_FILE


def write_weights(
    file: Path, specs: Iterable[TensorSpec], read: Callable[[TensorSpec], Bits]
) -> None:
    """Write a safetensors file durably and atomically, with one tensor in memory at a time."""
    with creating(file) as partial:
        ordered = allocate(partial, specs)
        with partial.open("r+b") as out:
            out.seek(-sum(spec.nbytes for spec in ordered), os.SEEK_END)
            for spec in ordered:
                out.write(np.ascontiguousarray(read(spec)).view(np.uint8).data)


def allocate(file: Path, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Write the header of a safetensors file and allocate its data, filled with zeros.

    Wide elements come first, so that every tensor is aligned.

    Returns:
        The tensors in the order of their data.

    Raises:
        NoRoomError: The disk has too little free space.
    """
    ordered = sorted(specs, key=lambda spec: (-spec.itemsize, spec.name))
    rows = [(spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in ordered]
    header = write_header({"format": "pt"}, rows)
    file.write_bytes(header)
    reserve(file, len(header) + sum(spec.nbytes for spec in ordered))
    return ordered


@contextmanager
def creating(file: Path) -> Iterator[Path]:
    """Yield a new, empty file that atomically and durably replaces ``file`` on success.

    Its name is random and it is made exclusively: a link that another user of the folder planted is
    not followed.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield partial
        with partial.open("r+b") as written:
            os.fsync(written.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(file.parent)


def write_atomic(file: Path, data: Buffer) -> None:
    """Write a small file durably and atomically."""
    with creating(file) as partial:
        partial.touch()
        reserve(partial, len(data))
        with partial.open("r+b") as out:
            out.write(data)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _map(file: Path) -> memoryview:
    with file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            raise MalformedError(f"{file} is empty", key=str(file))
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as exc:
            raise MalformedError(f"{index}: weight_map is missing", key=str(index)) from exc
        if any(not isinstance(n, str) or "/" in n or n.startswith(".") for n in names):
            raise MalformedError(f"{index}: names a file outside the folder", key=str(index))
        files = [path / name for name in names]
    else:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    missing = [file.name for file in files if not file.is_file()]
    if not files or missing:
        raise ConfigError(
            f"{path}: no safetensors checkpoint"
            + (f", {missing[0]} is missing" if missing else ""),
            hint="give a folder with model.safetensors, or one safetensors file",
        )
    return files
