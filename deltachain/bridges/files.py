"""Safetensors files and checkpoints in a store, written and read as bits."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from deltachain.bridges.dialect import Dialect, HostModel, Objects
from deltachain.checkpoint import INDEX_FILE, WEIGHTS_FILE
from deltachain.codec.container import Entry, Header, read_header, write_header
from deltachain.errors import MalformedError
from deltachain.format.documents import check_values, decode
from deltachain.store import Store
from deltachain.store.base import is_segment, not_found
from deltachain.types import BITS_DTYPES, WIRE_DTYPES, TensorSpec

_T = TypeVar("_T")

SHARD_NBYTES: Final = 1 << 30
"""Bytes of tensors of one file, which is held in memory as it is written."""

FORMAT: Final = {"format": "pt"}  # metadata that loaders of checkpoints ask for


@dataclass(frozen=True, slots=True)
class Array:
    """A named array of a safetensors file, of any layout of bytes."""

    name: str
    dtype: str
    values: npt.NDArray[Any]
    shape: tuple[int, ...] | None = None


def packed(arrays: Iterable[Array], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file; widest elements first, so that all are aligned."""
    order = sorted(arrays, key=lambda one: (-WIRE_DTYPES[one.dtype], one.dtype, one.name))
    rows = []
    for one in order:
        flat = (one.values.nbytes // WIRE_DTYPES[one.dtype],)
        shape = flat if one.shape is None else one.shape
        rows.append((one.name, one.dtype, shape, one.values.nbytes))
    data = (np.ascontiguousarray(one.values).reshape(-1).view(np.uint8).data for one in order)
    return b"".join([write_header(metadata, rows), *data])


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file in a store; its header is checked, its arrays are read one at a time."""

    store: Store
    key: str
    header: Header

    @classmethod
    def open(cls, store: Store, key: str) -> "TensorFile":
        info = store.find(key)
        if info is None:
            raise not_found(key, store.url)
        read_at = lambda start, length: store.get_range(key, start, length)  # noqa: E731
        return cls(store, key, read_header(read_at, info.nbytes, key=key))

    def entry(self, name: str, dtype: str = "") -> Entry:
        entry = self.header.entries.get(name)
        if entry is None or (dtype and entry.dtype != dtype):
            found = "none" if entry is None else f"one of {entry.dtype}"
            raise MalformedError(
                f"{self.key}: expected {name!r} of {dtype or 'any dtype'}, found {found}",
                key=self.key,
            )
        return entry

    def read(self, entry: Entry) -> npt.NDArray[Any]:
        data = self.store.get_range(self.key, entry.start, entry.nbytes)
        return np.frombuffer(data, BITS_DTYPES[WIRE_DTYPES[entry.dtype]])


class Index(msgspec.Struct, frozen=True):
    """``model.safetensors.index.json``, of a checkpoint or of a delta."""

    weight_map: dict[str, str]
    metadata: dict[str, str | int | float | bool | None] = {}

    def files(self) -> Iterator[tuple[str, list[str]]]:
        by_file = lambda name: self.weight_map[name]  # noqa: E731
        for file, names in groupby(sorted(self.weight_map, key=by_file), by_file):
            yield file, list(names)


def read_json(store: Store, key: str, kind: type[_T]) -> _T:
    data = store.get(key)
    check_values(data, key)
    try:
        return decode(data, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc


def beside(key: str, file: str) -> str:
    """Return the key of a file in the folder of another one, which names it."""
    if not is_segment(file) or not file.endswith(".safetensors"):
        raise MalformedError(f"{key}: {file!r} is not the name of a file in its folder", key=key)
    return f"{key.rpartition('/')[0]}/{file}"


def read_index(store: Store, key: str) -> Index:
    return read_json(store, key, Index)


def grouped(items: Iterable[_T], nbytes: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Divide items of some size into files of at most ``SHARD_NBYTES``, or of one item."""
    group, size = list[_T](), 0
    for item in items:
        if group and size + nbytes(item) > SHARD_NBYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group


def checkpoint(folder: str, model: HostModel) -> Objects:
    """Write a checkpoint as ``from_pretrained`` reads it: small files, shards, then the index."""
    for name, data in model.assets.items():
        yield f"{folder}/{name}", data
    places: dict[str, str] = {}
    groups = list(grouped(model.specs.values(), lambda spec: spec.nbytes))
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        arrays = (Array(s.name, s.dtype, model.bits(s.name), s.shape) for s in group)
        places |= {spec.name: file for spec in group}
        yield f"{folder}/{file}", packed(arrays, FORMAT)
    total = sum(spec.nbytes for spec in model.specs.values())
    index = Index(weight_map=places, metadata={"total_size": total})
    yield f"{folder}/{INDEX_FILE}", msgspec.json.encode(index)


def read_checkpoint(store: Store, key: str) -> HostModel:
    """Read a checkpoint by its index or, without one, its only file."""
    if not key.endswith(INDEX_FILE):
        return read_tensors(TensorFile.open(store, key))
    parts = [
        read_tensors(TensorFile.open(store, beside(key, file)), names)
        for file, names in read_index(store, key).files()
    ]
    of = {name: part for part in parts for name in part.specs}
    return HostModel({n: part.specs[n] for n, part in of.items()}, lambda name: of[name].bits(name))


def read_tensors(file: TensorFile, names: Iterable[str] | None = None) -> HostModel:
    found = [file.entry(name) for name in names or file.header.entries]
    specs = {one.name: TensorSpec(one.name, one.dtype, one.shape) for one in found}
    return HostModel(specs, lambda name: file.read(file.entry(name)))


def is_checkpoint_marker(file: str) -> bool:
    return file in (INDEX_FILE, WEIGHTS_FILE)


class CheckpointDialect(Dialect):
    """Plain checkpoints, one a version, as the ``Trainer`` of transformers saves them."""

    def number(self, key: str) -> int | None:
        folder, _, file = key.rpartition("/")
        found = re.fullmatch(r"checkpoint-(\d{1,12})", folder)
        return int(found[1]) if found and is_checkpoint_marker(file) else None

    def full(self, number: int, model: HostModel) -> Objects:
        return checkpoint(f"checkpoint-{number}", model)

    def is_full(self, store: Store, key: str) -> bool:
        del store, key
        return True

    def read(self, store: Store, key: str, before: HostModel | None) -> HostModel:
        del before
        return read_checkpoint(store, key)
