"""SkyRL: ``delta-00000007/`` has frames of what changed since number 6, and a manifest.

Number 0 is the checkpoint that engines start from, here ``base/``; there is no full version later.
Source: SkyRL a9564572e (``delta_checkpoint.py``).
"""

import json
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from deltachain.bridges.dialect import Change, Dialect, Model, Objects, required
from deltachain.bridges.files import (
    Array,
    TensorFile,
    checkpoint,
    is_checkpoint_marker,
    packed,
    read_checkpoint,
)
from deltachain.bridges.frames import checksum, new_bits, xor_frames
from deltachain.errors import MalformedError
from deltachain.format.documents import check_values, decode
from deltachain.store import Store
from deltachain.store.base import is_segment

_MANIFEST: Final = "manifest.json"
_ALGORITHM: Final = "xxh3-128"
_DTYPES: Final = {  # torch's names, as their records have them
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


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
        if folder == "base" and is_checkpoint_marker(file):
            return 0
        found = re.fullmatch(rf"delta-(\d{{8,12}})/{_MANIFEST}", key)
        return int(found[1]) if found else None

    def full(self, number: int, model: Model) -> Objects:
        del number
        return checkpoint("base", model)

    def delta(self, number: int, model: Model, changes: Sequence[Change]) -> Objects:
        folder, file = f"delta-{number:08d}", "delta-rank00000-file000000.safetensors"
        frames = [(change.spec, frame) for change, frame in xor_frames(changes)]
        records = tuple(
            _Record(
                name=spec.name,
                dtype=_DTYPES[spec.dtype],
                shape=spec.shape,
                uncompressed_num_bytes=spec.nbytes,
                compressed_num_bytes=frame.nbytes,
                payload_file=file,
                payload_key=spec.name,
                checksum=checksum(_ALGORITHM, model.bits[spec.name]),
            )
            for spec, frame in frames
        )
        if frames:
            arrays = (Array(spec.name, "U8", frame) for spec, frame in frames)
            yield f"{folder}/{file}", packed(arrays, {})
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

    def read(self, store: Store, key: str, before: Model | None) -> Model:
        if self.is_full(store, key):
            return read_checkpoint(store, key)
        old, number = required(before, key), self.number(key) or 0
        manifest = _read_manifest(store, key)
        if (manifest.version, manifest.base_version) != (number, number - 1):
            raise MalformedError(
                f"{key}: version {manifest.version} on {manifest.base_version}, expected {number} "
                f"on {number - 1}",
                key=key,
            )
        files, bits = dict[str, TensorFile](), {}
        for one in manifest.tensors:
            spec = old.spec(one.name, key)
            if (_DTYPES[spec.dtype], spec.shape) != (one.dtype, one.shape):
                raise MalformedError(
                    f"{key}: {one.name!r} is {one.dtype}{list(one.shape)}, expected "
                    f"{_DTYPES[spec.dtype]}{list(spec.shape)}",
                    key=key,
                )
            if one.payload_file not in files:
                place = f"{key.rpartition('/')[0]}/{one.payload_file}"
                files[one.payload_file] = TensorFile.open(store, place)
            file = files[one.payload_file]
            bits[one.name] = new_bits(
                file.read(file.entry(one.payload_key, "U8")),
                old.bits[one.name],
                encoding="xor",
                algorithm=one.checksum_algorithm,
                want=one.checksum,
                key=f"{file.key}, {one.name}",
            )
        return old.changed(bits)


def _read_manifest(store: Store, key: str) -> _Manifest:
    data = store.get(key)
    check_values(data, key)
    try:
        manifest = decode(data, _Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc
    for one in manifest.tensors:
        if not is_segment(one.payload_file):
            raise MalformedError(f"{key}: {one.payload_file!r} is no file beside it", key=key)
    return manifest
