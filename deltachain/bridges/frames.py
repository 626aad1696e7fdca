"""Systems whose files have frames of what changed: SkyRL, slime, miles and ModelExpress.

A frame has the changes of a tensor as bytes, compressed by zstd. *xor* is old XOR new of every
byte. *overwrite* is a uint32 count, as many uint32 positions of bytes, and the new bytes. Both have
a checksum of all new bytes, which proves their base as well.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import blake3
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from deltachain.bridges import files
from deltachain.bridges.dialect import Dialect, ElementChange, HostModel, Objects, required
from deltachain.checkpoint import INDEX_FILE
from deltachain.codec.frames import inflate
from deltachain.errors import DigestMismatchError, MalformedError, UnsupportedFormatError
from deltachain.store import Store
from deltachain.threads import Pool, cores
from deltachain.types import Bits, Buffer

Bytes = npt.NDArray[np.uint8]


def xor_bytes(change: ElementChange) -> Bytes:
    dense = np.zeros(change.spec.numel, change.new.dtype)
    dense[change.indices] = change.old ^ change.new
    return dense.view(np.uint8)


def deflated(content: Bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(content.data), np.uint8)


def xor_frames(changes: Iterable[ElementChange]) -> Iterator[tuple[ElementChange, Bytes]]:
    """Yield each tensor that changed with its frame, made by all cores."""
    changed = [change for change in changes if change.indices.size]
    make = lambda change: deflated(xor_bytes(change))  # noqa: E731
    with Pool(cores()) as pool:
        yield from zip(changed, pool.ordered(make, changed, ahead=2 * cores()), strict=True)


def _xxh3(data: Buffer) -> str:
    import xxhash  # noqa: PLC0415 - an extra

    return xxhash.xxh3_128_hexdigest(data)


CHECKSUMS: Final[dict[str, Callable[[Any], str]]] = {
    "xxh3-128": _xxh3,
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}


def checksum(algorithm: str, bits: Bits) -> str:
    return CHECKSUMS[algorithm](bits.view(np.uint8).data)


def _xored(frame: Buffer, old: Bytes, key: str) -> Bytes:
    return np.frombuffer(inflate(frame, old.nbytes, key=key), np.uint8) ^ old


def _overwritten(frame: Buffer, old: Bytes, key: str) -> Bytes:
    refused = partial(MalformedError, key=key)
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as exc:
        raise refused(f"{key}: {exc}") from exc
    count, rest = divmod(size - 4, 5)
    if not 0 <= count <= old.nbytes or rest:
        raise refused(f"{key}: a frame of {size} bytes for a tensor of {old.nbytes}")
    data = inflate(frame, size, key=key)
    positions = np.frombuffer(data, "<u4", count, 4)
    if int.from_bytes(data[:4], "little") != count or (count and positions.max() >= old.nbytes):
        raise refused(f"{key}: positions of other bytes than the tensor's {old.nbytes}")
    new = old.copy()
    new[positions] = np.frombuffer(data, np.uint8, count, 4 + 4 * count)
    return new


_APPLY: Final = {"xor": _xored, "overwrite": _overwritten}


def new_bits(
    frame: Bytes, old: Bits, *, encoding: str, algorithm: str, want: str, key: str
) -> Bits:
    """Return the bits that a frame makes of the old ones, once their checksum is proven.

    Raises:
        UnsupportedFormatError: The encoding or the checksum has an unknown name.
        MalformedError: The frame is cut short, or of a tensor of another size.
        DigestMismatchError: The frame, or its base, is another.
    """
    if encoding not in _APPLY or algorithm not in CHECKSUMS:
        raise UnsupportedFormatError(
            f"{key}: changes as {encoding!r} with checksums by {algorithm!r}",
            key=key,
            hint=f"known are {', '.join(_APPLY)} with {', '.join(CHECKSUMS)}",
        )
    new: Bits = _APPLY[encoding](frame.data, old.view(np.uint8), key).view(old.dtype)
    found = checksum(algorithm, new)
    if found != want:
        raise DigestMismatchError(
            f"{key}: the {algorithm} of the new bits",
            expected=want,
            actual=found,
            key=key,
            hint="the file is damaged, or its changes are of other weights: see --base",
        )
    return new


_MANIFEST: Final = "manifest.json"
_ALGORITHM: Final = "xxh3-128"


def _named(dtype: str) -> str:
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
    """``delta-00000007/`` has frames of what changed since number 6, and a manifest.

    Number 0 is the checkpoint that engines start from, here ``base/``; all later versions are
    changes. Source: SkyRL a9564572e (``delta_checkpoint.py``).
    """

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


@dataclass(frozen=True, slots=True)
class IndexedDialect(Dialect):
    """A folder a version, a checkpoint or frames, as its index says, which is written last.

    * slime: ``weight_v000007/``; version 0 is the checkpoint that engines start from. Source: slime
      624b824a8 (``update_weight_from_disk_delta.py``; miles 31f1ca961 writes the same), and
      ``/pull_weights`` of its SGLang.
    * ModelExpress: ``v7/``. Receivers learn of a version from a catalogue: make it READY there once
      its index is written. Source: ModelExpress 0.7.0
      (``modelexpress_rl/train/methods/canonical_delta.py``), its docs/S3_DELTA_WEIGHT_REFIT.md.
    """

    folder: str  # of a number, as a format string
    version: str  # name of a number in the index
    algorithm: str  # of checksums

    def number(self, key: str) -> int | None:
        folder, _, file = key.rpartition("/")
        found = re.search(r"\d{1,12}", folder)
        named = found is not None and folder == self.folder.format(int(found[0]))
        return int(found[0]) if found and named and files.is_checkpoint_marker(file) else None

    def full(self, number: int, model: HostModel) -> Objects:
        return files.checkpoint(self.folder.format(number), model)

    def delta(self, number: int, model: HostModel, changes: Sequence[ElementChange]) -> Objects:
        frames = (files.Array(one.spec.name, "U8", frame) for one, frame in xor_frames(changes))
        made = list(files.grouped(frames, lambda array: array.values.nbytes))
        folder, places = self.folder.format(number), dict[str, str]()
        for at, arrays in enumerate(made):
            file = f"model-{at:05d}-of-{len(made):05d}.safetensors"
            proofs = {a.name: checksum(self.algorithm, model.bits(a.name)) for a in arrays}
            places |= dict.fromkeys(proofs, file)
            yield f"{folder}/{file}", files.packed(arrays, proofs)
        yield f"{folder}/{INDEX_FILE}", self.index(number, places)

    def index(self, number: int, places: dict[str, str]) -> bytes:
        metadata = {
            "version": self.version.format(number),
            "base_version": self.version.format(number - 1),
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": self.algorithm,
        }
        return json.dumps({"metadata": metadata, "weight_map": places}).encode()

    def is_full(self, store: Store, key: str) -> bool:
        return not key.endswith(INDEX_FILE) or (
            "delta_encoding" not in files.read_index(store, key).metadata
        )

    def read(self, store: Store, key: str, before: HostModel | None) -> HostModel:
        number = self.number(key) or 0
        if self.is_full(store, key):
            return files.read_checkpoint(store, key)
        index, old = files.read_index(store, key), required(before, key)
        said = index.metadata
        versions = {"version": number, "base_version": number - 1}
        expected = {name: self.version.format(one) for name, one in versions.items()}
        found = {name: said.get(name) for name in expected}
        if found != expected or said.get("compression_format") != "zstd":
            raise MalformedError(f"{key}: expected {expected} of zstd, found {said}", key=key)
        encoding, algorithm = str(said["delta_encoding"]), str(said.get("checksum_format"))

        def new(file: files.TensorFile, name: str) -> Bits:
            return new_bits(
                file.read(file.entry(name, "U8")),
                old.bits(name),
                encoding=encoding,
                algorithm=algorithm,
                want=file.header.metadata.get(name, ""),
                key=f"{file.key}, {name}",
            )

        reads = dict[str, Callable[[], Bits]]()
        for file, names in index.files():
            opened = files.TensorFile.open(store, files.beside(key, file))
            reads |= {old.spec(name, key).name: partial(new, opened, name) for name in names}
        return old.changed(reads)


SLIME: Final = IndexedDialect("weight_v{:06d}", "{:06d}", "xxh3-128")
MODELEXPRESS: Final = IndexedDialect("v{}", "v{}", "adler32")
