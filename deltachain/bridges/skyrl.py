"""SkyRL: ``delta-00000007/`` has frames of what changed since number 6, and a manifest.

Number 0 is the checkpoint that engines start from, here ``base/``; all later versions are changes.
Source: SkyRL a9564572e (``delta_checkpoint.py``).
"""

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from deltachain.bridges import files
from deltachain.bridges.dialect import Dialect, ElementChange, HostModel, Objects, required
from deltachain.bridges.frames import checksum, new_bits, xor_frames
from deltachain.errors import MalformedError
from deltachain.store import Store
from deltachain.types import Bits

_MANIFEST: Final = "manifest.json"
_ALGORITHM: Final = "xxh3-128"


def _named(dtype: str) -> str:
    """Return torch's name of a dtype, as their records have it."""
    from deltachain.torch_names import TORCH_DTYPES  # noqa: PLC0415 - slow

    return str(TORCH_DTYPES[dtype]).removeprefix("torch.")


class _Record(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    uncompressed_num_bytes: int
    compressed_num_bytes: int
    payload_file: str
    payload_key: str
    checksum: str
    checksum_algorithm: str = _ALGORITHM


class _Manifest(msgspec.Struct, frozen=True):
    version: int
    base_version: int
    tensors: tuple[_Record, ...] = ()
    total_uncompressed_num_bytes: int = 0
    total_compressed_num_bytes: int = 0
    payload_files: tuple[str, ...] = ()


class SkyRLDialect(Dialect):
    counts = True

    def number(self, key: str) -> int | None:
        folder, _, file = key.rpartition("/")
        if folder == "base" and files.is_checkpoint_marker(file):
            return 0
        found = re.fullmatch(rf"delta-(\d{{8,12}})/{_MANIFEST}", key)
        return int(found[1]) if found else None

    def full(self, number: int, model: HostModel) -> Objects:
        del number
        return files.checkpoint("base", model)

    def delta(self, number: int, model: HostModel, changes: Sequence[ElementChange]) -> Objects:
        folder, file = f"delta-{number:08d}", "delta-rank00000-file000000.safetensors"
        frames = [(change.spec, frame) for change, frame in xor_frames(changes)]
        records = tuple(
            _Record(
                name=spec.name,
                dtype=_named(spec.dtype),
                shape=spec.shape,
                uncompressed_num_bytes=spec.nbytes,
                compressed_num_bytes=frame.nbytes,
                payload_file=file,
                payload_key=spec.name,
                checksum=checksum(_ALGORITHM, model.bits(spec.name)),
            )
            for spec, frame in frames
        )
        if frames:
            arrays = (files.Array(spec.name, "U8", frame) for spec, frame in frames)
            yield f"{folder}/{file}", files.packed(arrays, {})
        manifest = _Manifest(
            version=number,
            base_version=number - 1,
            tensors=records,
            total_uncompressed_num_bytes=sum(one.uncompressed_num_bytes for one in records),
            total_compressed_num_bytes=sum(one.compressed_num_bytes for one in records),
            payload_files=(file,) if frames else (),
        )
        yield f"{folder}/{_MANIFEST}", json.dumps(msgspec.to_builtins(manifest)).encode()

    def is_full(self, store: Store, key: str) -> bool:
        del store
        return not key.endswith(_MANIFEST)

    def read(self, store: Store, key: str, before: HostModel | None) -> HostModel:
        if self.is_full(store, key):
            return files.read_checkpoint(store, key)
        old, number = required(before, key), self.number(key) or 0
        manifest = files.read_json(store, key, _Manifest)
        if (manifest.version, manifest.base_version) != (number, number - 1):
            raise MalformedError(
                f"{key}: version {manifest.version} on {manifest.base_version}, expected {number} "
                f"on {number - 1}",
                key=key,
            )
        opened, reads = dict[str, files.TensorFile](), {}
        for one in manifest.tensors:
            spec = old.spec(one.name, key)
            if (_named(spec.dtype), spec.shape) != (one.dtype, one.shape):
                raise MalformedError(
                    f"{key}: {one.name!r} is {one.dtype}{list(one.shape)}, expected "
                    f"{_named(spec.dtype)}{list(spec.shape)}",
                    key=key,
                )
            place = files.beside(key, one.payload_file)
            if place not in opened:
                opened[place] = files.TensorFile.open(store, place)
            reads[one.name] = partial(_new, opened[place], one, old)
        return old.changed(reads)


def _new(file: files.TensorFile, record: _Record, old: HostModel) -> Bits:
    return new_bits(
        file.read(file.entry(record.payload_key, "U8")),
        old.bits(record.name),
        encoding="xor",
        algorithm=record.checksum_algorithm,
        want=record.checksum,
        key=f"{file.key}, {record.name}",
    )
